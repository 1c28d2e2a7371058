"""The learning rate as a function of the step, for the optimizer and for whoever shows it: without torch."""

from __future__ import annotations

import math

from shoal.config import Train


def learning_rate(train: Train, steps: int, step: int, age: int | None = None) -> float:
    """Rate of step `step` (from 0) of `steps`: linear warm-up to the peak, then down to `final_ratio` of it at the last.

    `age`: steps since the moments were empty, where those are fewer; the rate warms up again over the first `local_warmup` of these."""
    warm_up = 1.0 if age is None or age >= train.local_warmup else (age + 1) / train.local_warmup
    return warm_up * _rate(train, steps, step)


def _rate(train: Train, steps: int, step: int) -> float:
    if step < train.warmup:
        return train.learning_rate * (step + 1) / train.warmup
    progress = min(1.0, (step - train.warmup) / max(1, steps - 1 - train.warmup))  # 0 at the peak, 1 at the last step
    if train.schedule == "constant":
        return train.learning_rate
    if train.schedule == "linear":
        factor = 1.0 - progress
    elif train.schedule == "cosine":
        factor = 0.5 * (1.0 + _cosine(progress))
    else:
        raise ValueError(f"train.schedule = {train.schedule!r} is none of cosine, linear, constant")
    return train.learning_rate * (train.final_ratio + (1.0 - train.final_ratio) * factor)


def _cosine(x: float) -> float:
    """cos(pi x) for x from 0 to 1, as the sine of the angle from the middle."""
    angle = math.pi * (0.5 - x)
    total, term = 0.0, angle
    for n in range(2, 24, 2):
        total += term
        term *= -(angle * angle) / (n * (n + 1))
    return total

"""A run's figures by step, from its committed steps: the one table behind the page's charts, `/metrics` and `run.log_to`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from shoal.config import Config, tokens_per_step
from shoal.core.messages import Rewards
from shoal.numerics.schedule import learning_rate
from shoal.runtime.records.account import CommittedStep

RATE_STEPS = 5  # that a step's tokens per second are measured over


class StepFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One committed step."""

    step: int  # from 1: steps committed with this one
    time_s: float  # since the first commit; of a machine that was restarted, without the pause
    tokens: int  # of the run so far
    loss: float | None  # None: the step changed nothing
    heldout_loss: float | None = None  # with the parameters before the step; None: it was not measured
    reward_accuracy: float | None = None  # of preference pairs; None: samples are none
    reward_margin: float | None = None
    heldout_reward_accuracy: float | None = None
    heldout_reward_margin: float | None = None
    gradient_norm: float | None
    learning_rate: float
    tokens_per_s: float | None  # None: unknown yet


class Series:
    """Figures of all committed steps, in order. `generation` is raised when earlier steps changed: the run went back."""

    def __init__(self, config: Config) -> None:
        self.figures: list[StepFigures] = []
        self.generation = 0
        self._config = config
        self._heard_s = 0.0  # of the newest commit

    def replace(self, steps: Sequence[CommittedStep]) -> None:
        self.figures.clear()
        self.generation += 1
        for step in steps:
            self.add(step)

    def add(self, step: CommittedStep) -> StepFigures:
        """A commit after all others."""
        passed_s = max(0.0, step.heard_s - self._heard_s) if self.figures else 0.0
        time_s = (self.figures[-1].time_s if self.figures else 0.0) + passed_s
        self._heard_s = step.heard_s
        commit, size = step.commit, tokens_per_step(self._config)
        rate_from = self.figures[max(0, len(self.figures) - RATE_STEPS)] if self.figures else None
        figures = StepFigures(
            step=commit.step + 1,
            time_s=time_s,
            tokens=(commit.step + 1) * size,
            loss=_finite(commit.loss) if not commit.skipped else None,
            heldout_loss=commit.heldout,
            **_rewards("", commit.rewards),
            **_rewards("heldout_", commit.heldout_rewards),
            gradient_norm=_finite(commit.norm) if not commit.skipped else None,
            learning_rate=learning_rate(self._config.train, self._config.run.steps, commit.step),
            tokens_per_s=(
                (commit.step + 1 - rate_from.step) * size / (time_s - rate_from.time_s)
                if rate_from is not None and time_s > rate_from.time_s
                else None
            ),
        )
        self.figures.append(figures)
        return figures


def columns(figures: Sequence[StepFigures], most: int) -> dict[str, list[float | None]]:
    """A list of values for each figure, of at most `most` of the steps, evenly spaced, and of the newest one."""
    stride = max(1, math.ceil(len(figures) / most))
    numbers = [number for number in range(len(figures)) if (len(figures) - 1 - number) % stride == 0]
    result = {name: [getattr(figures[at], name) for at in numbers] for name in StepFigures.__struct_fields__}
    for name in (name for name in result if name.startswith("heldout_")):
        result[name] = [_newest(name, figures[max(0, at - stride + 1) : at + 1]) for at in numbers]
    return result


def _newest(name: str, figures: Sequence[StepFigures]) -> float | None:
    """What was measured last in these steps."""
    return next((value for one in reversed(figures) if (value := getattr(one, name)) is not None), None)


def _rewards(of: str, rewards: Rewards | None) -> dict[str, float]:
    if rewards is None:
        return {}
    return {f"{of}reward_accuracy": rewards.accuracy, f"{of}reward_margin": rewards.margin}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

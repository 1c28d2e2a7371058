"""AdamW, its learning rate and the clip: plain functions of (settings, step), for the executors.

Nothing here keeps a step counter: schedule and bias correction take the step as an argument, so a rollback, a resume and
a joiner's first step need only the moments. Clipping uses the norm of the whole model, which the commit states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from shoal.config import Train

NORM_VALUES = 1 << 20  # squares are summed in fp64 in pieces: 8 MiB instead of twice the gradient
FUSED = ("cpu", "cuda", "mps")  # device types with a fused AdamW kernel in torch 2.13


def learning_rate(train: Train, steps: int, step: int, age: int | None = None) -> float:
    """Rate of step `step` (from 0) of `steps`: linear warm-up to the peak, then down to `final_ratio` of it at the last.

    `age`: steps since the moments were empty, where those are fewer; the rate warms up again over the first `local_warmup` of these."""
    warm_up = 1.0 if age is None or age >= train.local_warmup else (age + 1) / train.local_warmup
    return warm_up * _rate(train, steps, step)


class OptimizerStep(NamedTuple):
    """Learning rate and age of one optimizer step."""

    rate: float
    age: int  # steps since the moments were zero


Schedule = Callable[[int], OptimizerStep]  # by step


def scheduled(train: Train, steps: int) -> Schedule:
    """The schedule of `steps` steps whose moments are zero before step 0 only."""
    return lambda step: OptimizerStep(learning_rate(train, steps, step), step)


def _rate(train: Train, steps: int, step: int) -> float:
    if step < train.warmup:
        return train.learning_rate * (step + 1) / train.warmup
    progress = min(1.0, (step - train.warmup) / max(1, steps - 1 - train.warmup))  # 0 at the peak, 1 at the last step
    if train.schedule == "constant":
        return train.learning_rate
    if train.schedule == "linear":
        factor = 1.0 - progress
    elif train.schedule == "cosine":
        factor = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        raise ValueError(f"train.schedule = {train.schedule!r} is none of cosine, linear, constant")
    return train.learning_rate * (train.final_ratio + (1.0 - train.final_ratio) * factor)


def clip_factor(norm: float, clip: float) -> float:
    """The factor that clips a gradient of Euclidean norm `norm` to `clip` (0: no clipping); as torch.nn.utils.clip_grad_norm_."""
    return min(1.0, clip / (norm + 1e-6)) if clip > 0 else 1.0


def norm_sq(flat: Tensor) -> float:
    """Sum of squares in fp64 of a flat tensor."""
    return math.fsum(float(piece.double().square_().sum()) for piece in torch.split(flat, NORM_VALUES))


def nesterov_(values: Tensor, momentum: Tensor, gradient: Tensor, rate: float, keep: float) -> None:
    """One step of SGD with Nesterov momentum on flat tensors, as torch.optim.SGD: v = keep v + g, then x -= rate (g + keep v)."""
    momentum.mul_(keep).add_(gradient)
    values.sub_(torch.add(gradient, momentum, alpha=keep), alpha=rate)


def decays(parameter: Tensor) -> bool:
    """Matrices decay; vectors (norms, biases) do not."""
    return parameter.dim() >= 2


def adamw(parameters: Mapping[str, Tensor], train: Train) -> torch.optim.AdamW:
    """AdamW over fp32 parameters of one device, with moments allocated now, so that they can be read and loaded from the start."""
    values = list(parameters.values())
    groups = [
        {"params": [value for value in values if decays(value)], "weight_decay": train.weight_decay},
        {"params": [value for value in values if not decays(value)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=train.learning_rate,
        betas=train.betas,
        eps=train.epsilon,
        fused=all(value.device.type in FUSED for value in values),
    )
    for value in values:
        optimizer.state[value] = {
            "step": torch.zeros((), dtype=torch.float32, device=value.device),
            "exp_avg": torch.zeros_like(value, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(value, memory_format=torch.preserve_format),
        }
    return optimizer


def step_(optimizer: torch.optim.AdamW, lr: float, step: int) -> None:
    """AdamW step number `step` + 1 from the parameters' `.grad`."""
    for group in optimizer.param_groups:
        group["lr"] = lr
        for parameter in group["params"]:
            optimizer.state[parameter]["step"].fill_(float(step))
    optimizer.step()


class Optimizer(Protocol):
    """AdamW over fp32 parameters of one device, by name."""

    def step_(self, lr: float, step: int) -> None:
        """Step number `step` + 1 from the parameters' `.grad`."""
        ...

    def moments(self) -> dict[str, Tensor]:
        """The live tensors by kind and parameter (`exp_avg/NAME`), always in the same order. All zeros: empty moments."""
        ...


class AdamW:
    """fp32 moments."""

    def __init__(self, parameters: Mapping[str, Tensor], train: Train) -> None:
        self._parameters = dict(parameters)
        self._inner = adamw(self._parameters, train) if parameters else None

    def step_(self, lr: float, step: int) -> None:
        if self._inner is not None:
            step_(self._inner, lr, step)

    def moments(self) -> dict[str, Tensor]:
        state = self._inner.state if self._inner is not None else {}
        return {
            f"{kind}/{name}": state[value][kind]
            for kind in ("exp_avg", "exp_avg_sq")
            for name, value in self._parameters.items()
        }

"""AdamW, its learning rate and the clip: plain functions of (settings, step), for the executors.

Nothing here keeps a step counter: schedule and bias correction take the step as an argument, so a rollback, a resume and
a joiner's first step need only the moments. Clipping uses the norm of the whole model, which the commit states.

Replicas of a stage may be unlike machines and must hold the same bits. So every operation is one that IEEE 754 rounds in one way
(+ - * / and square roots), none is fused with another, and sums have a fixed order: torch's fused AdamW, `alpha=`, `addcmul` and
`sum` differ between vector units, and `torch.sqrt` on a CPU is MKL's, which is off by one bit in a fifth of all values
(docs/design/2026-11-22-same-bits.md). On a CPU one compiled loop does this (loops.py); elsewhere one torch operation after another.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from shoal.config import Train
from shoal.numerics import pieces
from shoal.numerics.schedule import learning_rate

NORM_VALUES = 1 << 20  # squares are summed in fp64 in pieces: 8 MiB instead of twice the gradient
PIECE = 1 << 20  # values per pass on a GPU: six tensors of 4 MiB stay in the 40 to 50 MiB of cache of an A100 or H100


class OptimizerStep(NamedTuple):
    """Learning rate and age of one optimizer step."""

    rate: float
    age: int  # steps since the moments were zero


Schedule = Callable[[int], OptimizerStep]  # by step


def scheduled(train: Train, steps: int) -> Schedule:
    """The schedule of `steps` steps whose moments are zero before step 0 only."""
    return lambda step: OptimizerStep(learning_rate(train, steps, step), step)


def clip_factor(norm: float, clip: float) -> float:
    """The factor that clips a gradient of Euclidean norm `norm` to `clip` (0: no clipping); as torch.nn.utils.clip_grad_norm_."""
    return min(1.0, clip / (norm + 1e-6)) if clip > 0 else 1.0


def norm_sq(flat: Tensor) -> float:
    """Sum of squares in fp64 of a flat tensor: halves are added to each other, an order that no vector unit or thread changes."""
    if flat.device.type == "mps":  # it has no fp64
        flat = flat.to("cpu")
    if flat.device.type != "cpu" or len(flat) < pieces.PIECE:
        sums = [_halved(piece) for piece in torch.split(flat, NORM_VALUES)]
        return math.fsum(torch.stack(sums).tolist()) if sums else 0.0
    from shoal.numerics.loops import sum_of_squares  # numba: half a second that only those who train pay

    return math.fsum(pieces.each(sum_of_squares, [piece.numpy() for piece in torch.split(flat, NORM_VALUES)]))


def _halved(piece: Tensor) -> Tensor:
    """loops.sum_of_squares by torch operations."""
    values = piece.double().square_()
    while len(values) > 1:
        half = len(values) // 2
        values[:half] += values[len(values) - half :]
        values = values[: len(values) - half]
    return values.sum()


def nesterov_(values: Tensor, momentum: Tensor, gradient: Tensor, rate: float, keep: float) -> None:
    """One step of SGD with Nesterov momentum on flat tensors, as torch.optim.SGD: v = keep v + g, then x -= rate (g + keep v)."""
    momentum.mul_(keep).add_(gradient)
    values.sub_(torch.mul(momentum, keep).add_(gradient).mul_(rate))


def decays(parameter: Tensor) -> bool:
    """Matrices decay; vectors (norms, biases) do not."""
    return parameter.dim() >= 2


class Factors(NamedTuple):
    """What one AdamW step multiplies and adds, rounded to fp32 once."""

    clip: float
    keep_first: float
    add_first: float
    keep_second: float
    add_second: float
    root: float  # of the square root of the second moment: its bias correction
    epsilon: float
    rate: float  # with the first moment's bias correction
    decay: float

    @classmethod
    def of(cls, train: Train, clip: float, lr: float, step: int, decay: bool) -> Factors:
        """Of AdamW step number `step` + 1."""
        first, second = train.betas
        return cls(
            clip=clip,
            keep_first=first,
            add_first=1.0 - first,
            keep_second=second,
            add_second=1.0 - second,
            root=1.0 / math.sqrt(1.0 - _power(second, step + 1)),
            epsilon=train.epsilon,
            rate=lr / (1.0 - _power(first, step + 1)),
            decay=1.0 - lr * train.weight_decay if decay else 1.0,
        )


def _power(base: float, exponent: int) -> float:
    """By multiplications alone: the C library's `pow` differs in the last bit from machine to machine, and so does its `cos`."""
    power = 1.0
    for bit in f"{exponent:b}":
        power *= power
        if bit == "1":
            power *= base
    return power


def adamw_(values: Tensor, gradient: Tensor, moments: tuple[Tensor, Tensor], factors: Factors) -> None:
    """One step on contiguous tensors of the same size and device."""
    tensors = [tensor.detach().view(-1) for tensor in (values, gradient, *moments)]
    if values.device.type != "cpu":
        for start in range(0, len(tensors[0]), PIECE):
            separate_(factors, *(tensor[start : start + PIECE] for tensor in tensors))
        return
    from shoal.numerics.loops import adamw  # numba: half a second that only those who train pay

    rounded = np.array(factors, dtype=np.float32)
    parts = max(1, min(torch.get_num_threads(), len(tensors[0]) // pieces.PIECE))
    pieces.each(functools.partial(adamw, rounded), *(np.array_split(tensor.numpy(), parts) for tensor in tensors))


def separate_(factors: Factors, values: Tensor, gradient: Tensor, first: Tensor, second: Tensor) -> None:
    """loops.adamw by torch operations on flat tensors, bit for bit: each rounds once, and none divides by a number."""
    clipped = gradient * factors.clip
    first.mul_(factors.keep_first).add_(clipped * factors.add_first)
    second.mul_(factors.keep_second).add_(clipped.mul_(clipped).mul_(factors.add_second))
    divisor = torch.sqrt(second, out=clipped).mul_(factors.root).add_(factors.epsilon)
    values.mul_(factors.decay).sub_((first * factors.rate).div_(divisor))


class Optimizer(Protocol):
    """An update rule over fp32 parameters of one device, by name."""

    def step_(self, gradients: Mapping[str, Tensor], clip: float, lr: float, step: int) -> None:
        """Step number `step` + 1 from `clip` times the gradients."""
        ...

    def moments(self) -> dict[str, Tensor]:
        """The live tensors by kind and parameter (`exp_avg/NAME`), always in the same order. All zeros: empty moments."""
        ...


class AdamW:
    """fp32 moments."""

    def __init__(self, parameters: Mapping[str, Tensor], train: Train) -> None:
        self._parameters, self._train = dict(parameters), train
        self._moments = {
            name: (torch.zeros_like(value.detach()), torch.zeros_like(value.detach()))
            for name, value in self._parameters.items()
        }

    def step_(self, gradients: Mapping[str, Tensor], clip: float, lr: float, step: int) -> None:
        for name, value in self._parameters.items():
            factors = Factors.of(self._train, clip, lr, step, decays(value))
            adamw_(value, gradients[name], self._moments[name], factors)

    def moments(self) -> dict[str, Tensor]:
        return {
            f"{kind}/{name}": moments[at]
            for at, kind in enumerate(("exp_avg", "exp_avg_sq"))
            for name, moments in self._moments.items()
        }

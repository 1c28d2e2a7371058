"""Computes a hop again and compares the result with another replica's: RunCheck. For task_runner.py.

Both were computed from the same bytes. Unlike machines differ by rounding, and a code can turn a difference of rounding into one step of
the code; so what is made here is encoded and decoded, too (docs/design/2026-11-24-spot-checks.md has the distances measured).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shoal.config import Config
from shoal.core.messages import Result, RunCheck
from shoal.executor.base import Evaluating, Executor, recompute
from shoal.executor.delayed import Delayed
from shoal.runtime.tasks import coding
from shoal.runtime.tasks.borders import Borders

PIECE = 1 << 22  # values that are compared at a time, in fp64


def check(
    task: RunCheck, executor: Executor, borders: Borders, config: Config, inputs: tuple[Tensor, Tensor | None, Tensor]
) -> Result:
    """`inputs`: x, the gradient of the output or the tokens, and the result that another replica has sent. ValueError: this executor
    cannot compute a hop again."""
    x, grad, theirs = inputs
    executor = executor.inside() if isinstance(executor, Delayed) else executor
    own, loss = _computed(task, executor, borders, x, grad)
    how = config.network.gradients if task.backward else config.network.activations
    own = coding.plain(coding.packed(borders.plain(task, own), how))
    return Result(loss=loss, distance=distance(own, theirs))


def _computed(
    task: RunCheck, executor: Executor, borders: Borders, x: Tensor, grad: Tensor | None
) -> tuple[Tensor, float | None]:
    given = borders.input(task, x)
    if not task.backward:
        y = executor.evaluate(given, None) if isinstance(executor, Evaluating) else executor.forward(given)
        assert isinstance(y, Tensor)
        return y, None
    own, loss = recompute(executor, given, borders.gradient(task, grad), grad)
    assert own is not None  # core checks no backward of the first stage
    return own, loss


def distance(own: Tensor, theirs: Tensor) -> float:
    """Norm of the difference, as a share of the norm of `own`; infinite where that is 0 and `theirs` is not. ValueError: other shapes."""
    if own.shape != theirs.shape:
        raise ValueError(f"a result {tuple(theirs.shape)} where {tuple(own.shape)} belongs")
    squares = apart = 0.0
    for mine, other in zip(torch.split(own.reshape(-1), PIECE), torch.split(theirs.reshape(-1), PIECE), strict=True):
        mine = mine.to("cpu", torch.float64)
        squares += float(mine.square().sum())
        apart += float((other.to("cpu", torch.float64) - mine).square().sum())
    if squares == 0.0:
        return 0.0 if apart == 0.0 else math.inf
    return math.sqrt(apart / squares)

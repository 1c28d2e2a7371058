"""Takes a fixed time per microbatch and computes nothing: many peers on one machine, timed as if each had its own device.

Tensors have the configured sizes. Sum, parameter and optimizer state are real, so that a lost or doubled microbatch shows:
each backward adds one share of the batch, and a step subtracts the sum from the parameter.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from shoal.config import Config, microbatches
from shoal.executor.base import HopResult, NotFinite, boundary, boundary_gradient, copy_state_, digest_of


class Emulated:
    """See base.Executor. `sleep` is replaced in tests."""

    base = ""

    def __init__(self, config: Config, stage: int, sleep: Callable[[float], None] = time.sleep) -> None:
        self._first = stage == 0
        self._last = stage == config.run.stages - 1
        self._forward_s = config.device.emulated_s
        self._backward_s = config.device.emulated_backward_s or 2 * config.device.emulated_s
        self._share = 1.0 / microbatches(config.train)
        self._sleep = sleep
        # One tensor for every answer, never written to: time goes to the modelled work, not to clearing memory.
        self._boundary = torch.zeros(boundary(config).shape, dtype=torch.float32)
        self._back = torch.zeros(boundary_gradient(config).shape, dtype=torch.float32)
        self.length = config.device.emulated_gradient
        self.sum = torch.zeros(self.length)
        self._parameter, self._exp_avg, self._exp_avg_sq = (torch.zeros(self.length) for _ in range(3))
        # For the contract of Restorable; nothing reads it.
        self.computing = (self._parameter.clone() if config.train.staleness else self._parameter,)

    def forward(self, x: Tensor) -> Tensor:
        self._sleep(self._forward_s)
        return self._boundary

    def backward(self, x: Tensor, grad: Tensor | None, tokens: Tensor | None) -> tuple[Tensor | None, float | None]:
        if (tokens if self._last else grad) is None:
            raise ValueError("the last stage runs back from tokens, every other one from a gradient")
        self._sleep(self._backward_s)
        self.sum += self._share
        return self._answer()

    def recompute(self, x: Tensor, grad: Tensor | None, tokens: Tensor | None, into: Tensor) -> HopResult:
        self._sleep(self._backward_s)
        into += self._share
        return HopResult(None if self._last else self._boundary, *self._answer())

    def _answer(self) -> tuple[Tensor | None, float | None]:
        """Of a backward."""
        return None if self._first else self._back, 1.0 if self._last else None

    def evaluate(self, x: Tensor, tokens: Tensor | None) -> Tensor | float:
        self._sleep(self._forward_s)
        return self._boundary if tokens is None else 1.0

    def zero(self, step: int = 0) -> None:
        self.sum.zero_()

    def contribution(self, start: int = 0, stop: int | None = None) -> Tensor:
        return self.sum[start:stop].clone()

    def restore(self, contribution: Tensor) -> None:
        """Set the sum to an earlier `contribution`, (length,) fp32."""
        self.sum.copy_(contribution)

    def apply(self, reduced: Tensor, norm: float, step: int, scale: float = 1.0) -> None:
        if tuple(reduced.shape) != (self.length,):
            raise ValueError(f"a reduced gradient {tuple(reduced.shape)}, not ({self.length},)")
        if not math.isfinite(norm):
            raise NotFinite(f"norm = {norm}")
        self._parameter -= reduced * scale

    make = apply

    def state(self) -> dict[str, Tensor]:
        return {
            "model/emulated": self._parameter,
            "exp_avg/emulated": self._exp_avg,
            "exp_avg_sq/emulated": self._exp_avg_sq,
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        copy_state_(self.state(), state)
        self.refresh()

    def digest(self) -> str:
        return digest_of([self._parameter])

    def refresh(self) -> None:
        if self.computing[0] is not self._parameter:
            self.compute_with([self._parameter])

    def compute_with(self, values: Sequence[Tensor]) -> None:
        self.computing[0].copy_(values[0])

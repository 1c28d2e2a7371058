"""The fp32 parameters of a stage and their optimizer, on any device: changed by a step, written to a checkpoint, covered by the digest.

For the executors, which keep the rounded copies to compute with and refresh them after a change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shoal.config import Config, Train
from shoal.executor.base import copy_state_, digest_of
from shoal.numerics.eightbit import EightBit
from shoal.numerics.muon import Muon
from shoal.numerics.optimizer import AdamW, Optimizer, Schedule, clip_factor, scheduled


class Master:
    """Parameters by name, in the order of the flat gradient. `schedule` replaces that of `config`."""

    def __init__(
        self, names: Sequence[str], parameters: Sequence[Tensor], config: Config, schedule: Schedule | None = None
    ) -> None:
        self.parameters = tuple(parameters)
        self.length = sum(value.numel() for value in self.parameters)
        self._names = tuple(names)
        self._clip = config.train.clip
        self._schedule = schedule or scheduled(config.train, config.run.steps)
        named = dict(zip(self._names, self.parameters, strict=True))
        self._optimizer = _optimizer(named, config.train)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of `flat` (length,), one per parameter."""
        parts = torch.split(flat, [value.numel() for value in self.parameters])
        return [part.view(value.shape) for part, value in zip(parts, self.parameters, strict=True)]

    def apply(self, reduced: Tensor, norm: float, step: int, scale: float = 1.0) -> None:
        if tuple(reduced.shape) != (self.length,) or reduced.dtype != torch.float32:
            raise ValueError(f"a reduced gradient {tuple(reduced.shape)} {reduced.dtype}, not ({self.length},) fp32")
        gradients = dict(zip(self._names, self.views(reduced.to(self.parameters[0].device)), strict=True))
        self._optimizer.step_(gradients, clip_factor(norm, self._clip) * scale, *self._schedule(step))

    def state(self) -> dict[str, Tensor]:
        named = zip(self._names, self.parameters, strict=True)
        return {**{f"model/{name}": value.detach() for name, value in named}, **self._optimizer.moments()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        copy_state_(self.state(), state)

    def digest(self) -> str:
        return digest_of(self.parameters)


def _optimizer(parameters: Mapping[str, Tensor], train: Train) -> Optimizer:
    if train.optimizer == "muon":
        return Muon(parameters, train)
    return EightBit(parameters, train) if train.moments == "8bit" else AdamW(parameters, train)

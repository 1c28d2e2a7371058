"""Serves texts with a stage and trains nothing: its parameters in train.dtype are all that it holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.config import Config
from shoal.executor.base import DTYPES, copy_state_, device_of, digest_of
from shoal.executor.inputs import check_input
from shoal.model.cut import Stage


class Serving:
    """See base.Executor, whose training a run of run.serve never asks for."""

    base = ""

    def __init__(self, stage: Stage, config: Config) -> None:
        self._stage, self._dtype, self._device = stage, DTYPES[config.train.dtype], device_of(config)
        self._parameters = dict(stage.named_parameters())
        for value in self._parameters.values():
            value.data = value.data.to(self._device, self._dtype)
            value.requires_grad_(False)
        self.length = sum(value.numel() for value in self._parameters.values())
        self.sum = torch.zeros(0)

    def infer(self, x: Tensor, cache: Any) -> tuple[Tensor, Any]:
        return self._stage.infer(self._input(x), cache)

    def forward(self, x: Tensor) -> Tensor:
        return self._stage.forward(self._input(x))

    def backward(self, x: Tensor, grad: Tensor | None, tokens: Tensor | None) -> tuple[Tensor | None, float | None]:
        raise ValueError("this run serves texts (run.serve); nothing is trained")

    def zero(self, step: int = 0) -> None:
        """There is no sum."""

    def contribution(self, start: int = 0, stop: int | None = None) -> Tensor:
        raise ValueError("this run serves texts (run.serve); nothing is averaged")

    def apply(self, reduced: Tensor, norm: float, step: int, scale: float = 1.0) -> None:
        raise ValueError("this run serves texts (run.serve); nothing is trained")

    def state(self) -> dict[str, Tensor]:
        return {f"model/{name}": value.detach() for name, value in self._parameters.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        copy_state_(self.state(), state)

    def digest(self) -> str:
        return digest_of(self._parameters.values())

    def refresh(self) -> None:
        """The parameters are computed with as they are."""

    def _input(self, x: Tensor) -> Tensor:
        x = check_input(self._stage, x)
        return x.to(self._device, self._dtype) if x.is_floating_point() else x.to(self._device)

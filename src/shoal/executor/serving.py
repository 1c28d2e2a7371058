"""A stage that serves texts and trains nothing: its weights in train.dtype, or frozen ones with adapters, are all it holds. And all
stages, for evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.config import Config
from shoal.executor.base import (
    DTYPES,
    base_of,
    check_device,
    copy_state_,
    device_of,
    digest_of,
    prepare_thread,
    with_base,
)
from shoal.executor.inputs import check_input
from shoal.model import stages
from shoal.model.cut import Stage, counted, inputs, rows_of
from shoal.model.stages import HuggingFaceStage


class Serving:
    """See base.Executor, whose training a run of run.serve never asks for."""

    def __init__(self, stage: Stage, config: Config) -> None:
        """`stage`: on the device to compute on. `state` holds of it what training changes: all weights, or adapters."""
        self._stage, self._dtype, self._device = stage, DTYPES[config.train.dtype], device_of(config)
        self.base = base_of(stage)
        self._parameters = dict(stage.named_parameters())
        for value in self._parameters.values():
            value.data = value.data.to(self._dtype)
            value.requires_grad_(False)
        self.length = sum(value.numel() for value in self._parameters.values())
        self.sum = torch.zeros(0)

    def infer(self, x: Tensor, cache: Any) -> tuple[Tensor, Any]:
        return self._stage.infer(self._input(x), cache)

    def forward(self, x: Tensor) -> Tensor:
        return self._stage.forward(self._input(x))

    def losses(self, x: Tensor, tokens: Tensor) -> list[float]:
        """Of each sequence of (B, L + 1) `tokens`, at the last stage: the sum of its counted tokens' losses."""
        x = self._input(x)
        parts = zip(torch.split(x, 1), torch.split(tokens, 1), strict=True)
        return [float(self._stage.loss(part, row)) * (row.numel() - 1) for part, row in parts]

    def margins(self, tokens: Tensor) -> list[float]:
        """Of each preference pair of (2 P, L + 1) `tokens`, where this is the only stage: see model/layers/pairs.py."""
        assert isinstance(self._stage, HuggingFaceStage) and self._stage.first and self._stage.last
        x = self._input(inputs(tokens))
        parts = zip(torch.split(x, 2), torch.split(tokens, 2), strict=True)
        return [float(self._stage.margins(part, pair, part)) for part, pair in parts]

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
        return with_base(digest_of(self._parameters.values()), self.base)

    def refresh(self) -> None:
        """The parameters are computed with as they are."""

    def _input(self, x: Tensor) -> Tensor:
        x = check_input(self._stage, x)
        return x.to(self._device, self._dtype) if x.is_floating_point() else x.to(self._device)


class Chain:
    """The model of a checkpoint: in the stages of training where boundary layers stand between them, else in one."""

    def __init__(self, config: Config, source: Path) -> None:
        """ValueError: a tensor is missing, or this machine has no such device."""
        run = msgspec.structs.replace(config.run, serve=True)
        if config.model.boundary == "none":
            run = msgspec.structs.replace(run, stages=1, layers=())
        config = msgspec.structs.replace(config, run=run)
        check_device(config)
        prepare_thread(config)
        self._batch, self._device = config.device.sequences or config.train.microbatch, str(device_of(config))
        built = [
            stages.build(config, number, source=str(source), device=self._device) for number in range(config.run.stages)
        ]
        self._stages = [Serving(stage, config) for stage in built]

    def losses(self, samples: Iterable[npt.NDArray[np.int64]]) -> Iterator[list[tuple[float, int]]]:
        """Of each sample (L + 1,), batch by batch: the sum of its counted tokens' losses, and their number."""
        ordered = iter(samples)
        while batch := list(islice(ordered, self._batch)):
            tokens = torch.from_numpy(np.stack(batch))
            yield list(zip(self._sums(tokens), [counted(row[None]) for row in tokens], strict=True))

    def margins(self, samples: Iterable[npt.NDArray[np.int64]]) -> Iterator[float]:
        """Of each preference pair (2 L + 1,): by how much the chosen answer's reward is above the rejected one's."""
        (stage,) = self._stages  # boundary layers and adapters exclude each other
        for sample in samples:
            with torch.inference_mode():
                yield from stage.margins(rows_of(torch.from_numpy(sample)[None], 2).to(self._device))

    def _sums(self, tokens: Tensor) -> list[float]:
        x = inputs(tokens)
        with torch.inference_mode():
            for stage in self._stages[:-1]:
                x = stage.forward(x)
            return self._stages[-1].losses(x, tokens.to(self._device))

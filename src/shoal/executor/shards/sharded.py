"""Runs a stage over `device.count` devices of this machine: rank 0 here, the others in processes of their own (follower.py).

What leaves it (outputs, gradients, state, digests) is whole and in the layout of resident.py, so that it can be a replica beside
any other. Any failure of one process but a result that is not finite ends the group (group.py): DeviceLost, and the peer ends with it.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from shoal.config import Config
from shoal.executor import base
from shoal.executor.inputs import BackwardInput, check_ends, check_input
from shoal.executor.shards.commands import Apply, Backward, Build, Contribution, Forward, Gather, Load, Shape, Zero
from shoal.executor.shards.group import Group, group_of
from shoal.executor.shards.member import Member

KINDS = ("model", "exp_avg", "exp_avg_sq")


class Sharded:
    """See base.Executor; `state` and `sum` are copies on the host. Of a group's executors only the newest may be used."""

    base = ""

    def __init__(self, config: Config, stage: int, source: str | None = None, group: Group | None = None) -> None:
        self._config = config
        self._group = group or group_of(base.device_of(config), config.device.count)
        build = Build(config, stage, source)
        gc.collect()  # an earlier stage, whose blocks and hooks refer to one another
        self._member = Member(build, 0)
        self._stage = self._member.stage
        self._group.build(build)
        self.length = self._member.length

    @property
    def sum(self) -> Tensor:
        return self.contribution()

    def forward(self, x: Tensor) -> Tensor:
        x = self._input(x)

        def run() -> Tensor:
            y = self._member.forward(self._rows(x))
            assert y is not None
            return y

        return self._group.all(Forward(_shape(x)), run)

    def backward(self, x: Tensor, grad: Tensor | None, tokens: Tensor | None) -> tuple[Tensor | None, float | None]:
        x = self._input(x)
        check_ends(self._stage, x, grad, tokens)
        if grad is not None:
            self._check_rows(grad)
            grad = grad.to(x.dtype if x.is_floating_point() else base.DTYPES[self._config.train.dtype])
        tokens = tokens if self._stage.last else None

        def run() -> tuple[Tensor | None, float | None]:
            given = [None if value is None else self._rows(value) for value in (x, grad, tokens)]
            assert given[0] is not None
            return self._member.backward(BackwardInput(given[0], given[1], given[2]))

        return self._group.all(Backward(_shape(x), Shape.of(grad), Shape.of(tokens)), run)

    def zero(self, step: int = 0) -> None:
        self._group.all(Zero(), self._member.zero)

    def contribution(self, start: int = 0, stop: int | None = None) -> Tensor:
        start, stop, _ = slice(start, stop).indices(self.length)
        stop = max(start, stop)
        return self._group.all(Contribution(start, stop), lambda: self._member.contribution(start, stop))

    def apply(self, reduced: Tensor, norm: float, step: int, scale: float = 1.0) -> None:
        if tuple(reduced.shape) != (self.length,) or reduced.dtype != torch.float32:
            raise ValueError(f"a reduced gradient {tuple(reduced.shape)} {reduced.dtype}, not ({self.length},) fp32")
        self._group.all(Apply(norm, step, scale), lambda: self._member.apply(reduced, norm, step, scale))

    def state(self) -> dict[str, Tensor]:
        """A copy: no process has the whole."""
        return self._named([self._gather(kind) for kind in range(len(KINDS))])

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        flats = [torch.empty(self.length) for _ in KINDS]
        base.copy_state_(self._named(flats), state)
        for kind, flat in enumerate(flats):
            self._group.all(Load(kind), partial(self._member.load, kind, flat))

    def digest(self) -> str:
        return base.digest_of(self._views(self._gather(0)))

    def refresh(self) -> None:
        """Nothing to do: blocks are collected from the parameters whenever they compute."""

    def _gather(self, kind: int) -> Tensor:
        return self._group.all(Gather(kind), lambda: self._member.gather(kind))

    def _views(self, flat: Tensor) -> list[Tensor]:
        shapes = self._member.shapes
        return [
            part.view(shape)
            for part, shape in zip(torch.split(flat, [shape.numel() for shape in shapes]), shapes, strict=True)
        ]

    def _named(self, flats: list[Tensor]) -> dict[str, Tensor]:
        return {
            f"{kind}/{name}": value
            for kind, flat in zip(KINDS, flats, strict=True)
            for name, value in zip(self._member.names, self._views(flat), strict=True)
        }

    def _input(self, x: Tensor) -> Tensor:
        x = check_input(self._stage, x).detach()
        self._check_rows(x)
        return x.to(base.DTYPES[self._config.train.dtype]) if x.is_floating_point() else x

    def _check_rows(self, x: Tensor) -> None:
        if len(x) % self._config.device.count:
            raise ValueError(
                f"{len(x)} sequences cannot be shared out among device.count = {self._config.device.count}"
            )

    def _rows(self, whole: Tensor) -> Tensor:
        return self._member.scatter_rows(whole, _shape(whole).rows(self._config.device.count, self._member.device))


def _shape(x: Tensor) -> Shape:
    return Shape(tuple(x.shape), str(x.dtype))

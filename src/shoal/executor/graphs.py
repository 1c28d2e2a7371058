"""Keeps the activations (the autograd graph) of forwards while memory is left, so that their backward does not recompute. For resident.py.

A graph is used for the same bytes of input only, and none outlives the parameters that it was computed with: whoever writes to those
calls `clear`. So a backward gives the same bits with and without it, and which attempt or owner asks does not matter.
Bounded by device.kept_activations in number, and in bytes, of which one microbatch is measured: by what device.memory_bytes
leaves, or else by what is free at that moment on device or host, of which half stays for everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal import host
from shoal.config import Config, inflight
from shoal.core.trainer.window import MOST
from shoal.executor import base, fit
from shoal.kept import Kept
from shoal.model.cut import Stage
from shoal.model.saved import saved_by_autograd

SPARE = 0.5  # of the memory that was free when the stage was built
BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class Graph(NamedTuple):
    """Of one slice of a microbatch: the input, a leaf, and the output. `sample`: whose values were dropped, see dropout.Masks."""

    x: Tensor
    y: Tensor
    sample: tuple[int, int] | None


class Graphs:
    """Of one stage, in the order of its forwards."""

    def __init__(self, stage: Stage, config: Config) -> None:
        most = config.device.kept_activations
        if most < 0:
            # No more are ever between a forward and its backward
            most = (inflight(config.run) or MOST) * config.run.peers
        self._stage, self._config, self._device = stage, config, base.device_of(config)
        self._most = 0 if stage.last else most  # the last stage runs no forward of its own
        self._parameters = [*(value for _, value in stage.named_parameters()), *stage.frozen()]
        self._nbytes: int | None = None  # of one microbatch, measured
        limit_bytes = float("inf")
        if config.device.memory_bytes:
            limit_bytes = config.device.memory_bytes - fit.stage_bytes(stage, config)
        self._spare_bytes = SPARE * self._free_bytes()
        self.kept: Kept[list[Graph]] = Kept(self._most, limit_bytes)

    def forward(self, xs: Sequence[Tensor]) -> list[Tensor] | None:
        """The outputs of a microbatch's slices, whose graphs are kept; None: there is no room."""
        if not self._most:
            return None
        if self._nbytes is None:
            own = {value.untyped_storage()._cdata for value in self._parameters}
            with saved_by_autograd(own) as sizes:
                graphs = self._run(xs)
            self._nbytes = sum(sizes.values()) + sum(graph.y.nbytes for graph in graphs)
            return [graph.y.detach() for graph in graphs]
        if not self._has_room(self._nbytes):
            return None
        try:
            graphs = self._run(xs)
        except Exception as error:
            if not base.out_of_memory(error):
                raise
            self.give_up()
            return None
        self.kept.add(graphs, self._nbytes)
        return [graph.y.detach() for graph in graphs]

    def take(self, xs: Sequence[Tensor]) -> list[Graph] | None:
        """The graphs of these slices; they can be used once."""
        sample = self._stage.masks.sample if self._stage.masks is not None else None
        return self.kept.take(
            lambda graphs: graphs[0].sample == sample and all(map(_same_bits, (graph.x for graph in graphs), xs))
        )

    def clear(self) -> None:
        """The parameters change, or the step is over."""
        self.kept.clear()

    def give_up(self) -> None:
        """Memory was too short: keep no more from now on."""
        self._most = 0
        self.kept.clear()

    def _run(self, xs: Sequence[Tensor]) -> list[Graph]:
        masks, graphs = self._stage.masks, []
        with torch.enable_grad():
            for at, x in enumerate(xs):
                leaf = x.detach() if self._stage.first else x.detach().requires_grad_()
                if masks is not None:
                    masks.at(at, len(x))
                graphs.append(Graph(leaf, self._stage.forward(leaf), masks.sample if masks is not None else None))
        return graphs

    def _has_room(self, nbytes: int) -> bool:
        # Twice: a backward needs about as much again while it runs.
        room = self.kept.has_room(2 * nbytes if self._config.device.memory_bytes else nbytes)
        return room and (bool(self._config.device.memory_bytes) or self._free_bytes() - nbytes >= self._spare_bytes)

    def _free_bytes(self) -> int:
        free_bytes = base.free_bytes(self._device)
        return (host.free_bytes() or 0) if free_bytes is None else free_bytes


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    bits = BITS[one.dtype.itemsize]
    return torch.equal(one.detach().view(bits), other.detach().view(bits))

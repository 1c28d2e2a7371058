"""The groups of a swapping stage: chosen for the memory there is, run one way and back, and tried out before anything is loaded.

For swapping.py, which moves their parameters, and for `check`, which asks of every stage of a run, before training begins and
without its weights, whether it fits this machine. What one slice takes on the device cannot be counted from shapes alone:
units are run once on zeros of the right shapes, on the device itself, one group at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal.config import Config, microbatches, slices
from shoal.executor.base import DTYPES, boundary
from shoal.executor.inputs import outcome
from shoal.executor.swap import memory
from shoal.model.cut import Stage
from shoal.model.units import Row, row


class Group(NamedTuple):
    """Units that are on the device together, and where their parameters and sums lie there."""

    start: int
    stop: int
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    sums: tuple[Tensor | None, ...]  # none: an earlier group uses the parameter too, and adds both gradients
    ready: Callable[[], None]  # called before something is added to the sums


class End(NamedTuple):
    """What a slice's way back through a group starts from."""

    x: Tensor  # input of the group
    grad: Tensor | None  # of its output
    tokens: Tensor | None


class Back(NamedTuple):
    """What came of it, on the host."""

    grad: Tensor | None  # of the group's input
    loss: Tensor | None
    finite: Tensor


Shapes = Mapping[str, torch.Size]  # of a stage's parameters, in order


class Runner:
    """Runs groups of a stage's units with whatever parameters are bound to them. The stage must not be run beside it."""

    def __init__(self, stage: Stage, config: Config) -> None:
        if config.device.kind == "mps":
            raise ValueError("device.kind = 'mps' shares its memory with the host; use device.executor=resident")
        self.device, self.dtype = config.device.kind, DTYPES[config.train.dtype]
        self.shapes: Shapes = {name: value.shape for name, value in stage.named_parameters()}
        self.row: Row = row(stage)
        spare = memory.spare_bytes(self.device, config.device.memory_bytes)
        self.fixed_bytes = self.row.buffers_to(self.device) + spare
        counts = {name: shape.numel() for name, shape in self.shapes.items()}
        self.sizes = memory.Sizes(self.row.units, counts, self.dtype.itemsize, config.train.moments)
        self._parts = microbatches(config.train) * slices(config)  # whose mean losses make the batch's
        self._config = config

    def plan(self) -> memory.Plan:
        """ValueError: the largest unit does not fit `device.memory_bytes`."""
        limit = self._config.device.memory_bytes
        return memory.plan(self.sizes, Trial(self, self._config).live, limit=limit, fixed_bytes=self.fixed_bytes)

    def refuse(self) -> None:
        """ValueError: no plan fits `device.memory_bytes`."""
        limit = self._config.device.memory_bytes
        memory.refuse(self.sizes, Trial(self, self._config).live, limit=limit, fixed_bytes=self.fixed_bytes)

    def names(self, start: int, stop: int) -> tuple[str, ...]:
        """Parameters of these units, each once, in the stage's order."""
        used = {name for unit in self.row.units[start:stop] for name in unit}
        return tuple(name for name in self.shapes if name in used)

    def bound(
        self, span: tuple[int, int], parameters: dict[str, nn.Parameter], slab: Tensor, ready: Callable[[], None]
    ) -> Group:
        """A group that computes with these parameters and adds its gradients to `slab`."""
        own = [name for name in parameters if name in self.sizes.own(*span)]
        starts = accumulate((self.shapes[name].numel() for name in own), initial=0)
        sums = {
            name: slab[at : at + self.shapes[name].numel()].view(self.shapes[name])
            for name, at in zip(own, starts, strict=False)
        }
        for unit in range(*span):
            for name in self.row.units[unit]:
                self.row.bind(unit, name, parameters[name])
        in_order = tuple(sums.get(name) for name in parameters)
        return Group(*span, tuple(parameters), tuple(parameters.values()), in_order, ready)

    def back(self, stage: Stage, group: Group, end: End, shared: dict[str, Tensor]) -> Back:
        """One slice through one group and back, its gradients added to the slab."""
        x, grad, tokens = (None if value is None else self.toward(value) for value in end)
        assert x is not None
        wanted: list[Tensor] = list(group.parameters)
        if not stage.first:
            wanted.append(x.requires_grad_())
        with torch.enable_grad():
            y, grad_y, loss = outcome(stage, x, grad, tokens)
            y = y if loss is None else y / self._parts
            found = list(torch.autograd.grad(y, wanted, grad_y, allow_unused=True, materialize_grads=True))
        finite = torch.stack([torch.isfinite(part).all() for part in found]).all()
        grad_x = None if stage.first else self.away(found.pop())
        group.ready()
        for name, part, into in zip(group.names, found, group.sums, strict=True):
            whole = part + self.toward(shared.pop(name)) if name in shared else part
            if into is None:
                shared[name] = self.away(whole)  # for the group still to come that uses it too
            else:
                into.add_(whole)
        return Back(grad_x, None if loss is None else self.away(loss), self.away(finite))

    def toward(self, value: Tensor) -> Tensor:
        """A copy on the device."""
        return value.detach().to(self.device, non_blocking=True, copy=True)

    def away(self, value: Tensor) -> Tensor:
        """A copy on the host. On a CUDA device it is there after `settle`; what runs later on the device may use it at once."""
        with memory.host():
            there = torch.empty(value.shape, dtype=value.dtype, pin_memory=self.device == "cuda")
            return there.copy_(value.detach(), non_blocking=True)


class Trial:
    """Groups in memory of their own, all zeros: to see what running them takes."""

    def __init__(self, runner: Runner, config: Config) -> None:
        self._runner = runner
        count = config.device.sequences or config.train.microbatch
        self._tokens = torch.zeros(count, config.data.sequence + 1, dtype=torch.int64)
        (_, *rest), dtype = boundary(config)
        whole = runner.row.group(0, len(runner.row.units))
        first = (
            self._tokens[:, :-1]
            if whole.first and whole.vocabulary is not None
            else torch.zeros((count, *rest), dtype=dtype)
        )
        self._inputs = [first]  # of each unit, as far as they are known

    def live(self, start: int, stop: int) -> int:
        """Most bytes that a slice takes on the device while it runs through these units and back."""
        runner = self._runner
        while len(self._inputs) <= stop:
            self._inputs.append(self._output(len(self._inputs) - 1))
        group, stage = self._group(start, stop), runner.row.group(start, stop)
        later = {name for unit in runner.row.units[stop:] for name in unit}
        halves = {name: torch.zeros(runner.shapes[name], dtype=runner.dtype) for name in group.names if name in later}
        end = End(self._inputs[start], *((None, self._tokens) if stage.last else (self._inputs[stop], None)))
        watch = memory.Watch(runner.device)
        with watch:
            runner.back(stage, group, end, halves)
        return watch.peak

    def _output(self, unit: int) -> Tensor:
        self._group(unit, unit + 1)
        with torch.no_grad():
            y = self._runner.row.group(unit, unit + 1).forward(self._runner.toward(self._inputs[unit]))
        return y.to("cpu")

    def _group(self, start: int, stop: int) -> Group:
        runner = self._runner
        names = runner.names(start, stop)
        parameters = {
            name: nn.Parameter(torch.zeros(runner.shapes[name], dtype=runner.dtype, device=runner.device))
            for name in names
        }
        own = sum(runner.shapes[name].numel() for name in runner.sizes.own(start, stop))
        return runner.bound((start, stop), parameters, torch.zeros(own, device=runner.device), lambda: None)

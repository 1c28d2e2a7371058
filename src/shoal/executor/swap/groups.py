"""The groups of layers of a swapping stage: chosen for the available memory, run forward and backward, measured before loading.

For swapping.py, which moves their parameters, and for `executor.check`, which tests every stage of a run without its weights.
The device memory of one slice does not follow from shapes alone: each group runs once on the device with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal.config import Config, microbatches, slices
from shoal.executor.base import DTYPES, boundary, device_of, memory_limit
from shoal.executor.inputs import BackwardInput, add_, outcome
from shoal.executor.swap import memory
from shoal.model.cut import Stage, with_borders
from shoal.model.units import Row, row
from shoal.numerics.muon import single_moments


class LayerGroup(NamedTuple):
    """Units that are on the device together, with their parameters and sums there."""

    start: int
    stop: int
    names: tuple[str, ...]  # of those that are trained
    parameters: tuple[nn.Parameter, ...]
    sums: tuple[Tensor | None, ...]  # None: an earlier group shares the parameter and adds both gradients
    begun: Callable[[], None]  # called once a slice's inputs are on their way to the device
    ready: Callable[[], None]  # called before the sums are added to
    passes_back: bool  # an earlier unit, or another stage, needs the gradient of its input

    @property
    def learns(self) -> bool:
        """Has it a backward pass? None of a frozen embedding that begins a model."""
        return bool(self.parameters) or self.passes_back


class GroupResult(NamedTuple):
    """Results of a slice's backward pass through a group, on the host."""

    grad: Tensor | None  # of the group's input
    loss: Tensor | None
    finite: Tensor


Shapes = Mapping[str, torch.Size]  # of a stage's parameters, in order


class Runner:
    """Runs groups of a stage's units with the parameters bound to them. The stage itself must not run meanwhile."""

    def __init__(self, stage: Stage, config: Config) -> None:
        device = device_of(config)
        if device.type not in ("cpu", "cuda"):
            why = "shares its memory with the host" if device.type == "mps" else "has no streams for it here"
            raise ValueError(
                f"device.executor = 'swapping' is for cuda, and {device} {why}; try device.executor=resident"
            )
        self.device, self.dtype, self.limit = str(device), DTYPES[config.train.dtype], memory_limit(config)
        self.shapes: Shapes = {name: value.shape for name, value in stage.named_parameters()}
        self.frozen = {name: (value.shape, value.dtype) for name, value in stage.named_frozen()}
        self._first = stage.first
        self.row: Row = row(stage)
        spare = memory.spare_bytes(self.device, self.limit)
        self.fixed_bytes = self.row.buffers_to(self.device) + spare
        counts = {name: shape.numel() for name, shape in self.shapes.items()}
        frozen = {name: shape.numel() * dtype.itemsize for name, (shape, dtype) in self.frozen.items()}
        single = single_moments(self.shapes, config.train)
        self.sizes = memory.UnitSizes(self.row.units, counts, self.dtype.itemsize, config.train.moments, frozen, single)
        self._parts = microbatches(config.train) * slices(config)  # slices per step
        self._config = config

    def plan(self) -> memory.SwapPlan:
        """ValueError: the largest unit does not fit `device.memory_bytes`."""
        return memory.plan(self.sizes, Trial(self, self._config).live, limit=self.limit, fixed_bytes=self.fixed_bytes)

    def refuse(self) -> None:
        """ValueError: no plan fits `device.memory_bytes`."""
        memory.refuse(self.sizes, Trial(self, self._config).live, limit=self.limit, fixed_bytes=self.fixed_bytes)

    def names(self, start: int, stop: int) -> tuple[str, ...]:
        """Names of these units' parameters, each once, in the stage's order, those that are not trained last."""
        used = {name for unit in self.row.units[start:stop] for name in unit}
        return tuple(name for name in (*self.shapes, *self.frozen) if name in used)

    def bind(
        self,
        span: tuple[int, int],
        parameters: dict[str, nn.Parameter],
        slab: Tensor,
        begun: Callable[[], None],
        ready: Callable[[], None],
    ) -> LayerGroup:
        """A group that computes with these parameters and adds its gradients to `slab`."""
        trained = {name: value for name, value in parameters.items() if name in self.shapes}
        own = [name for name in trained if name in self.sizes.own(*span)]
        starts = accumulate((self.shapes[name].numel() for name in own), initial=0)
        sums = {
            name: slab[at : at + self.shapes[name].numel()].view(self.shapes[name])
            for name, at in zip(own, starts, strict=False)
        }
        for unit in range(*span):
            for name in self.row.units[unit]:
                self.row.bind(unit, name, parameters[name])
        in_order = tuple(sums.get(name) for name in trained)
        earlier = (name for unit in self.row.units[: span[0]] for name in unit)
        passes_back = not self._first or any(name in self.shapes for name in earlier)
        return LayerGroup(*span, tuple(trained), tuple(trained.values()), in_order, begun, ready, passes_back)

    def back(self, stage: Stage, group: LayerGroup, end: BackwardInput, shared: dict[str, Tensor]) -> GroupResult:
        """Recompute one group on one slice, differentiate, add the gradients to the slab."""
        x, grad, tokens = (None if value is None else self.to_device(value) for value in end)
        assert x is not None
        group.begun()
        variables: list[Tensor] = list(group.parameters)
        if group.passes_back:
            variables.append(x.requires_grad_())
        with torch.enable_grad():
            y, grad_y, loss = outcome(stage, BackwardInput(x, grad, tokens))
            y = y if loss is None else y / self._parts
            gradients = list(torch.autograd.grad(y, variables, grad_y, allow_unused=True, materialize_grads=True))
        # Least and largest are finite where all are: one pass, and no memory, of which isfinite takes more than the tensor has.
        finite = torch.stack([end for part in gradients for end in torch.aminmax(part)]).isfinite().all()
        grad_x = self.to_host(gradients.pop()) if group.passes_back else None
        group.ready()
        for name, part, into in zip(group.names, gradients, group.sums, strict=True):
            whole = part + self.to_device(shared.pop(name)) if name in shared else part
            if into is None:
                shared[name] = self.to_host(whole)  # for the later group that shares it
            else:
                add_(into, whole)
        return GroupResult(grad_x, None if loss is None else self.to_host(loss), self.to_host(finite))

    def to_device(self, value: Tensor) -> Tensor:
        """A copy on the device."""
        return value.detach().to(self.device, non_blocking=True, copy=True)

    def to_host(self, value: Tensor) -> Tensor:
        """A copy on the host. With CUDA the host may read it after the pass; later work on the device may use it at once."""
        with memory.host():
            copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=self.device.startswith("cuda"))
            return copy.copy_(value.detach(), non_blocking=True)


class Trial:
    """Groups of zeros in memory of their own, to measure what running them takes."""

    def __init__(self, runner: Runner, config: Config) -> None:
        self._runner = runner
        count = config.device.sequences or config.train.microbatch
        middle, end = config.data.sequence // 2, config.data.document_end
        self._tokens = torch.zeros(count, config.data.sequence + 1, dtype=torch.int64)
        (_, *rest), dtype = boundary(config)
        whole = runner.row.group(0, len(runner.row.units))
        first = (
            self._tokens[:, :-1]
            if whole.first and whole.vocabulary is not None
            else torch.zeros((count, *rest), dtype=dtype)
        )
        if end >= 0:  # two documents, so that there are masks
            self._tokens[:, middle] = end
            if first.is_floating_point():
                first = with_borders(first, torch.arange(config.data.sequence).expand(count, -1) == middle)
        self._inputs = [first]  # of each unit, as far as computed

    def live(self, start: int, stop: int) -> int:
        """Peak device bytes of a slice in these units, forward and backward."""
        runner = self._runner
        while len(self._inputs) <= stop:
            self._inputs.append(self._output(len(self._inputs) - 1))
        group, stage = self._group(start, stop), runner.row.group(start, stop)
        later = {name for unit in runner.row.units[stop:] for name in unit}
        shared = {name: torch.zeros(runner.shapes[name], dtype=runner.dtype) for name in group.names if name in later}
        group_input = BackwardInput(
            self._inputs[start], *((None, self._tokens) if stage.last else (self._inputs[stop], None))
        )
        meter = memory.MemoryMeter(runner.device)
        try:
            with meter:
                if group.learns:
                    runner.back(stage, group, group_input, shared)
                else:
                    self._forward(start, stop)
        finally:
            self._free(start, stop)
        seen_bytes = memory.padded(meter.peak) + memory.ALIGN  # numbers that kernels make tensors of
        return seen_bytes + memory.unseen_bytes(runner.device, runner.dtype, seen_bytes)

    def _output(self, unit: int) -> Tensor:
        self._group(unit, unit + 1)
        y = self._forward(unit, unit + 1)
        self._free(unit, unit + 1)
        return y.to("cpu")

    def _forward(self, start: int, stop: int) -> Tensor:
        with torch.no_grad():
            return self._runner.row.group(start, stop).forward(self._runner.to_device(self._inputs[start]))

    def _free(self, start: int, stop: int) -> None:
        """Free these units' parameters, which would take room from the next trial."""
        for unit in range(start, stop):
            for name in self._runner.row.units[unit]:
                self._runner.row.bind(unit, name, nn.Parameter(torch.empty(0)))

    def _group(self, start: int, stop: int) -> LayerGroup:
        runner = self._runner
        names = runner.names(start, stop)
        parameters = {
            name: nn.Parameter(torch.zeros(runner.shapes[name], dtype=runner.dtype, device=runner.device))
            for name in names
            if name in runner.shapes
        }
        for name in names:
            if name in runner.frozen:
                shape, dtype = runner.frozen[name]
                zeros = torch.zeros(shape, dtype=dtype, device=runner.device)
                parameters[name] = nn.Parameter(zeros, requires_grad=False)
        own = sum(runner.shapes[name].numel() for name in runner.sizes.own(start, stop))
        return runner.bind((start, stop), parameters, torch.zeros(own, device=runner.device), _nothing, _nothing)


def _nothing() -> None: ...

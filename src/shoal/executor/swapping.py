"""Runs a stage larger than its device: layers lie in host memory and pass through device memory, group by group.

Paper: ATOM (arXiv 2403.10504). Claim: a model that fits the memory of a host trains on a small device, because the copy of
the next group of layers hides behind the work of several microbatches on this one. Here: the order is layer-major
(`run_many`, `backward_many`: group outside, microbatches inside), the last group stays between forward and backward, so a
pass takes 2M-1 loads of M groups. What we changed: sums of gradients travel with their group and come back once per pass;
groups are chosen by memory measured on one microbatch (memory.py); any stage of a pipeline can swap, not just a whole model.

Nothing is computed otherwise than by the resident executor: on a CPU both give the same bits. There the "device" is memory of
its own, with real copies into it, so that order and bound are those of a GPU. The optimizer steps on the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal.config import Config, microbatches, slices
from shoal.executor import memory
from shoal.executor.base import DTYPES, NotFinite, boundary
from shoal.executor.inputs import check_ends, checked, cut, joined, outcome
from shoal.executor.link import Cargo, Link, pinned, runs
from shoal.executor.master import Master
from shoal.model.cut import Stage
from shoal.model.units import row


class Group(NamedTuple):
    """Units that are on the device together, and where their parameters and sums lie there."""

    start: int
    stop: int
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    sums: tuple[Tensor | None, ...]  # none: an earlier group uses the parameter too, and adds both gradients
    ready: Callable[[], None]  # called before something is added to the sums


class End(NamedTuple):
    """What a microbatch's way back through a group starts from."""

    x: Tensor  # input of the group
    grad: Tensor | None  # of its output
    tokens: Tensor | None


class Back(NamedTuple):
    """What came of it, on the host."""

    grad: Tensor | None  # of the group's input
    loss: Tensor | None
    finite: Tensor


Inputs = list[Tensor]  # of each group, for one microbatch, on the host; the stage's own input first


class Swapping:
    """See base.Executor. Tensors are returned on the host. `sum` is to be read, not written, and is another tensor after
    each backward: a refused microbatch must leave it as it was, and may be found out when some groups have been added."""

    def __init__(self, stage: Stage, config: Config) -> None:
        if config.device.kind == "mps":
            raise ValueError("device.kind = 'mps' shares its memory with the host; use device.executor=resident")
        self._config, self._device = config, config.device.kind
        self._dtype = DTYPES[config.train.dtype]
        self._slice = config.device.sequences or config.train.microbatch
        self._parts = microbatches(config.train) * slices(config)  # whose mean losses make the batch's
        named = list(stage.named_parameters())
        self._host = Host(named, self._dtype, self._device)
        self._row = row(stage)
        fixed_bytes = self._row.buffers_to(self._device)
        for _, parameter in named:
            parameter.data = torch.empty(0)  # the groups' own will take its place
        self._sizes = memory.Sizes(self._row.units, self._host.counts, self._dtype.itemsize)
        self.plan = memory.plan(self._sizes, self._measure(), limit=config.device.memory_bytes, fixed_bytes=fixed_bytes)
        spans = [(group.start, group.stop) for group in self.plan.groups]
        cargo = [self._host.cargo(self._names(*span), self._sizes.own(*span)) for span in spans]
        self._link = Link(self._host.computing, cargo, self._device)
        self._groups = [self._placed(index, *span) for index, span in enumerate(spans)]
        self._master = Master(tuple(self._host.counts), self._host.parameters, config)
        self.length = self._master.length
        self.sum, self._pending = (pinned(torch.zeros(self.length), self._device) for _ in range(2))
        self._empty = True  # nothing in `sum`
        self._kept: deque[Inputs] = deque(maxlen=config.run.queue_limit * slices(config))

    # ----------------------------------------------------------------------------------------------------- the contract

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(self.run_many(x.split(self._slice)))

    def backward(self, x: Tensor, grad: Tensor | None, tokens: Tensor | None) -> tuple[Tensor | None, float | None]:
        return joined(self.backward_many(*zip(*cut(self._slice, x, grad, tokens), strict=True)))

    def zero(self, step: int = 0) -> None:
        self._link.settle()
        self.sum.zero_()
        self._empty = True

    def brought(self) -> Tensor:
        self._link.settle()
        return self.sum.clone()

    def apply(self, reduced: Tensor, norm: float, step: int, age: int | None = None) -> None:
        self._link.settle()
        self._master.apply(reduced, norm, step, age)
        self._changed()

    def state(self) -> dict[str, Tensor]:
        return self._master.state()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self._link.settle()
        self._master.load_state(state)
        self._changed()

    def digest(self) -> str:
        return self._master.digest()

    # -------------------------------------------------------------------------------------------------- several at once

    def run_many(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """`forward` of several slices of microbatches, each group loaded once. NotFinite: one of them is, and none is answered."""
        whole = self._row.group(0, len(self._row.units))
        inputs = self._forwards([self._input(whole, x) for x in xs], len(self._groups))
        self._link.settle()
        ys = [its.pop() for its in inputs]
        if not all(torch.isfinite(y).all() for y in ys):
            raise NotFinite("the stage's output is not finite")
        self._kept.extend(inputs)
        return ys

    def backward_many(
        self, xs: Sequence[Tensor], grads: Sequence[Tensor | None], tokens: Sequence[Tensor | None]
    ) -> list[tuple[Tensor | None, float | None]]:
        """`backward` of several slices, added in their order. On a ValueError none of them is in the sum."""
        whole = self._row.group(0, len(self._row.units))
        ends = [End(self._input(whole, x), *rest) for x, *rest in zip(xs, grads, tokens, strict=True)]
        for end in ends:
            check_ends(whole, *end)
        inputs = self._passed([end.x for end in ends])
        shared: list[dict[str, Tensor]] = [{} for _ in ends]
        losses: list[Tensor | None] = []
        finite: list[Tensor] = []
        for index in reversed(range(len(self._groups))):
            group, stage = self._enter(index, index - 1)
            self._link.open(index, None if self._empty else self.sum)
            for place, (end, its) in enumerate(zip(ends, inputs, strict=True)):
                back = self._back(stage, group, end._replace(x=its[index]), shared[place])
                ends[place] = End(end.x, back.grad, None)
                losses.append(back.loss)  # those of the last group come first
                finite.append(back.finite)
            self._link.close(index, self._pending)
        self._link.settle()
        if not all(finite):
            raise NotFinite("the stage's gradient is not finite")
        self.sum, self._pending, self._empty = self._pending, self.sum, False
        return [(end.grad, None if loss is None else float(loss)) for end, loss in zip(ends, losses, strict=False)]

    @property
    def loads(self) -> int:
        """Groups whose parameters were copied to the device, so far."""
        return self._link.loads

    @property
    def held_bytes(self) -> int:
        """Device memory that is held all the time. What a microbatch needs comes on top while it runs."""
        return self.plan.fixed_bytes + self._link.nbytes

    # -------------------------------------------------------------------------------------------------- group by group

    def _passed(self, xs: Sequence[Tensor]) -> list[Inputs]:
        """Inputs of every group for each microbatch: kept from its forward pass, or found by running it again."""
        kept = [self._take(x) for x in xs]
        missing = [x for x, its in zip(xs, kept, strict=True) if its is None]
        again = iter(self._forwards(missing, len(self._groups) - 1) if missing else ())
        return [next(again) if its is None else its for its in kept]

    def _take(self, x: Tensor) -> Inputs | None:
        for place, inputs in enumerate(self._kept):
            if inputs[0].shape == x.shape and torch.equal(inputs[0], x):
                del self._kept[place]
                return inputs
        return None

    def _forwards(self, xs: Sequence[Tensor], groups: int) -> list[Inputs]:
        """Each microbatch's input, and what the first `groups` groups make of it one after another."""
        found = [[self._away(x)] for x in xs]
        for index in range(groups):
            _, stage = self._enter(index, index + 1)
            for inputs in found:
                with torch.no_grad():
                    inputs.append(self._away(stage.forward(self._toward(inputs[-1]))))
        return found

    def _enter(self, index: int, following: int) -> tuple[Group, Stage]:
        self._link.enter(index, following if 0 <= following < len(self._groups) else None)
        group = self._groups[index]
        return group, self._row.group(group.start, group.stop)

    def _back(self, stage: Stage, group: Group, end: End, shared: dict[str, Tensor]) -> Back:
        """One microbatch through one group and back, its gradients added to the slab."""
        x, grad, tokens = (None if value is None else self._toward(value) for value in end)
        assert x is not None
        wanted: list[Tensor] = list(group.parameters)
        if not stage.first:
            wanted.append(x.requires_grad_())
        with torch.enable_grad():
            y, grad_y, loss = outcome(stage, x, grad, tokens)
            y = y if loss is None else y / self._parts
            found = list(torch.autograd.grad(y, wanted, grad_y, allow_unused=True, materialize_grads=True))
        finite = torch.stack([torch.isfinite(part).all() for part in found]).all()
        grad_x = None if stage.first else self._away(found.pop())
        group.ready()
        for name, part, into in zip(group.names, found, group.sums, strict=True):
            whole = part + self._toward(shared.pop(name)) if name in shared else part
            if into is None:
                shared[name] = self._away(whole)  # for the group still to come that uses it too
            else:
                into.add_(whole)
        return Back(grad_x, None if loss is None else self._away(loss), self._away(finite))

    # ------------------------------------------------------------------------------------------------- there and back

    def _input(self, whole: Stage, x: Tensor) -> Tensor:
        x = checked(whole, x).detach()
        return x.to("cpu", self._dtype) if x.is_floating_point() else x.to("cpu")

    def _toward(self, value: Tensor) -> Tensor:
        """A copy on the device."""
        return value.detach().to(self._device, non_blocking=True, copy=True)

    def _away(self, value: Tensor) -> Tensor:
        """A copy on the host. On a CUDA device it is there after `settle`; what runs later on the device may use it at once."""
        with memory.host():
            there = torch.empty(value.shape, dtype=value.dtype, pin_memory=self._device == "cuda")
            return there.copy_(value.detach(), non_blocking=True)

    def _changed(self) -> None:
        self._host.refresh()
        self._link.forget()
        self._kept.clear()

    # ------------------------------------------------------------------------------------------------------- when made

    def _names(self, start: int, stop: int) -> tuple[str, ...]:
        """Parameters of these units, each once, in the order of the host's."""
        used = {name for unit in self._row.units[start:stop] for name in unit}
        return tuple(name for name in self._host.counts if name in used)

    def _placed(self, index: int, start: int, stop: int) -> Group:
        """A group with its parameters in its slot and its sums in the slab, for good."""
        slot, names = self._link.slots[index % 2], self._names(start, stop)
        starts = accumulate((self._host.padded(name) for name in names), initial=0)
        parameters = {
            name: nn.Parameter(self._host.shaped(slot, at, name)) for name, at in zip(names, starts, strict=False)
        }
        return self._bound((start, stop), parameters, self._link.slab, self._link.sums_ready)

    def _bound(
        self, span: tuple[int, int], parameters: dict[str, nn.Parameter], slab: Tensor, ready: Callable[[], None]
    ) -> Group:
        own = [name for name in parameters if name in self._sizes.own(*span)]
        starts = accumulate((self._host.counts[name] for name in own), initial=0)
        sums = {name: self._host.shaped(slab, at, name) for name, at in zip(own, starts, strict=False)}
        for unit in range(*span):
            for name in self._row.units[unit]:
                self._row.bind(unit, name, parameters[name])
        in_order = tuple(sums.get(name) for name in parameters)
        return Group(*span, tuple(parameters), tuple(parameters.values()), in_order, ready)

    def _trial(self, start: int, stop: int) -> Group:
        """A group in memory of its own, all zeros: to see what running it takes."""
        names = self._names(start, stop)
        shapes = {name: self._host.shapes[name] for name in names}
        parameters = {
            name: nn.Parameter(torch.zeros(shape, dtype=self._dtype, device=self._device))
            for name, shape in shapes.items()
        }
        own = sum(self._host.counts[name] for name in self._sizes.own(start, stop))
        return self._bound((start, stop), parameters, torch.zeros(own, device=self._device), lambda: None)

    def _measure(self) -> memory.Live:
        """What a slice of a microbatch takes on the device, by running one through these units."""
        data = self._config.data
        tokens = torch.zeros(self._slice, data.sequence + 1, dtype=torch.int64)
        (_, *rest), dtype = boundary(self._config)
        shape = self._slice, *rest
        whole = self._row.group(0, len(self._row.units))
        kinds = [tokens[:, :-1] if whole.first and whole.vocabulary is not None else torch.zeros(shape, dtype=dtype)]
        for unit in range(len(self._row.units)):
            self._trial(unit, unit + 1)
            with torch.no_grad():
                kinds.append(self._row.group(unit, unit + 1).forward(self._toward(kinds[-1])).to("cpu"))

        def live(start: int, stop: int) -> int:
            group, stage = self._trial(start, stop), self._row.group(start, stop)
            later = {name for unit in self._row.units[stop:] for name in unit}
            halves = {
                name: torch.zeros(self._host.shapes[name], dtype=self._dtype) for name in group.names if name in later
            }
            end = End(kinds[start], None if stage.last else kinds[stop], tokens if stage.last else None)
            with memory.Watch(self._device) as watch:
                self._back(stage, group, end, halves)
            return watch.peak

        return live


class Host:
    """A stage's parameters in host memory: flat, in fp32, and beside them the rounded copies that compute, if those differ.

    Each begins at a multiple of memory.ALIGN, here as in a slot; in the flat gradient they lie without gaps."""

    def __init__(self, named: Sequence[tuple[str, Tensor]], dtype: torch.dtype, device: str) -> None:
        self.counts = {name: value.numel() for name, value in named}
        self.shapes = {name: value.shape for name, value in named}
        self._itemsize = dtype.itemsize
        starts = list(accumulate((self.padded(name) for name in self.counts), initial=0))
        self._starts = dict(zip(self.counts, starts, strict=False))
        self._in_sum = dict(zip(self.counts, accumulate(self.counts.values(), initial=0), strict=False))
        self._flat = torch.zeros(starts[-1])
        self.parameters = tuple(self.shaped(self._flat, self._starts[name], name) for name in self.counts)
        for parameter, (_, value) in zip(self.parameters, named, strict=True):
            parameter.copy_(value.detach())
        self.computing = pinned(self._flat if dtype == torch.float32 else self._flat.to(dtype), device)

    def padded(self, name: str) -> int:
        """Values that a parameter takes with the gap behind it."""
        return memory.padded(self.counts[name] * self._itemsize) // self._itemsize

    def shaped(self, flat: Tensor, start: int, name: str) -> Tensor:
        return flat[start : start + self.counts[name]].view(self.shapes[name])

    def cargo(self, names: Sequence[str], own: Sequence[str]) -> Cargo:
        """`own`: those of `names` whose gradient is added with them."""
        return Cargo(
            parameters=runs([(self._starts[name], self.padded(name)) for name in names]),
            sums=runs([(self._in_sum[name], self.counts[name]) for name in names if name in own]),
        )

    def refresh(self) -> None:
        """Round the parameters, which have changed, to the copies that compute."""
        if self.computing is not self._flat:
            self.computing.copy_(self._flat)

"""Runs a stage larger than its device: layers lie in host memory and pass through device memory, group by group.

Paper: ATOM (arXiv 2403.10504). Claim: a model that fits the memory of a host trains on a small device, because the copy of
the next group of layers hides behind the work of several microbatches on this one. Here: the order is layer-major
(`run_many`, `backward_many`: group outside, microbatches inside), the last group stays between forward and backward, so a
pass takes 2M-1 loads of M groups. What we changed: sums of gradients travel with their group and come back once per pass;
groups are chosen by memory measured on one slice (groups.py, memory.py); any stage of a pipeline can swap, not just a whole model.

Nothing is computed otherwise than by the resident executor: on a CPU both give the same bits. There the "device" is memory of
its own, with real copies into it, so that order and bound are those of a GPU. The optimizer steps on the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from shoal.config import Config, slices
from shoal.executor.base import NotFinite
from shoal.executor.inputs import check_ends, checked, cut, joined
from shoal.executor.master import Master
from shoal.executor.swap import memory
from shoal.executor.swap.groups import End, Group, Runner
from shoal.executor.swap.link import Cargo, Link, Streams, pinned, runs
from shoal.model.cut import Stage, inputs
from shoal.numerics.optimizer import Schedule

Inputs = list[Tensor]  # of each group, for one microbatch, on the host; the stage's own input first


class Swapping:
    """See base.Executor. Tensors are returned on the host. `sum` is to be read, not written, and is another tensor after
    each backward: a refused microbatch must leave it as it was, and may be found out when some groups have been added."""

    def __init__(
        self, stage: Stage, config: Config, streams: Streams | None = None, schedule: Schedule | None = None
    ) -> None:
        named = list(stage.named_parameters())
        self._runner = runner = Runner(stage, config)
        self._row, self._device = runner.row, runner.device
        self._slice = config.device.sequences or config.train.microbatch
        self._host = Host(named, runner.dtype, self._device, apart=bool(config.train.staleness))
        for _, parameter in named:
            parameter.data = torch.empty(0)  # the groups' own will take its place
        self.plan = runner.plan()
        memory.cap_(self._device, config.device.memory_bytes)
        spans = [(group.start, group.stop) for group in self.plan.groups]
        cargo = [self._host.cargo(runner.names(*span), runner.sizes.own(*span)) for span in spans]
        self._link = Link(self._host.computing, cargo, self._device, self.plan.slabs, streams)
        self._groups = [self._placed(index, *span) for index, span in enumerate(spans)]
        self._master = Master(tuple(self._host.counts), self._host.parameters, config, schedule)
        self.length = self._master.length
        self.sum, self._pending = (pinned(torch.zeros(self.length), self._device) for _ in range(2))
        self._empty = True  # nothing in `sum`
        self._kept: deque[Inputs] = deque(maxlen=config.run.queue_limit * slices(config))

    # ----------------------------------------------------------------------------------------------------- the contract

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(self.run_many(torch.split(x, self._slice)))

    def backward(self, x: Tensor, grad: Tensor | None, tokens: Tensor | None) -> tuple[Tensor | None, float | None]:
        return joined(self.backward_many(*zip(*cut(self._slice, x, grad, tokens), strict=True)))

    def zero(self, step: int = 0) -> None:
        self._link.settle()
        self.sum.zero_()
        self._empty = True

    def brought(self, start: int = 0, stop: int | None = None) -> Tensor:
        self._link.settle()
        return self.sum[start:stop].clone()

    def restore(self, brought: Tensor) -> None:
        """The sum is again what `brought` gave, (length,) fp32."""
        self._link.settle()
        self.sum.copy_(brought)
        self._empty = False

    def apply(self, reduced: Tensor, norm: float, step: int) -> None:
        self._link.settle()
        self.make(reduced, norm, step)
        self._changed()

    def make(self, reduced: Tensor, norm: float, step: int) -> None:
        """`apply` to the parameters alone; see delayed.py."""
        self._master.apply(reduced, norm, step)

    def state(self) -> dict[str, Tensor]:
        return self._master.state()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self._link.settle()
        self._master.load_state(state)
        self._changed()

    def digest(self) -> str:
        return self._master.digest()

    def refresh(self) -> None:
        self._link.settle()
        self._changed()

    @property
    def computing(self) -> tuple[Tensor, ...]:
        """The copies on the host that groups are loaded from, in the order of the parameters."""
        return self._host.copies

    def compute_with(self, values: Sequence[Tensor]) -> None:
        self._link.settle()
        for copy, value in zip(self._host.copies, values, strict=True):
            copy.copy_(value)
        self._forget()

    # -------------------------------------------------------------------------------------------------- several at once

    def run_many(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """`forward` of several slices of microbatches, each group loaded once. NotFinite: one of them is, and none is answered."""
        whole = self._row.group(0, len(self._row.units))
        kept = self._forwards([self._input(whole, x) for x in xs], len(self._groups))
        self._link.settle()
        ys = [its.pop() for its in kept]
        if not all(torch.isfinite(y).all() for y in ys):
            raise NotFinite("the stage's output is not finite")
        self._kept.extend(kept)
        return ys

    def backward_many(
        self, xs: Sequence[Tensor], grads: Sequence[Tensor | None], tokens: Sequence[Tensor | None]
    ) -> list[tuple[Tensor | None, float | None]]:
        """`backward` of several slices, added in their order. On a ValueError none of them is in the sum."""
        whole = self._row.group(0, len(self._row.units))
        ends = [End(self._input(whole, x), *rest) for x, *rest in zip(xs, grads, tokens, strict=True)]
        for end in ends:
            check_ends(whole, *end)
        passed = self._passed([end.x for end in ends])
        shared: list[dict[str, Tensor]] = [{} for _ in ends]
        losses: list[Tensor | None] = []
        finite: list[Tensor] = []
        for index in reversed(range(len(self._groups))):
            group, stage = self._enter(index)
            self._link.open(index, None if self._empty else self.sum)
            if index:
                self._link.prefetch(index - 1)
            for place, (end, its) in enumerate(zip(ends, passed, strict=True)):
                back = self._runner.back(stage, group, end._replace(x=its[index]), shared[place])
                self._link.computed(index, True)
                ends[place] = End(end.x, back.grad, None)
                losses.append(back.loss)  # those of the last group come first
                finite.append(back.finite)
            self._link.close(index, self._pending)
        self._link.settle()
        if not all(finite):
            raise NotFinite("the stage's gradient is not finite")
        self.sum, self._pending, self._empty = self._pending, self.sum, False
        return [(end.grad, None if loss is None else float(loss)) for end, loss in zip(ends, losses, strict=False)]

    def batch_back(self, batch: Sequence[Tensor]) -> list[float]:
        """Microbatches (B, L+1) of tokens through a model of one stage and back, added in their order. Their mean losses."""
        ends = [end for tokens in batch for end in cut(self._slice, inputs(tokens), None, tokens)]
        found = self.backward_many(*zip(*ends, strict=True))
        each = len(found) // len(batch)
        losses = [joined(found[at : at + each])[1] for at in range(0, len(found), each)]
        return [loss for loss in losses if loss is not None]

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
        for place, its in enumerate(self._kept):
            if its[0].shape == x.shape and torch.equal(its[0], x):
                del self._kept[place]
                return its
        return None

    def _forwards(self, xs: Sequence[Tensor], groups: int) -> list[Inputs]:
        """Each microbatch's input, and what the first `groups` groups make of it one after another."""
        found = [[self._runner.away(x)] for x in xs]
        for index in range(groups):
            _, stage = self._enter(index)
            if index + 1 < len(self._groups):
                self._link.prefetch(index + 1)
            for its in found:
                with torch.no_grad():
                    its.append(self._runner.away(stage.forward(self._runner.toward(its[-1]))))
                self._link.computed(index, False)
        return found

    def _enter(self, index: int) -> tuple[Group, Stage]:
        self._link.enter(index)
        group = self._groups[index]
        return group, self._row.group(group.start, group.stop)

    # ------------------------------------------------------------------------------------------------- there and back

    def _input(self, whole: Stage, x: Tensor) -> Tensor:
        x = checked(whole, x).detach()
        return x.to("cpu", self._runner.dtype) if x.is_floating_point() else x.to("cpu")

    def _changed(self) -> None:
        self._host.refresh()
        self._forget()

    def _forget(self) -> None:
        """What computes has changed."""
        self._link.forget()
        self._kept.clear()

    # ------------------------------------------------------------------------------------------------------- when made

    def _placed(self, index: int, start: int, stop: int) -> Group:
        """A group with its parameters in its slot and its sums in the slab, for good."""
        slot, names = self._link.slots[index % 2], self._runner.names(start, stop)
        starts = accumulate((self._host.padded(name) for name in names), initial=0)
        parameters = {
            name: nn.Parameter(self._host.shaped(slot, at, name)) for name, at in zip(names, starts, strict=False)
        }
        return self._runner.bound(
            (start, stop), parameters, self._link.slab(index), lambda: self._link.sums_ready(index)
        )


class Host:
    """A stage's parameters in host memory: flat, in fp32, and beside them the rounded copies that compute, if those differ or are to
    be `apart`.

    Each begins at a multiple of memory.ALIGN, here as in a slot; in the flat gradient they lie without gaps."""

    def __init__(self, named: Sequence[tuple[str, Tensor]], dtype: torch.dtype, device: str, apart: bool) -> None:
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
        copied = apart or dtype != torch.float32
        self.computing = pinned(self._flat.to(dtype, copy=True) if copied else self._flat, device)
        self.copies = tuple(self.shaped(self.computing, self._starts[name], name) for name in self.counts)

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

"""Runs a stage larger than its device: layers stay in host memory and are loaded into device memory group by group.

Paper: ATOM (arXiv 2403.10504). Claim: a model that fits in host memory trains on a small device, because the prefetch of
the next group of layers overlaps with the compute of several microbatches on this one. Here: the order is layer-major
(`run_many`, `backward_many`: group outside, microbatches inside), the last group stays between forward and backward, so a
pass takes 2M-1 loads of M groups. What we changed: gradient sums are loaded and stored with their group, once per pass;
groups are chosen by memory measured on one slice (groups.py, memory.py); any stage of a pipeline can swap, not only a whole model.

The computation is that of the resident executor: on a CPU both give the same bits. There the "device" is separate memory with
real copies, so that order and limit are those of a GPU. The optimizer runs on the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from shoal.config import Config, slices
from shoal.executor.base import NotFinite, base_of, with_base
from shoal.executor.inputs import BackwardInput, check_ends, check_input, cut, joined
from shoal.executor.master import Master
from shoal.executor.streams import Streams
from shoal.executor.swap import memory
from shoal.executor.swap.frozen import FrozenWeights
from shoal.executor.swap.groups import LayerGroup, Runner
from shoal.executor.swap.link import GroupTransfers, HostLink, Segment, pinned, segments
from shoal.model.cut import Stage, inputs
from shoal.numerics import pieces
from shoal.numerics.compress import finite
from shoal.numerics.optimizer import Schedule

Activations = list[Tensor]  # of one slice: the input of each group, on the host; the stage's own input first


class Swapping:
    """See base.Executor. Results are on the host. `sum` is read-only and another tensor after each backward: a failing microbatch
    must leave it unchanged, and may fail when some groups have been added."""

    def __init__(
        self, stage: Stage, config: Config, streams: Streams | None = None, schedule: Schedule | None = None
    ) -> None:
        self.base = base_of(stage)
        named = list(stage.named_parameters())
        frozen = list(stage.named_frozen())
        self._runner = runner = Runner(stage, config)
        self._row, self._device = runner.row, runner.device
        self._slice = config.device.sequences or config.train.microbatch
        apart = bool(config.train.staleness)
        self._host = HostParameters(named, FrozenWeights(frozen, self._device), runner.dtype, self._device, apart)
        for _, parameter in named:
            parameter.data = torch.empty(0)  # replaced by the groups' tensors
        self.plan = runner.plan()
        memory.cap_(self._device, runner.limit)
        spans = [(group.start, group.stop) for group in self.plan.groups]
        transfers = [self._transfers(*span) for span in spans]
        sources = (self._host.computing.view(torch.uint8), self._host.frozen.flat)
        self._link = HostLink(sources, transfers, self._device, self.plan.slabs, streams)
        self._groups = [self._bind(index, *span) for index, span in enumerate(spans)]
        self._master = Master(tuple(self._host.counts), self._host.parameters, config, schedule)
        self.length = self._master.length
        self.sum, self._pending = (pinned(torch.zeros(self.length), self._device) for _ in range(2))
        self._empty = True  # `sum` is zero
        self._stored: deque[Activations] = deque(maxlen=config.run.queue_limit * slices(config))

    # ----------------------------------------------------------------------------------------------------- the contract

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(self.run_many(torch.split(x, self._slice)))

    def backward(self, x: Tensor, grad: Tensor | None, tokens: Tensor | None) -> tuple[Tensor | None, float | None]:
        return joined(self.backward_many(*zip(*cut(self._slice, x, grad, tokens), strict=True)))

    def zero(self, step: int = 0) -> None:
        self.sum.zero_()
        self._empty = True

    def contribution(self, start: int = 0, stop: int | None = None) -> Tensor:
        return pieces.copied(self.sum[start:stop])

    def restore(self, contribution: Tensor) -> None:
        """Set the sum to an earlier `contribution`, (length,) fp32."""
        self.sum.copy_(contribution)
        self._empty = False

    def apply(self, reduced: Tensor, norm: float, step: int, scale: float = 1.0) -> None:
        self.make(reduced, norm, step, scale)
        self.refresh()

    def make(self, reduced: Tensor, norm: float, step: int, scale: float = 1.0) -> None:
        """See delayed.Restorable."""
        self._master.apply(reduced, norm, step, scale)

    def state(self) -> dict[str, Tensor]:
        return self._master.state()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self._master.load_state(state)
        self.refresh()

    def frozen(self) -> Mapping[str, Tensor]:
        return self._host.frozen.named()

    def digest(self) -> str:
        return with_base(self._master.digest(), self.base)

    def refresh(self) -> None:
        """Round the parameters into the copies to compute with."""
        self._host.refresh()
        self._forget()

    @property
    def computing(self) -> tuple[Tensor, ...]:
        """The host tensors that groups are loaded from, in the order of the parameters."""
        return self._host.copies

    def compute_with(self, values: Sequence[Tensor]) -> None:
        for copy, value in zip(self._host.copies, values, strict=True):
            copy.copy_(value)
        self._forget()

    # -------------------------------------------------------------------------------------------------- several at once

    def run_many(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """`forward` of several slices, loading each group once. NotFinite: one of the outputs is not finite; none is returned."""
        whole = self._row.group(0, len(self._row.units))
        with self._link.one_pass():
            batch = self._forwards([self._input(whole, x) for x in xs], len(self._groups))
        ys = [activations.pop() for activations in batch]
        if not finite(*ys):
            raise NotFinite("the stage's output is not finite")
        self._stored.extend(batch)
        return ys

    def backward_many(
        self, xs: Sequence[Tensor], grads: Sequence[Tensor | None], tokens: Sequence[Tensor | None]
    ) -> list[tuple[Tensor | None, float | None]]:
        """`backward` of several slices, added in their order. On a ValueError the sum is unchanged."""
        whole = self._row.group(0, len(self._row.units))
        group_inputs = [BackwardInput(self._input(whole, x), *rest) for x, *rest in zip(xs, grads, tokens, strict=True)]
        for group_input in group_inputs:
            check_ends(whole, *group_input)
        shared: list[dict[str, Tensor]] = [{} for _ in group_inputs]
        losses: list[Tensor | None] = []
        finite: list[Tensor] = []
        with self._link.one_pass():
            batch = self._group_inputs([group_input.x for group_input in group_inputs])
            least = next(index for index, group in enumerate(self._groups) if group.learns)
            for index in reversed(range(least, len(self._groups))):
                group, stage = self._enter(index)
                self._link.open(index, None if self._empty else self.sum)
                if index > least:
                    self._link.prefetch(index - 1, len(batch))
                for at, (group_input, activations) in enumerate(zip(group_inputs, batch, strict=True)):
                    result = self._runner.back(stage, group, group_input._replace(x=activations[index]), shared[at])
                    self._link.computed(index, True)
                    group_inputs[at] = BackwardInput(group_input.x, result.grad, None)
                    losses.append(result.loss)  # the last group, which has the losses, runs first
                    finite.append(result.finite)
                self._link.close(index, self._pending, len(batch))
        if not all(finite):
            raise NotFinite("the stage's gradient is not finite")
        self.sum, self._pending, self._empty = self._pending, self.sum, False
        return [
            (group_input.grad, None if loss is None else float(loss))
            for group_input, loss in zip(group_inputs, losses, strict=False)
        ]

    def backward_batch(self, batch: Sequence[Tensor]) -> list[float]:
        """`backward` of microbatches of tokens (B, L+1) in a model of one stage. Returns their mean losses."""
        with memory.host():
            slices = [part for tokens in batch for part in cut(self._slice, inputs(tokens), None, tokens)]
        results = self.backward_many(*zip(*slices, strict=True))
        slices_per_microbatch = len(results) // len(batch)
        losses = [
            joined(results[at : at + slices_per_microbatch])[1] for at in range(0, len(results), slices_per_microbatch)
        ]
        return [loss for loss in losses if loss is not None]

    @property
    def loads(self) -> int:
        """Groups whose parameters were copied to the device so far."""
        return self._link.loads

    @property
    def resident_bytes(self) -> int:
        """Device bytes in use all the time; activations of a slice add to them while it runs."""
        return self.plan.fixed_bytes + self._link.nbytes

    # -------------------------------------------------------------------------------------------------- group by group

    def _group_inputs(self, xs: Sequence[Tensor]) -> list[Activations]:
        """The inputs of every group for each slice: stored by its forward pass, or recomputed."""
        stored = [self._take(x) for x in xs]
        missing = [x for x, activations in zip(xs, stored, strict=True) if activations is None]
        recomputed = iter(self._forwards(missing, len(self._groups) - 1) if missing else ())
        return [next(recomputed) if activations is None else activations for activations in stored]

    def _take(self, x: Tensor) -> Activations | None:
        for at, activations in enumerate(self._stored):
            if activations[0].shape == x.shape and torch.equal(activations[0], x):
                del self._stored[at]
                return activations
        return None

    def _forwards(self, xs: Sequence[Tensor], groups: int) -> list[Activations]:
        """For each slice its input and the outputs of the first `groups` groups."""
        batch = [[self._runner.to_host(x)] for x in xs]
        for index in range(groups):
            _, stage = self._enter(index)
            if index + 1 < len(self._groups):
                self._link.prefetch(index + 1, len(batch))
            for activations in batch:
                with torch.no_grad():
                    x = self._runner.to_device(activations[-1])
                    self._link.begun()
                    activations.append(self._runner.to_host(stage.forward(x)))
                self._link.computed(index, False)
        return batch

    def _enter(self, index: int) -> tuple[LayerGroup, Stage]:
        self._link.enter(index)
        group = self._groups[index]
        return group, self._row.group(group.start, group.stop)

    # ------------------------------------------------------------------------------------------------- host parameters

    def _input(self, whole: Stage, x: Tensor) -> Tensor:
        x = check_input(whole, x).detach()
        return x.to("cpu", self._runner.dtype) if x.is_floating_point() else x.to("cpu")

    def _forget(self) -> None:
        """Drop loaded groups and stored activations: the parameters have changed."""
        self._link.forget()
        self._stored.clear()

    # ------------------------------------------------------------------------------------------------------- construction

    def _bind(self, index: int, start: int, stop: int) -> LayerGroup:
        """A group with its parameters in its slot and its sums in its slab."""
        rest, parameters = self._link.slots[index % 2], dict[str, nn.Parameter]()
        for name in self._runner.names(start, stop):
            if name in self._host.frozen.kinds:
                parameters[name] = nn.Parameter(self._host.frozen.shaped(rest, name), requires_grad=False)
            else:
                parameters[name] = nn.Parameter(self._host.loaded(rest, name))
            rest = rest[memory.padded(parameters[name].nbytes) :]
        return self._runner.bind(
            (start, stop), parameters, self._link.slab(index), self._link.begun, lambda: self._link.sums_ready(index)
        )

    def _transfers(self, start: int, stop: int) -> GroupTransfers:
        """Of these units: trained values in front of what is not trained."""
        names = self._runner.names(start, stop)
        trained = segments(self._host.pieces([name for name in names if name in self._host.counts]))
        offset = sum(segment.length for segment in trained)
        frozen = segments(self._host.frozen.pieces([name for name in names if name in self._host.frozen.kinds]), offset)
        return GroupTransfers((trained, frozen), sums=self._host.sums(self._runner.sizes.own(start, stop)))


class HostParameters:
    """A stage's parameters in host memory, beside those that are not trained: flat in fp32, and copies in the compute dtype where that
    differs or with `apart`.

    Each parameter starts at a multiple of memory.ALIGN, here and in a slot; the flat gradient has no gaps."""

    def __init__(
        self,
        named: Sequence[tuple[str, Tensor]],
        frozen: FrozenWeights,
        dtype: torch.dtype,
        device: str,
        apart: bool,
    ) -> None:
        self.frozen = frozen
        self.counts = {name: value.numel() for name, value in named}
        self.shapes = {name: value.shape for name, value in named}
        self._dtype = dtype
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
        """Number of values of a parameter with the gap behind it."""
        return memory.padded(self.counts[name] * self._dtype.itemsize) // self._dtype.itemsize

    def shaped(self, flat: Tensor, start: int, name: str) -> Tensor:
        return flat[start : start + self.counts[name]].view(self.shapes[name])

    def loaded(self, start: Tensor, name: str) -> Tensor:
        """The parameter whose copy to compute with is the first bytes of `start`."""
        return self.shaped(start[: self.counts[name] * self._dtype.itemsize].view(self._dtype), 0, name)

    def pieces(self, names: Sequence[str]) -> list[tuple[int, int]]:
        """Bytes of each copy to compute with: where it lies, and how many with the gap behind it."""
        itemsize = self._dtype.itemsize
        return [(self._starts[name] * itemsize, self.padded(name) * itemsize) for name in names]

    def sums(self, own: Sequence[str]) -> tuple[Segment, ...]:
        """Where the gradients of these lie in the flat one. In the stage's order, as those of a group."""
        return segments([(self._in_sum[name], count) for name, count in self.counts.items() if name in own])

    def refresh(self) -> None:
        """Round the parameters into the copies to compute with."""
        if self.computing is not self._flat:
            self.computing.copy_(self._flat)

"""Copies between host and device: two slots of parameters, filled in turn, and slabs in which a group's gradients add up.

For the swapping executor. On a CUDA device loads and stores run on streams of their own beside compute. Elsewhere each copy is
synchronous and in the same order, so that device memory holds the same tensors at each point. modelled.py counts time instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.executor.streams import Streams, streams_of


class Segment(NamedTuple):
    """A contiguous range of elements: offsets on host and device, and length."""

    host: int
    device: int
    length: int


class GroupTransfers(NamedTuple):
    """The copies of one group."""

    weights: tuple[tuple[Segment, ...], ...]  # bytes, from each of the host's sources to a slot
    sums: tuple[Segment, ...]  # from the host's sum to the slab, and back


def segments(pieces: Sequence[tuple[int, int]], offset: int = 0) -> tuple[Segment, ...]:
    """Merge (host offset, length) ranges into the fewest segments, contiguous on the device from `offset` on."""
    merged: list[Segment] = []
    for start, count in pieces:
        last = merged[-1] if merged else None
        if last is not None and last.host + last.length == start:
            merged[-1] = last._replace(length=last.length + count)
        else:
            merged.append(Segment(start, offset, count))
        offset += count
    return tuple(merged)


class HostLink:
    """`sources`: the bytes to compute with, flat, on the host: trained values, and weights that are not trained. `transfers`: per group;
    group g always lies in slot g % 2, and its sums in slab g % `slabs`: with two slabs a group's sums are stored while the next
    group's are added."""

    def __init__(
        self,
        sources: Sequence[Tensor],
        transfers: Sequence[GroupTransfers],
        device: str,
        slabs: int = 1,
        streams: Streams | None = None,
    ) -> None:
        self.loads = 0  # groups whose parameters were copied to the device
        self._sources, self._transfers = tuple(sources), tuple(transfers)
        weights = [sum(segment.length for part in group.weights for segment in part) for group in transfers]
        sums = [sum(segment.length for segment in group.sums) for group in transfers]
        count = min(2, len(transfers))
        self.slots = [torch.zeros(max(weights[n::count]), dtype=torch.uint8, device=device) for n in range(count)]
        self.slabs = [torch.zeros(max(sums[n::slabs]), device=device) for n in range(slabs)]
        self._group_in_slot: list[int | None] = [None] * count
        self._loaded: list[object] = [None] * count  # mark: the slot's parameters are loaded
        self._filled: list[object] = [None] * slabs  # mark: the slab may be added to
        self._stored: list[object] = [None] * slabs  # mark: the slab's sums are on the host
        self._streams: Streams = streams or streams_of(device, "loads", "stores")

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(buffer.nbytes for buffer in (*self.slots, *self.slabs))

    def slab(self, group: int) -> Tensor:
        return self.slabs[group % len(self.slabs)]

    def enter(self, group: int) -> None:
        """Load a group's parameters unless they are in their slot; compute waits for them."""
        self._load(group)
        self._streams.wait("compute", self._loaded[group % len(self.slots)])

    def prefetch(self, group: int) -> None:
        """Start loading a group's parameters. Work with the slot's present group must have been issued before."""
        self._load(group)

    def computed(self, group: int, back: bool) -> None:
        """Call after issuing one slice's forward or backward pass through the group."""
        self._streams.computed(group, back)

    def open(self, group: int, sums: Tensor | None) -> None:
        """Start a group's sums from the host's `sums` (length,); None: from zero."""
        place, slab, streams = group % len(self.slabs), self.slab(group), self._streams
        if sums is None:
            streams.wait("compute", self._stored[place])
            slab.zero_()
            self._filled[place] = None
            return
        streams.wait("loads", self._stored[place])
        with streams.on("loads", group, "sums"):
            for segment in self._transfers[group].sums:
                slab[segment.device : segment.device + segment.length].copy_(_part(sums, segment), non_blocking=True)
        self._filled[place] = streams.mark("loads")

    def sums_ready(self, group: int) -> None:
        """Call before adding to the slab."""
        self._streams.wait("compute", self._filled[group % len(self.slabs)])

    def close(self, group: int, into: Tensor) -> None:
        """Copy a group's sums to the host's `into` (length,), which is valid after the pass."""
        place, slab, streams = group % len(self.slabs), self.slab(group), self._streams
        streams.wait("stores", streams.mark("compute"))
        with streams.on("stores", group, "sums"):
            for segment in self._transfers[group].sums:
                _part(into, segment).copy_(slab[segment.device : segment.device + segment.length], non_blocking=True)
        self._stored[place] = streams.mark("stores")

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """Work and copies are issued inside. Afterwards, also after a failure, all are done: host memory may be read and written."""
        try:
            yield
        finally:
            self._streams.settle()

    def forget(self) -> None:
        """Call after the host's parameters changed: every group is loaded again."""
        self._group_in_slot = [None] * len(self.slots)

    def _load(self, group: int) -> None:
        slot = group % len(self.slots)
        if self._group_in_slot[slot] == group:
            return
        streams = self._streams
        self._group_in_slot[slot] = None  # until all of this one is
        streams.wait("loads", streams.mark("compute"))
        with streams.on("loads", group, "parameters"):
            for source, part in zip(self._sources, self._transfers[group].weights, strict=True):
                for segment in part:
                    target = self.slots[slot][segment.device : segment.device + segment.length]
                    target.copy_(_part(source, segment), non_blocking=True)
        self._loaded[slot] = streams.mark("loads")
        self._group_in_slot[slot] = group
        self.loads += 1


def _part(flat: Tensor, segment: Segment) -> Tensor:
    return flat[segment.host : segment.host + segment.length]


def pinned(flat: Tensor, device: str) -> Tensor:
    """Pin a host tensor for CUDA copies, for as long as the tensor lives.

    Registered, not allocated pinned: PyTorch's pinned allocator rounds up to a power of two, up to twice the memory."""
    if device.startswith("cuda"):
        address = flat.data_ptr()
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, flat.nbytes, 0))
        weakref.finalize(flat, torch.cuda.cudart().cudaHostUnregister, address)
    return flat

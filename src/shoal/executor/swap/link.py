"""Copies between host and device: two slots of parameters, filled in turn, and slabs in which a group's gradients add up.

For the swapping executor. On a CUDA device loads and stores run on streams of their own beside compute. Elsewhere each copy is
synchronous and in the same order, so that device memory holds the same tensors at each point. modelled.py counts time instead.

A device has one engine for copies in each direction, whatever the streams: a group's gigabytes in one copy keep a slice's activations
waiting, and compute with them. So they go in pieces, a share of them with each slice (docs/design/2026-11-27-copies-in-pieces.md).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.executor.streams import Streams, streams_of

PIECE_BYTES = 16 << 20  # of one copy: 0.3 ms of a link of 50 GB/s


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
        self._waiting = {"loads": _Waiting(), "stores": _Waiting()}

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(buffer.nbytes for buffer in (*self.slots, *self.slabs))

    def slab(self, group: int) -> Tensor:
        return self.slabs[group % len(self.slabs)]

    def enter(self, group: int) -> None:
        """Load a group's parameters unless they are in their slot; compute waits for them."""
        self._load(group)
        self._issue("loads")
        self._streams.wait("compute", self._loaded[group % len(self.slots)])

    def prefetch(self, group: int, slices: int) -> None:
        """Load a group's parameters while so many slices are computed. Work with the slot's present group must have been issued before."""
        self._load(group, slices)

    def begun(self) -> None:
        """Call for each slice once its inputs are on their way to the device and before its work is issued."""
        for stream, waiting in self._waiting.items():
            if waiting.pieces:
                self._issue(stream, -(-len(waiting.pieces) // max(1, waiting.slices)))
                waiting.slices -= 1

    def computed(self, group: int, back: bool) -> None:
        """Call after issuing one slice's forward or backward pass through the group."""
        self._streams.computed(group, back)

    def open(self, group: int, sums: Tensor | None) -> None:
        """Start a group's sums from the host's `sums` (length,); None: from zero."""
        place, slab, streams = group % len(self.slabs), self.slab(group), self._streams
        if self._waiting["stores"].place == place:
            self._issue("stores")
        if sums is None:
            streams.wait("compute", self._stored[place])
            slab.zero_()
            self._filled[place] = None
            return
        streams.wait("loads", self._stored[place])
        with streams.on("loads", group, "sums"):
            for into, source in _pieces(slab, sums, self._transfers[group].sums):
                into.copy_(source, non_blocking=True)
        self._filled[place] = streams.mark("loads")

    def sums_ready(self, group: int) -> None:
        """Call before adding to the slab."""
        self._streams.wait("compute", self._filled[group % len(self.slabs)])

    def close(self, group: int, into: Tensor, slices: int) -> None:
        """Copy a group's sums to the host's `into` (length,), which is valid after the pass, while so many slices are computed."""
        place, streams = group % len(self.slabs), self._streams
        self._issue("stores")
        streams.wait("stores", streams.mark("compute"))
        pieces = [(host, device) for device, host in _pieces(self.slab(group), into, self._transfers[group].sums)]

        def stored() -> None:
            self._stored[place] = streams.mark("stores")

        self._waiting["stores"].put(group, "sums", place, slices, pieces, stored)

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """Work and copies are issued inside. Afterwards, also after a failure, all are done: host memory may be read and written."""
        try:
            yield
            for stream in self._waiting:
                self._issue(stream)
        finally:
            for waiting in self._waiting.values():
                waiting.drop()
            self._streams.settle()

    def forget(self) -> None:
        """Call after the host's parameters changed: every group is loaded again."""
        self._group_in_slot = [None] * len(self.slots)

    def _load(self, group: int, slices: int = 0) -> None:
        slot = group % len(self.slots)
        loads, streams = self._waiting["loads"], self._streams
        if self._group_in_slot[slot] == group or (loads.pieces and loads.group == group):
            return
        self._issue("loads")
        self._group_in_slot[slot] = None  # until all of this one is
        streams.wait("loads", streams.mark("compute"))
        pieces: list[_Copy] = []
        for source, part in zip(self._sources, self._transfers[group].weights, strict=True):
            pieces += _pieces(self.slots[slot], source, part)

        def loaded() -> None:
            self._loaded[slot] = streams.mark("loads")
            self._group_in_slot[slot] = group
            self.loads += 1

        loads.put(group, "parameters", slot, slices, pieces, loaded)

    def _issue(self, stream: str, most: int | None = None) -> None:
        """The copies that wait, or the first of them."""
        waiting = self._waiting[stream]
        count = len(waiting.pieces) if most is None else min(most, len(waiting.pieces))
        if count:
            with self._streams.on(stream, waiting.group, waiting.what, count / waiting.whole):
                for _ in range(count):
                    into, source = waiting.pieces.popleft()
                    into.copy_(source, non_blocking=True)
            if not waiting.pieces:
                waiting.done()


_Copy = tuple[Tensor, Tensor]  # into, from


class _Waiting:
    """Copies of one group that are not issued yet, on one stream."""

    def __init__(self) -> None:
        self.pieces: deque[_Copy] = deque()
        self.group, self.place, self.slices, self.whole, self.what = -1, -1, 0, 1, ""
        self.done: Callable[[], None] = lambda: None

    def put(
        self, group: int, what: str, place: int, slices: int, pieces: Sequence[_Copy], done: Callable[[], None]
    ) -> None:
        """`place`: the slot or slab. `slices`: that share them. `done` is called when all are issued."""
        self.group, self.what, self.place, self.slices, self.done = group, what, place, slices, done
        self.pieces, self.whole = deque(pieces), max(1, len(pieces))
        if not pieces:
            done()

    def drop(self) -> None:
        self.pieces.clear()
        self.place = -1


def _pieces(device: Tensor, host: Tensor, segments: Sequence[Segment]) -> list[_Copy]:
    """(into the device, from the host) of each, as copies of PIECE_BYTES at most."""
    most = max(1, PIECE_BYTES // device.element_size())
    found: list[_Copy] = []
    for segment in segments:
        there = device[segment.device : segment.device + segment.length]
        found += zip(torch.split(there, most), torch.split(_part(host, segment), most), strict=True)
    return found


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

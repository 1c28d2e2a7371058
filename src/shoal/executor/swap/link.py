"""The way between host and device: two slots of parameters, filled in turn, and slabs in which a group's gradients add up.

For the swapping executor, whose order of calls this is made for. On a CUDA device copies run on streams of their own, beside
the work: one toward the device, one away from it. Elsewhere each copy is done when asked for, in the same order, so that what is in
device memory at any moment is the same. modelled.py keeps time instead: what the streams of a device would have taken.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Run(NamedTuple):
    """Values that lie one after another on both sides."""

    host: int
    device: int
    values: int


class Cargo(NamedTuple):
    """What travels for one group."""

    parameters: tuple[Run, ...]  # from the host's parameters to a slot
    sums: tuple[Run, ...]  # from the host's sum to the slab, and back


def runs(pieces: Sequence[tuple[int, int]]) -> tuple[Run, ...]:
    """(start on the host, count) of each piece -> the same in as few copies as can be, one after another on the device."""
    found: list[Run] = []
    there = 0
    for start, count in pieces:
        last = found[-1] if found else None
        if last is not None and last.host + last.values == start:
            found[-1] = last._replace(values=last.values + count)
        else:
            found.append(Run(start, there, count))
        there += count
    return tuple(found)


class Link:
    """`source`: the parameters that compute, flat, on the host. `cargo`: per group; group g always lies in slot g % 2, and its
    sums in slab g % `slabs`: with two of them a group's sums leave while the next one's are added."""

    def __init__(
        self, source: Tensor, cargo: Sequence[Cargo], device: str, slabs: int = 1, streams: Streams | None = None
    ) -> None:
        self.loads = 0  # of groups' parameters, so far
        self._source, self._cargo = source, tuple(cargo)
        parameters = [sum(run.values for run in one.parameters) for one in cargo]
        sums = [sum(run.values for run in one.sums) for one in cargo]
        count = min(2, len(cargo))
        self.slots = [torch.zeros(max(parameters[n::count]), dtype=source.dtype, device=device) for n in range(count)]
        self.slabs = [torch.zeros(max(sums[n::slabs]), device=device) for n in range(slabs)]
        self._holds: list[int | None] = [None] * count
        self._loaded: list[object] = [None] * count  # when the slot's parameters are there
        self._filled: list[object] = [None] * slabs  # when the slab may be added to
        self._stored: list[object] = [None] * slabs  # when the slab's sums are on the host
        self._streams: Streams = streams or (CudaStreams() if device == "cuda" else NoStreams())

    @property
    def nbytes(self) -> int:
        """On the device."""
        return sum(held.nbytes for held in (*self.slots, *self.slabs))

    def slab(self, group: int) -> Tensor:
        return self.slabs[group % len(self.slabs)]

    def enter(self, group: int) -> None:
        """Have a group's parameters in their slot."""
        self._load(group)
        self._streams.wait("compute", self._loaded[group % len(self.slots)])

    def prefetch(self, group: int) -> None:
        """Have them on their way. What was computed with what is in that slot must have been asked for before."""
        self._load(group)

    def computed(self, group: int, back: bool) -> None:
        """A slice's way through the group, or back, has been asked for."""
        self._streams.computed(group, back)

    def open(self, group: int, sums: Tensor | None) -> None:
        """Start a group's sums from the host's `sums` (length,), or from nothing."""
        place, slab, streams = group % len(self.slabs), self.slab(group), self._streams
        if sums is None:
            streams.wait("compute", self._stored[place])
            slab.zero_()
            self._filled[place] = None
            return
        streams.wait("loads", self._stored[place])
        with streams.on("loads", group, "sums"):
            for run in self._cargo[group].sums:
                slab[run.device : run.device + run.values].copy_(_part(sums, run), non_blocking=True)
        self._filled[place] = streams.mark("loads")

    def sums_ready(self, group: int) -> None:
        """To be called before adding to the slab."""
        self._streams.wait("compute", self._filled[group % len(self.slabs)])

    def close(self, group: int, into: Tensor) -> None:
        """Send a group's sums to the host's `into` (length,). They are there after `settle`."""
        place, slab, streams = group % len(self.slabs), self.slab(group), self._streams
        streams.wait("stores", streams.mark("compute"))
        with streams.on("stores", group, "sums"):
            for run in self._cargo[group].sums:
                _part(into, run).copy_(slab[run.device : run.device + run.values], non_blocking=True)
        self._stored[place] = streams.mark("stores")

    def settle(self) -> None:
        """Wait for all that was asked for: the host's memory may be read and changed."""
        self._streams.settle()

    def forget(self) -> None:
        """The host's parameters have changed."""
        self.settle()
        self._holds = [None] * len(self.slots)

    def _load(self, group: int) -> None:
        slot = group % len(self.slots)
        if self._holds[slot] == group:
            return
        streams = self._streams
        streams.wait("loads", streams.mark("compute"))
        with streams.on("loads", group, "parameters"):
            for run in self._cargo[group].parameters:
                there = self.slots[slot][run.device : run.device + run.values]
                there.copy_(_part(self._source, run), non_blocking=True)
        self._loaded[slot] = streams.mark("loads")
        self._holds[slot] = group
        self.loads += 1


def _part(flat: Tensor, run: Run) -> Tensor:
    return flat[run.host : run.host + run.values]


class Streams(Protocol):
    """Three lines of work, `compute`, `loads` and `stores`, each in its own order, that may wait for points of one another."""

    def on(self, stream: str, group: int, what: str) -> AbstractContextManager[object]:
        """What is asked for inside goes there: a group's `parameters` or `sums` on their way."""
        ...

    def computed(self, group: int, back: bool) -> None:
        """Told, once per slice, of what goes to `compute` by itself."""
        ...

    def mark(self, stream: str) -> object:
        """The point up to which that stream has been asked."""
        ...

    def wait(self, stream: str, mark: object) -> None:
        """What that stream is asked from now on begins after the mark; None: at once."""
        ...

    def settle(self) -> None:
        """Until all is done."""
        ...


class NoStreams:
    """One thing after another."""

    def on(self, stream: str, group: int, what: str) -> AbstractContextManager[object]:
        return nullcontext()

    def computed(self, group: int, back: bool) -> None: ...

    def mark(self, stream: str) -> object:
        return None

    def wait(self, stream: str, mark: object) -> None: ...

    def settle(self) -> None: ...


class CudaStreams:
    """They live as long as the stage: pools of memory grow when streams are made for each step."""

    def __init__(self) -> None:
        self._streams = {
            "compute": torch.cuda.current_stream(),
            "loads": torch.cuda.Stream(),
            "stores": torch.cuda.Stream(),
        }

    def on(self, stream: str, group: int, what: str) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._streams[stream])

    def computed(self, group: int, back: bool) -> None: ...

    def mark(self, stream: str) -> object:
        return self._streams[stream].record_event()

    def wait(self, stream: str, mark: object) -> None:
        if mark is not None:
            assert isinstance(mark, torch.cuda.Event)
            self._streams[stream].wait_event(mark)

    def settle(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()


def pinned(flat: Tensor, device: str) -> Tensor:
    """Let a CUDA device copy from and to this host tensor at full speed, for as long as the tensor lives.

    Registered, not allocated pinned: PyTorch's pinned allocator rounds up to a power of two, up to twice the memory."""
    if device == "cuda":
        address = flat.data_ptr()
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, flat.nbytes, 0))
        weakref.finalize(flat, torch.cuda.cudart().cudaHostUnregister, address)
    return flat

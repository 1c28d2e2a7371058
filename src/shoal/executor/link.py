"""The way between host and device: two slots of parameters, filled in turn, and one slab in which a group's gradients add up.

For the swapping executor, whose order of calls this is made for. On a CUDA device copies run on streams of their own, beside
the work: one for parameters, one for sums. Elsewhere each copy is done when asked for, in the same order, so that what is in
device memory at any moment is the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

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
    """`source`: the parameters that compute, flat, on the host. `cargo`: per group; group g always lies in slot g % 2."""

    def __init__(self, source: Tensor, cargo: Sequence[Cargo], device: str) -> None:
        self.loads = 0  # of groups' parameters, so far
        self._source, self._cargo = source, tuple(cargo)
        sizes = [sum(run.values for run in one.parameters) for one in cargo]
        self.slots = [
            torch.zeros(max(sizes[slot::2]), dtype=source.dtype, device=device) for slot in range(min(2, len(sizes)))
        ]
        self.slab = torch.zeros(max(sum(run.values for run in one.sums) for one in cargo), device=device)
        self._holds: list[int | None] = [None] * len(self.slots)
        self._streams = Streams() if device == "cuda" else NoStreams()

    @property
    def nbytes(self) -> int:
        """On the device."""
        return sum(slot.nbytes for slot in self.slots) + self.slab.nbytes

    def enter(self, group: int, following: int | None) -> None:
        """Have a group's parameters in their slot, and `following`'s on their way into the other one.

        What was computed with the other slot must have been asked for before."""
        self._load(group)
        self._streams.compute_after_loads()
        if following is not None:
            self._load(following)

    def open(self, group: int, sums: Tensor | None) -> None:
        """Start a group's sums from the host's `sums` (length,), or from nothing."""
        with self._streams.storing():
            if sums is None:
                self.slab.zero_()
            else:
                for run in self._cargo[group].sums:
                    self.slab[run.device : run.device + run.values].copy_(_part(sums, run), non_blocking=True)

    def sums_ready(self) -> None:
        """To be called before adding to the slab."""
        self._streams.compute_after_stores()

    def close(self, group: int, into: Tensor) -> None:
        """Send a group's sums to the host's `into` (length,). They are there after `settle`."""
        self._streams.stores_after_compute()
        with self._streams.storing():
            for run in self._cargo[group].sums:
                _part(into, run).copy_(self.slab[run.device : run.device + run.values], non_blocking=True)

    def settle(self) -> None:
        """Wait for all that was asked for: the host's memory may be read and changed."""
        self._streams.settle()

    def forget(self) -> None:
        """The host's parameters have changed."""
        self.settle()
        self._holds = [None] * len(self.slots)

    def _load(self, group: int) -> None:
        slot = group % 2
        if self._holds[slot] == group:
            return
        self._streams.loads_after_compute()
        with self._streams.loading():
            for run in self._cargo[group].parameters:
                there = self.slots[slot][run.device : run.device + run.values]
                there.copy_(_part(self._source, run), non_blocking=True)
        self._holds[slot] = group
        self.loads += 1


def _part(flat: Tensor, run: Run) -> Tensor:
    return flat[run.host : run.host + run.values]


class NoStreams:
    """One thing after another."""

    def loading(self) -> AbstractContextManager[object]:
        return nullcontext()

    storing = loading

    def nothing(self) -> None:
        pass

    compute_after_loads = compute_after_stores = loads_after_compute = stores_after_compute = settle = nothing


class Streams:
    """CUDA streams that live as long as the stage: pools of memory grow when streams are made for each step."""

    def __init__(self) -> None:
        self._compute = torch.cuda.current_stream()
        self._loads, self._stores = torch.cuda.Stream(), torch.cuda.Stream()

    def loading(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._loads)

    def storing(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stores)

    def compute_after_loads(self) -> None:
        self._compute.wait_stream(self._loads)

    def compute_after_stores(self) -> None:
        self._compute.wait_stream(self._stores)

    def loads_after_compute(self) -> None:
        self._loads.wait_stream(self._compute)

    def stores_after_compute(self) -> None:
        self._stores.wait_stream(self._compute)

    def settle(self) -> None:
        for stream in (self._compute, self._loads, self._stores):
            stream.synchronize()


def pinned(flat: Tensor, device: str) -> Tensor:
    """Let a CUDA device copy from and to this host tensor at full speed, for as long as the tensor lives.

    Registered, not allocated pinned: PyTorch's pinned allocator rounds up to a power of two, up to twice the memory."""
    if device == "cuda":
        address = flat.data_ptr()
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, flat.nbytes, 0))
        weakref.finalize(flat, torch.cuda.cudart().cudaHostUnregister, address)
    return flat

"""Bytes on the wire by what they are for: which part of a message counts as what, and sums of it. And the bytes of tensors that are kept.

For the node, which counts, the trace, and whoever shows it. `control` is all that is no tensor of the training: heads of
messages, token ids, and messages without tensors. So the other four are tensors' bytes and nothing else, and can be compared
with formulas: codec.nbytes of what travelled. What TLS and TCP add is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shoal.core.messages import Backward, Boundary, Chunk, Forward, GatherChunk, Gradient, Message, Output, ReduceChunk

Size = tuple[str, int]  # of a blob: its dtype and the bytes that travel
TOKENS = "int64"


class Traffic(msgspec.Struct, frozen=True):
    """Bytes by kind."""

    activations: int = 0
    gradients: int = 0  # of boundary tensors
    averaging: int = 0
    state: int = 0  # a stage's parameters and optimizer state, for a joiner
    control: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, kind) + getattr(other, kind) for kind in KINDS))

    @property
    def total(self) -> int:
        return sum(getattr(self, kind) for kind in KINDS)


KINDS = Traffic.__struct_fields__


class Kept(msgspec.Struct, frozen=True):
    """Bytes of tensors that a peer holds at a moment, or held at most."""

    store: int = 0  # boundary tensors that its server keeps until the step commits (core/server/activation_store.py)
    memory: int = 0  # of all its tensors by name, those in memory
    disk: int = 0  # and those on disk (runtime/tasks/blobs.py)

    def most(self, other: Kept) -> Kept:
        """The larger of each."""
        return Kept(*map(max, msgspec.structs.astuple(self), msgspec.structs.astuple(other)))


def split(message: Message, blobs: Sequence[Size], nbytes: int) -> dict[str, int]:
    """`nbytes` that a message takes on the line, by kind."""
    found: dict[str, int] = {}
    for place, (dtype, size) in enumerate(blobs):
        kind = _kind(message, place, dtype)
        found[kind] = found.get(kind, 0) + size
    found["control"] = found.get("control", 0) + nbytes - sum(size for _, size in blobs)
    return found


class Tally:
    """What one peer has sent and received so far."""

    def __init__(self) -> None:
        self._sent = dict.fromkeys(KINDS, 0)
        self._received = dict.fromkeys(KINDS, 0)

    def sent(self, message: Message, blobs: Sequence[Size], nbytes: int) -> None:
        _count(self._sent, message, blobs, nbytes)

    def received(self, message: Message, blobs: Sequence[Size], nbytes: int) -> None:
        _count(self._received, message, blobs, nbytes)

    def totals(self) -> tuple[Traffic, Traffic]:
        """Sent, received."""
        return Traffic(**self._sent), Traffic(**self._received)


def _count(into: dict[str, int], message: Message, blobs: Sequence[Size], nbytes: int) -> None:
    for kind, size in split(message, blobs, nbytes).items():
        into[kind] += size


def _kind(message: Message, place: int, dtype: str) -> str:
    match message:
        case ReduceChunk() | GatherChunk():
            return "averaging"
        case Chunk():
            return "state"
        case _ if dtype == TOKENS:
            return "control"
        case Gradient():
            return "gradients"
        case Boundary():
            return "gradients" if message.gradient else "activations"
        case Backward():
            return "gradients" if place else "activations"  # the stage's input comes first
        case Forward() | Output():
            return "activations"
    return "control"

"""Bytes on the wire by purpose, and bytes of stored tensors: for the node, which counts them, the trace and the displays.

`control` is everything but tensors of the training: heads of messages, token ids, and messages without tensors. The other four
kinds are bytes of tensors only and equal codec.nbytes of the tensors sent. Overhead of TLS and TCP is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shoal.core.messages import (
    Backward,
    BoundaryTensor,
    Chunk,
    Forward,
    GatherChunk,
    Gradient,
    Message,
    Output,
    ReduceChunk,
)

Size = tuple[str, int]  # of a blob: its dtype and its bytes on the wire
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


class StoredBytes(msgspec.Struct, frozen=True):
    """Bytes of a peer's stored tensors, now or at their peak."""

    store: int = 0  # in the activation store (core/server/activation_store.py), in memory or on disk
    memory: int = 0  # of all named tensors, those in memory
    disk: int = 0  # of all named tensors, those on disk (runtime/tasks/blobs.py)

    def most(self, other: StoredBytes) -> StoredBytes:
        """The maximum of each field."""
        return StoredBytes(*map(max, msgspec.structs.astuple(self), msgspec.structs.astuple(other)))


def split(message: Message, blobs: Sequence[Size], nbytes: int) -> dict[str, int]:
    """A message's `nbytes` on the wire, by kind."""
    by_kind: dict[str, int] = {}
    for position, (dtype, size) in enumerate(blobs):
        kind = _kind(message, position, dtype)
        by_kind[kind] = by_kind.get(kind, 0) + size
    by_kind["control"] = by_kind.get("control", 0) + nbytes - sum(size for _, size in blobs)
    return by_kind


class TrafficCounter:
    """Bytes that one peer has sent and received."""

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


def _kind(message: Message, position: int, dtype: str) -> str:
    match message:
        case ReduceChunk() | GatherChunk():
            return "averaging"
        case Chunk():
            return "state"
        case _ if dtype == TOKENS:
            return "control"
        case Gradient():
            return "gradients"
        case BoundaryTensor():
            return "gradients" if message.gradient else "activations"
        case Backward():
            return "gradients" if position else "activations"  # the stage's input comes first
        case Forward() | Output():
            return "activations"
    return "control"

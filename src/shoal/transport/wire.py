"""The bytes of a message: a length, a head in msgpack, then the blobs as they are.

    4 bytes   length of the head, big-endian
    head      [message, [[dtype, shape, codec, nbytes], ...]]
    blobs     one after the other, `nbytes` each

Bulk travels in fragments, so that a message of a higher rank (core.messages.rank) waits for one of them and not for the
whole of another: a head, then so many bytes of that rank's messages, one after the other; a fragment never holds the end of
one message and the beginning of the next. The head, big-endian: rank (1 byte), number (4), length (4), bytes that wait behind
it (4), bytes per second that the sender's uplink leaves for this way (4), its queue in ms (2); the last two may be unknown,
all bits set. Back come shares (congestion/shares.py): bytes per second, 4 bytes each.

For every transport that moves bytes. Whoever reads calls `head_bytes` on the first four bytes, `decode_head` on the head
and `buffers` for the memory of the blobs, in this order: each raises Malformed before the memory it is about is taken.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
import numpy as np

from shoal import codec
from shoal.core.messages import BULK, MAX_LIST_BYTES, RANKS, Message, Ping, Pong, rank
from shoal.escaping import UNDECODABLE
from shoal.transport.base import DTYPES, MAX_BLOBS, MAX_CONTROL_BYTES, Blob, Limits
from shoal.transport.congestion.shares import Report

PREFIX_BYTES = 4
BOUNDED = {"float32": 4, "bfloat16": 2}  # bytes of a raw value whose size is looked at on receipt
FRAGMENT_BYTES = 256 << 10  # 10 ms on a line of 200 Mbit/s
NUMBERS = 1 << 32  # of fragments, before they begin anew
MAX_DIMENSIONS = 8
MEASURING_BYTES = 64 << 20  # of a blob that is a load and nothing else
PEEK_BYTES = 64  # of a head: they hold the name of the message, hence tell how large it may be
ORDINARY_BYTES = 64 << 10  # a head of any message that is not named below: the longest holds a text of 2,000 characters
LARGE = {
    # Those that hold a View, a Round or every stage's record of a checkpoint: base.MAX_CONTROL_BYTES says for how many.
    **dict.fromkeys(("Propose", "Standing", "Override", "Round", "Saved", "PublishRequest"), MAX_CONTROL_BYTES),
    **dict.fromkeys(("AuditAnswer", "RecomputeRequest", "Recomputed"), MAX_CONTROL_BYTES),  # AUDIT_RECORDS, AUDIT_HOPS
    "CopyRequest": (1 << 20) + ORDINARY_BYTES,  # one record
    "Lead": 1 << 20,  # votes and a proof: 2,000 signatures under the longest names take 462 kB
    "RoundWaits": 512 << 10,  # 2,048 names
    "Passes": MAX_LIST_BYTES + ORDINARY_BYTES,
    "Heartbeat": 768 << 10,  # 37,000 bookings with their losses and counted tokens, 21 bytes each, of one replica
    "Books": 1 << 20,  # 200,000 indices
    "Offer": 1 << 20,  # 14,000 chunks of a state
    "Measure": 256 << 10,  # 1,024 names
}
_prefix = struct.Struct(">I")
_fragment = struct.Struct(">BIIIIH")
_share = struct.Struct(">IQ")
FRAGMENT_HEAD_BYTES, TOLD_BYTES = _fragment.size, _share.size
UNKNOWN_BPS, UNKNOWN_MS = (1 << 32) - 1, (1 << 16) - 1  # in a fragment's head; and a share of so much is no limit
CLOCK_BITS = (1 << 64) - 1
NO_REPORT = Report(0, math.inf, math.inf)

_Dimension = Annotated[int, msgspec.Meta(ge=0, le=2**40)]


class Malformed(ValueError):
    """The other side sent what no honest peer of this protocol sends."""


class BlobHead(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    dtype: Annotated[str, msgspec.Meta(max_length=32)]
    shape: Annotated[tuple[_Dimension, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    codec: Annotated[str, msgspec.Meta(max_length=32)]
    nbytes: Annotated[int, msgspec.Meta(ge=0, le=2**50)]


class Head(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    message: Message
    blobs: Annotated[tuple[BlobHead, ...], msgspec.Meta(max_length=MAX_BLOBS)] = ()


class Frame(msgspec.Struct, frozen=True):
    """A message ready to be written. The blobs' memory is read until then: it must not change."""

    message: Message
    parts: tuple[memoryview, ...]
    nbytes: int
    bulk: bool
    rank: int = 0  # of bulk

    def pieces(self, start: int, most: int) -> Iterator[memoryview]:
        """At most `most` bytes from `start`, without a copy."""
        for part in self.parts:
            if start < part.nbytes and most:
                piece = part[start : start + most]
                most -= piece.nbytes
                yield piece
            start = max(0, start - part.nbytes)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Head)


def encode(message: Message, blobs: tuple[Blob, ...], limits: Limits) -> Frame:
    """ValueError when this peer itself is about to send what others would refuse."""
    views = tuple(memoryview(blob.data).cast("B") for blob in blobs)
    heads = tuple(
        BlobHead(blob.dtype, tuple(blob.shape), blob.codec, view.nbytes)
        for blob, view in zip(blobs, views, strict=True)
    )
    head = _encoder.encode(Head(message, heads))
    most = most_bytes(type(message).__name__, bool(blobs))
    if len(head) > most:
        raise ValueError(f"{type(message).__name__} takes {len(head)} bytes; it may have {most}")
    _check(message, heads, limits)
    parts = (memoryview(_prefix.pack(len(head)) + head), *views)
    return Frame(message, parts, sum(part.nbytes for part in parts), bool(blobs), rank(message))


def fragment_head(rank: int, number: int, nbytes: int, report: Report = NO_REPORT) -> memoryview:
    """`number`: its place among the fragments of its rank, which may come over several connections."""
    left_bytes = min(report.left_bytes, UNKNOWN_BPS)
    most_Bps = int(min(report.most_Bps, UNKNOWN_BPS))
    queue_ms = int(min(1e3 * report.queue_s, UNKNOWN_MS))
    return memoryview(_fragment.pack(rank, number % NUMBERS, nbytes, left_bytes, most_Bps, queue_ms))


def fragment(head: bytes | bytearray | memoryview) -> tuple[int, int, int, Report]:
    """Rank, number and length of the fragment that follows, and what its sender says of its way."""
    place, number, nbytes, left_bytes, most_Bps, queue_ms = _fragment.unpack(head)
    if place >= RANKS or not 0 < nbytes <= FRAGMENT_BYTES:
        raise Malformed(f"a fragment of rank {place} and {nbytes} bytes; allowed are {RANKS} ranks of {FRAGMENT_BYTES}")
    queue_s = math.inf if queue_ms == UNKNOWN_MS else queue_ms / 1e3
    return place, number, nbytes, Report(left_bytes, math.inf if most_Bps == UNKNOWN_BPS else most_Bps, queue_s)


def share_told(rate_Bps: float, now: float) -> bytes:
    """What a receiver of bulk says to the sender; inf: as fast as it likes. `now`: by its own clock, which begins anywhere."""
    return _share.pack(int(min(rate_Bps, UNKNOWN_BPS)), int(1e6 * now) & CLOCK_BITS)


def share(words: bytes | bytearray | memoryview) -> tuple[float, float]:
    """The share, and when it was sent."""
    rate_Bps, sent_us = _share.unpack(words)
    return math.inf if rate_Bps == UNKNOWN_BPS else float(rate_Bps), sent_us / 1e6


class Largest:
    """The largest absolute value of a blob of raw floats, looked at piece by piece while the bytes are in the core's cache."""

    def __init__(self, blob: BlobHead) -> None:
        self._width = BOUNDED.get(blob.dtype, 0) if blob.codec == codec.RAW else 0  # 0: not looked at
        self._bits = 0  # of the largest value, without the sign: in their order NaN comes last
        self._at = 0  # bytes looked at

    def take(self, memory: memoryview, filled: int) -> None:
        """`memory` is filled up to there."""
        whole = filled - filled % self._width if self._width else 0
        if whole > self._at:
            bits = np.frombuffer(memory[self._at : whole], f"<u{self._width}")
            self._bits = max(self._bits, int((bits & ((1 << (8 * self._width - 1)) - 1)).max()))
            self._at = whole

    @property
    def value(self) -> float | None:
        if not self._width:
            return None
        return float(np.uint32(self._bits << (32 - 8 * self._width)).view(np.float32))  # bfloat16 is half a float32


class Arriving:
    """A message that comes in pieces: fill `room`, say how much `came`, until `whole`. Raises Malformed as soon as it is."""

    def __init__(self, limits: Limits, bulk: bool) -> None:
        self.whole = False
        self._bulk = bulk
        self.nbytes = 0
        self._limits = limits
        self._view = memoryview(bytearray(PREFIX_BYTES))
        self._at = 0
        self._prefixed = False
        self._length = 0  # of the head
        self._head: Head | None = None
        self._memory: tuple[memoryview, ...] = ()
        self._blob = 0
        self._largest: list[Largest] = []  # of each blob

    def room(self, most: int) -> memoryview:
        """Where the next bytes go."""
        if self.whole:
            raise Malformed("a fragment that goes on after the end of its message")
        return self._view[self._at : self._at + most]

    def advance(self, nbytes: int) -> None:
        self._at += nbytes
        self.nbytes += nbytes
        if self._largest:
            self._largest[self._blob].take(self._view, self._at)
        while not self.whole and self._at == self._view.nbytes:
            self._turn()

    def message(self) -> tuple[Message, tuple[Blob, ...]]:
        assert self.whole and self._head is not None
        largest = [each.value for each in self._largest]
        return self._head.message, blobs_of(self._head, self._memory, largest)

    def _turn(self) -> None:
        """What was being filled is full: the next part of the message."""
        self._at = 0
        if not self._prefixed:
            self._prefixed = True
            self._length = head_bytes(self._view)
            self._view = memoryview(bytearray(min(self._length, PEEK_BYTES)))
        elif self._view.nbytes < self._length and self._head is None:
            check_kind(self._view, self._length, self._bulk)
            whole = bytearray(self._length)
            self._at = self._view.nbytes
            whole[: self._at] = self._view
            self._view = memoryview(whole)
        elif self._head is None:
            self._head = decode_head(self._view, self._limits)
            if self._head.blobs and not self._bulk:
                raise Malformed(f"{type(self._head.message).__name__} with blobs among control messages")
            self._memory = buffers(self._head)
            self._largest = [Largest(blob) for blob in self._head.blobs]
            self._next_blob(0)
        else:
            self._next_blob(self._blob + 1)

    def _next_blob(self, number: int) -> None:
        self._blob = number
        self.whole = number == len(self._memory)
        self._view = memoryview(b"") if self.whole else self._memory[number]


def head_bytes(prefix: bytes | bytearray | memoryview) -> int:
    (length,) = _prefix.unpack(prefix)
    if not 0 < length <= MAX_CONTROL_BYTES:
        raise Malformed(f"a message head of {length} bytes; allowed are 1 to {MAX_CONTROL_BYTES}")
    return int(length)


def most_bytes(kind: str, bulk: bool) -> int:
    """Of a head. What travels among bulk says little beside its blobs."""
    return ORDINARY_BYTES if bulk else LARGE.get(kind, ORDINARY_BYTES)


def check_kind(start: bytes | bytearray | memoryview, length: int, bulk: bool) -> None:
    """Malformed when a head that begins like this may not be so long; nothing of it has been decoded."""
    if length <= ORDINARY_BYTES:
        return
    kind = _kind(bytes(start[:PEEK_BYTES]))
    if length > most_bytes(kind, bulk):
        raise Malformed(f"a {kind or 'message'} of {length} bytes; allowed are {most_bytes(kind, bulk)}")


def _kind(start: bytes) -> str:
    """The tag of the message in a head, as msgpack has it: an array, in it an array, in it a text. '': it is none."""
    if len(start) < 3 or start[0] & 0xF0 != 0x90:
        return ""
    at = {0xDC: 4, 0xDD: 6}.get(start[1], 2)
    if at == 2 and start[1] & 0xF0 != 0x90:
        return ""
    if at < len(start) and start[at] & 0xE0 == 0xA0:
        return start[at + 1 : at + 1 + (start[at] & 0x1F)].decode("ascii", "replace")
    return ""


def decode_head(data: bytes | bytearray | memoryview, limits: Limits) -> Head:
    try:
        head = _decoder.decode(data)
    except UNDECODABLE as error:
        raise Malformed(f"not a message: {error}") from None
    _check(head.message, head.blobs, limits)
    return head


def buffers(head: Head) -> tuple[memoryview, ...]:
    """Writable memory for the blobs of a head that was decoded, hence checked; taken from the system page by page."""
    return tuple(np.empty(blob.nbytes, np.uint8).data for blob in head.blobs)


def blobs_of(head: Head, memory: tuple[memoryview, ...], largest: Sequence[float | None] = ()) -> tuple[Blob, ...]:
    bounds = largest or (None,) * len(memory)
    return tuple(
        Blob(h.dtype, h.shape, view, h.codec, bound) for h, view, bound in zip(head.blobs, memory, bounds, strict=True)
    )


def decode(data: bytes | bytearray | memoryview, limits: Limits) -> tuple[Message, tuple[Blob, ...]]:
    """A whole frame at once, for transports that hold it in memory anyway."""
    view = memoryview(data)
    if view.nbytes < PREFIX_BYTES:
        raise Malformed("a message shorter than its length field")
    at = PREFIX_BYTES + head_bytes(view[:PREFIX_BYTES])
    if view.nbytes < at:
        raise Malformed("a message shorter than its head")
    check_kind(view[PREFIX_BYTES:at], at - PREFIX_BYTES, bulk=False)
    head = decode_head(view[PREFIX_BYTES:at], limits)
    if view.nbytes != at + sum(blob.nbytes for blob in head.blobs):
        raise Malformed("a message whose blobs have other sizes than its head says")
    memory = buffers(head)
    for part in memory:
        part[:] = view[at : at + part.nbytes]
        at += part.nbytes
    return head.message, blobs_of(head, memory)


def size(message: Message, blobs: tuple[Blob, ...]) -> int:
    """Bytes that a message takes on the line, to within a few."""
    return PREFIX_BYTES + len(_encoder.encode(message)) + sum(memoryview(blob.data).nbytes for blob in blobs)


def _check(message: Message, heads: tuple[BlobHead, ...], limits: Limits) -> None:
    kind = type(message).__name__
    if heads and not isinstance(message, BULK):
        raise Malformed(f"{kind} with blobs")
    if len(heads) > MAX_BLOBS:
        raise Malformed(f"{kind} with {len(heads)} blobs; allowed are {MAX_BLOBS}")
    for head in heads:
        if head.dtype not in DTYPES:
            raise Malformed(f"{kind} with a blob of type '{head.dtype}'; known are {', '.join(DTYPES)}")
        most = min(limits.blob_bytes, MEASURING_BYTES) if isinstance(message, Ping | Pong) else limits.blob_bytes
        if head.nbytes > most:
            raise Malformed(f"{kind} with a blob of {head.nbytes} bytes; allowed are {most}")
        whole = math.prod(head.shape) * DTYPES[head.dtype]  # what it takes once decoded
        if whole > limits.blob_bytes:
            raise Malformed(f"{kind} with a blob of {whole} bytes when decoded; allowed are {limits.blob_bytes}")
        try:
            nbytes = codec.nbytes(head.codec, head.shape, head.dtype)
        except ValueError as error:
            raise Malformed(f"{kind} with a blob that cannot be decoded: {error}") from None
        if head.nbytes != nbytes:
            said = f"shape {head.shape} of {head.dtype} in codec {head.codec}"
            raise Malformed(f"{kind} with a blob of {head.nbytes} bytes for {said}, which takes {nbytes}")

"""The contract of every network: at most once, ordered per peer, may vanish silently; sizes bounded; authenticated.

Timeouts, retries, bans and heartbeats are core's business, so a transport never waits for an answer and `send` never raises
for a dead peer. One contract test (tests/contract) runs over every implementation. Control messages (no blobs) are ordered
among themselves, and so is each rank of bulk messages (with blobs; core.messages.rank). Nothing waits behind a whole message
of a lower rank, and control behind no bulk: bulk is sent in fragments, of which every tenth may be of a lower rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

from shoal import codec
from shoal.core.messages import Message, Peer

MAX_CONTROL_BYTES = 4 << 20  # a View of 1,000 peers and 100,000 microbatches fits
MAX_BLOBS = 4

StreamKind = Literal["control", "bulk"]
STREAM_KINDS: tuple[StreamKind, StreamKind] = ("control", "bulk")


class Blob(msgspec.Struct, frozen=True):
    """A tensor as it is sent: its bytes, and what they mean.

    `dtype` is one of DTYPES; `codec` (shoal/codec.py) says how `data` encodes the values: raw is little-endian, row-major."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview
    codec: str = codec.RAW
    largest: float | None = None  # absolute value of raw floats, NaN if one is: measured while they were received


DTYPES = codec.WIDTHS


class Incoming(msgspec.Struct, frozen=True):
    peer: Peer
    message: Message
    blobs: tuple[Blob, ...] = ()
    nbytes: int = 0  # that it took on the line


class Lost(msgspec.Struct, frozen=True):
    """That peer cannot be reached: connection refused or broken, or its address was not found; or it was dropped for misbehaving.

    `reason` says which, for people."""

    peer: Peer
    reason: str = ""


class Unknown(msgspec.Struct, frozen=True):
    """Messages to that peer wait for its address: it should be looked up, and `learn` be called. It is Lost if that takes too long."""

    peer: Peer


Event = Incoming | Lost | Unknown  # what `receive` returns


class Limits(msgspec.Struct, frozen=True):
    """Checked before memory is taken. `blob_bytes` bounds one blob, `queued_bytes` what may wait for one peer (further bulk
    messages to it vanish: the sender's machine sees a slow hop)."""

    blob_bytes: int = 1 << 30
    queued_bytes: int = 4 << 30


class Transport(Protocol):
    """`name` is this peer's core name: '<key id>.<incarnation>'."""

    name: Peer

    async def start(self) -> None:
        """Bind and listen. ValueError when the port is taken (names it)."""

    def send(self, peer: Peer, message: Message, blobs: tuple[Blob, ...] = ()) -> int:
        """Queue for sending and return at once; never raises for a dead peer.

        Returns the bytes that it takes on the line, 0 when it goes nowhere: the peer is not known, too much waits for it."""

    def withdraw(self, is_void: Callable[[Peer, Message], bool]) -> None:
        """Messages with blobs that wait, and of which nothing is on its way, need not be sent. `send` has counted them."""

    async def receive(self) -> Event:
        """The next thing that happened. A peer that sends malformed or oversized data is dropped and reported as Lost."""

    def line_Bps(self) -> tuple[float, float]:
        """What this machine's line has carried lately while bulk waited for it, up and down. 0: it has not been busy, or nobody knows."""

    def forget(self, peer: Peer) -> None:
        """That peer has left for good: close connections to it, drop what waits for it."""

    async def close(self) -> None: ...

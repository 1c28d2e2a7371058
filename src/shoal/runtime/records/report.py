"""What a peer process tells whoever started it: one JSON line each, on its standard output. And the status file they end up in.

Only agreed facts and the peer's own state are told; what they add up to (the account, the live view) is made by the
reader. A line from a process killed while writing is half a line, and passed over.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from shoal.core.messages import Peer, View
from shoal.escaping import escaped_json
from shoal.traffic import Kept, Traffic


class Line(msgspec.Struct, frozen=True, tag=True):
    """One line on a peer's standard output."""


class Listening(Line, frozen=True):
    """The peer can be reached: `addresses` is what a newcomer needs to find the run through it."""

    peer: Peer
    addresses: tuple[str, ...]


class Agreed(Line, frozen=True):
    """The peer has learned of this agreed view."""

    time_s: float
    view: View


class Progress(Line, frozen=True):
    """How the peer stands, every half second."""

    peer: Peer
    view: int = 0
    step: int = 0
    stage: int | None = None
    ready: bool = False
    leading: bool = False
    queue_s: float = 0.0
    rate: float = 0.0  # microbatches per second its stage passes when busy
    booked: int = 0
    waiting: int = 0
    inflight: int = 0
    sent: Traffic = Traffic()  # bytes since it began
    received: Traffic = Traffic()
    kept: Kept = Kept()  # now
    kept_most: Kept = Kept()  # since it began


class Told(Line, frozen=True):
    """A decision worth telling, from the machine, or of the peer's own: 'trouble', 'network' (which way it sends), 'passes'."""

    time_s: float
    peer: Peer
    kind: str
    text: str


class Ended(Line, frozen=True):
    """The last line. `user_error`: the configuration cannot be run, and `reason` says what would do."""

    ok: bool
    reason: str
    user_error: bool = False


AnyLine = Listening | Agreed | Progress | Told | Ended

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AnyLine)


def encode(line: AnyLine) -> bytes:
    return escaped_json(_encoder.encode(line)) + b"\n"


def decode(text: bytes) -> AnyLine | None:
    """None for what is no line of ours: half a line, or a library that prints."""
    try:
        line: AnyLine = _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return line


def replace(path: Path, data: bytes) -> None:
    """Write a small file so that a reader finds the old content or the new one, never half."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(data)
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise

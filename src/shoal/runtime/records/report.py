"""The report of a peer process to its launcher: JSON lines on standard output. And atomic writes of small files.

A report holds agreed views and the peer's own state; the launcher computes the account and the live view. Readers skip the
half line of a process killed while writing.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from shoal.core.messages import Peer, Signed, View
from shoal.escaping import UNDECODABLE, escaped_json
from shoal.traffic import StoredBytes, Traffic


class ReportLine(msgspec.Struct, frozen=True, tag=True):
    """One line on a peer's standard output."""


class Listening(ReportLine, frozen=True):
    """The peer is reachable; a joiner finds the run through `addresses`."""

    peer: Peer
    addresses: tuple[str, ...]


class Located(ReportLine, frozen=True):
    """Another peer is reached at this host; a joiner finds the run through `addresses`, too."""

    peer: Peer
    host: str
    addresses: tuple[str, ...] = ()
    region: str = ""


class Agreed(ReportLine, frozen=True):
    """The peer has received this agreed view."""

    time_s: float
    view: View


class Proven(ReportLine, frozen=True):
    """An agreed view that commits a step, as msgpack, with the signatures that prove it, and passes of signers that were not told before,
    by key (runtime/proofs.py)."""

    number: int
    view: bytes
    term: int
    leader: Peer
    before: tuple[Peer, ...]
    signed: tuple[Signed, ...]
    passes: dict[str, bytes] = {}


class PeerProgress(ReportLine, frozen=True):
    """The peer's state, every half second."""

    peer: Peer
    view: int = 0
    step: int = 0
    stage: int | None = None
    ready: bool = False
    leading: bool = False
    leader: Peer | None = None  # whom it follows; None: it hears nobody
    alone: bool = False  # it has heard no leader for long: nothing is agreed
    heard: tuple[Peer, ...] = ()  # peers of the view that sent it anything lately
    queue_s: float = 0.0
    rate: float = 0.0  # microbatches per second its stage passes when busy
    booked: int = 0
    waiting: int = 0
    inflight: int = 0
    sent: Traffic = Traffic()  # bytes since it started
    received: Traffic = Traffic()
    kept: StoredBytes = StoredBytes()  # now
    kept_most: StoredBytes = StoredBytes()  # peak since it started


class Notice(ReportLine, frozen=True):
    """A decision of the machine, or an event of the peer: 'trouble', 'network' (its transport to a peer), 'passes'."""

    time_s: float
    peer: Peer
    kind: str
    text: str


class Ended(ReportLine, frozen=True):
    """The last line. `user_error`: the configuration is invalid, and `reason` says what would work."""

    ok: bool
    reason: str
    user_error: bool = False


AnyLine = Listening | Located | Agreed | Proven | PeerProgress | Notice | Ended

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AnyLine)


def encode(line: AnyLine) -> bytes:
    return escaped_json(_encoder.encode(line)) + b"\n"


def decode(text: bytes) -> AnyLine | None:
    """None: half a line, or output of a library."""
    try:
        line: AnyLine = _decoder.decode(text)
    except UNDECODABLE:
        return None
    return line


def replace(path: Path, data: bytes) -> None:
    """Write a small file atomically: a reader sees the old content or the new one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(data)
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise

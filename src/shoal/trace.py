"""The trace: every event and command of a peer's machine, in real runs and simulations alike, and its replay.

A trace is a file of JSON lines. A Header introduces each peer with the arguments of its machine; each TraceRecord after it is
one call of that machine: time, event, commands; a TrafficRecord holds the bytes sent so far. So a trace can be replayed: the
same machines with the same events must return the same commands. A trace above its size limit lacks its oldest lines
(runtime/records/tape.py): each segment starts with the Header again, which counts the lines before it. A process killed while
writing leaves half a last line, which readers skip. runtime/records/record.py writes without blocking.
"""

from __future__ import annotations

import gzip
import heapq
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from random import Random
from typing import IO, cast, get_args, get_type_hints

import msgspec

from shoal.core.messages import (
    PROTOCOL,
    Asked,
    Barred,
    Command,
    Do,
    Done,
    Drop,
    Event,
    Failed,
    Find,
    Finish,
    Found,
    LineMeasured,
    Note,
    Peer,
    Received,
    SaveAsked,
    Send,
    Settings,
    Tick,
    Unreachable,
    Withdraw,
    WithdrawState,
)
from shoal.escaping import UNDECODABLE, escaped, escaped_json
from shoal.traffic import StoredBytes, Traffic

MAX_LINE_BYTES = 64 << 20  # one event with its commands: a view of 100,000 microbatches sent to 100 peers fits

AnyEvent = Received | Unreachable | Done | Failed | Tick | Found | Asked | SaveAsked | Barred | LineMeasured
AnyCommand = Send | Withdraw | WithdrawState | Drop | Note | Finish | Find | Do


class Header(msgspec.Struct, frozen=True):
    """The arguments of a peer's machine. `seed`: of its random source; `config`: digest of the run's configuration."""

    protocol: int
    peer: Peer
    settings: Settings
    seed: str
    found: bool
    config: str = ""
    before: int = 0  # lines of that peer in earlier segments


class TraceRecord(msgspec.Struct, frozen=True, array_like=True):
    """One call of a peer's machine. `time_s`: seconds on the machine's monotonic clock."""

    time_s: float
    peer: Peer
    event: AnyEvent
    commands: tuple[AnyCommand, ...]


class TrafficRecord(msgspec.Struct, frozen=True, tag="carried"):
    """Bytes sent, received and stored at most, up to the end of `step` or of the peer. Not a call of the machine."""

    time_s: float
    peer: Peer
    step: int
    sent: Traffic
    received: Traffic
    kept: StoredBytes = StoredBytes()


class Replay(msgspec.Struct, frozen=True):
    """Result of a replay. `first`: the first differing command; '': all are the same."""

    peers: int
    events: int
    commands: int
    differing: int
    first: str = ""
    missing: dict[Peer, int] = {}  # lines missing of peers; each was replayed up to the gap


_encoder = msgspec.json.Encoder()
_headers = msgspec.json.Decoder(Header)
_traffic_records = msgspec.json.Decoder(TrafficRecord)
_TRAFFIC_START = b'{"type":"carried"'  # msgspec writes a tag first
_records = msgspec.json.Decoder(TraceRecord)


def line(item: Header | TraceRecord | TrafficRecord) -> bytes:
    return escaped_json(_encoder.encode(item)) + b"\n"


def line_of(time_s: float, peer: Peer, event: Event, commands: list[Command]) -> bytes:
    """The line of a TraceRecord, without creating it."""
    return escaped_json(_encoder.encode((time_s, peer, event, commands))) + b"\n"


def read(path: str | Path) -> Iterator[Header | TraceRecord | TrafficRecord]:
    """Everything in the trace, in order. ValueError: names the malformed line. Half a last line is skipped."""
    with _open(path) as file:
        for number, text in enumerate(_lines(file, str(path)), start=1):
            try:
                if text.startswith(_TRAFFIC_START):
                    yield _traffic_records.decode(text)
                else:
                    yield _headers.decode(text) if text.startswith(b"{") else _records.decode(text)
            except UNDECODABLE as error:
                raise ValueError(f"{path}, line {number}: not a line of a trace ({error})") from None


def merge(traces: Iterable[Sequence[str | Path]], into: str | Path) -> int:
    """Merge peers' traces, each a list of segments, by time; the peers must share a clock. Compressed when `into` ends in
    .gz. Returns the number of lines."""
    count = 0
    with ExitStack() as stack:
        out = stack.enter_context(
            gzip.open(into, "wb", compresslevel=1) if str(into).endswith(".gz") else open(into, "wb")
        )
        streams = [_joined(paths, stack) for paths in traces]
        for _, text in heapq.merge(*streams, key=lambda pair: pair[0]):
            out.write(text)
            count += 1
    return count


def find(directory: str | Path) -> Path:
    """The trace in a run's directory, compressed or not."""
    packed = Path(directory) / "trace.jsonl.gz"
    return packed if packed.exists() else Path(directory) / "trace.jsonl"


def replay(path: str | Path) -> Replay:
    """Feed every event of the trace to fresh machines and compare their commands with the recorded ones."""
    from shoal.core.peer import PeerMachine  # here, so that reading a trace does not need the machines

    machines: dict[Peer, PeerMachine | None] = {}
    events = commands = differing = 0
    first = ""
    missing: dict[Peer, int] = {}
    lines: Counter[Peer] = Counter()
    for item in read(path):
        if isinstance(item, Header) and item.before > lines[item.peer]:
            missing[item.peer] = missing.get(item.peer, 0) + item.before - lines[item.peer]
            lines[item.peer] = item.before
            machines.setdefault(item.peer, None)
            continue
        if not isinstance(item, Header):
            lines[item.peer] += 1
        if isinstance(item, Header):
            if item.protocol != PROTOCOL:
                raise ValueError(f"{path}: recorded under protocol {item.protocol}; this version speaks {PROTOCOL}")
            machines[item.peer] = PeerMachine(item.peer, item.settings, Random(item.seed), item.found)
            continue
        if isinstance(item, TrafficRecord):
            continue
        if item.peer not in machines:
            raise ValueError(f"{path}: {item.peer} acts before the header that introduces it")
        machine = machines[item.peer]
        if machine is None or item.peer in missing:
            continue
        replayed = machine.handle(item.event, item.time_s)
        events += 1
        commands += len(item.commands)
        differences = _differing(item.commands, replayed)
        if differences and not first:
            first = f"{item.peer} at {item.time_s:.6f} on {_around(_show(item.event), 0)}: {differences[0]}"
        differing += len(differences)
    return Replay(len(machines), events, commands, differing, first, missing)


def finite(value: object) -> bool:
    """Whether all numbers in the message are finite; an honest peer sends no others."""
    if isinstance(value, float):
        return value - value == 0.0
    if isinstance(value, msgspec.Struct):
        return all(finite(getattr(value, field)) for field in _with_numbers(type(value)))
    return all(finite(part) for part in value) if isinstance(value, tuple) else True


@cache
def _with_numbers(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Names of the fields in which a float may be, by their types: few of most messages, which are many."""
    return tuple(
        name for name, hint in get_type_hints(kind).items() if name in kind.__struct_fields__ and _may_hold_number(hint)
    )


def _may_hold_number(hint: object) -> bool:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return bool(_with_numbers(hint))
    return hint is float or any(map(_may_hold_number, get_args(hint)))


def _differing(recorded: tuple[AnyCommand, ...], replayed: list[Command]) -> list[str]:
    differences = []
    for position in range(max(len(recorded), len(replayed))):
        before = recorded[position] if position < len(recorded) else None
        after = replayed[position] if position < len(replayed) else None
        if before != after:
            differences.append(_difference(_show(before), _show(after)))
    return differences


def _show(item: object) -> str:
    return escaped(_encoder.encode(item).decode())


def _lines(file: IO[bytes], name: str) -> Iterator[bytes]:
    number = 0
    while True:
        try:
            text = file.readline(MAX_LINE_BYTES)
        except (
            EOFError,
            zlib.error,
            gzip.BadGzipFile,
        ):  # half a segment, after a loss of power: the lines before the end count
            return
        if not text:
            return
        number += 1
        if text.endswith(b"\n"):
            yield text
        elif len(text) == MAX_LINE_BYTES:
            raise ValueError(f"{name}, line {number}: longer than {MAX_LINE_BYTES} bytes, so it is not a trace")


def _open(path: str | Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path, "rb")) if str(path).endswith(".gz") else open(path, "rb")


def _joined(paths: Sequence[str | Path], stack: ExitStack) -> Iterator[tuple[float, bytes]]:
    """The lines of one peer's segments, oldest first, with the first Header and those after a gap."""
    count, last_s = 0, float("-inf")
    for path in paths:
        for time_s, text in _timed(stack.enter_context(_open(path)), str(path)):
            if text.startswith(b"{") and not text.startswith(_TRAFFIC_START):
                before = _headers.decode(text).before
                if before == count and count:
                    continue
                count = before
                yield last_s, text
            else:
                count += 1
                last_s = time_s
                yield time_s, text


def _timed(file: IO[bytes], name: str) -> Iterator[tuple[float, bytes]]:
    """Lines with their times; headers sort first."""
    for text in _lines(file, name):
        if text.startswith(_TRAFFIC_START):
            yield _traffic_records.decode(text).time_s, text
        else:
            yield (float("-inf") if text.startswith(b"{") else float(text[1 : text.index(b",")])), text


AROUND = 160  # characters shown on each side of a difference: whole views run to thousands


def _difference(recorded: str, replayed: str) -> str:
    """The first difference of two commands, with its context."""
    same = 0
    while same < min(len(recorded), len(replayed)) and recorded[same] == replayed[same]:
        same += 1
    return f"recorded {_around(recorded, same)}, replayed {_around(replayed, same)}"


def _around(text: str, at: int) -> str:
    head = text[:40] + " ... " if at > AROUND + 40 else text[: max(0, at - AROUND)]
    tail = " ..." if len(text) > at + AROUND else ""
    return f"{head}{text[max(0, at - AROUND) : at + AROUND]}{tail}"

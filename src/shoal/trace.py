"""One record of what happened, for real runs and simulations alike: who was told what when, and what it decided.

A trace is a file of JSON lines. A Header introduces each peer with all that its machine was made from; every Record after it is
one call of that machine: the time handed in, the event, the commands that came back; a Carried says what it had sent by then.
So a trace can be replayed: the same machines fed with the same events must give the same commands. A process killed while writing
leaves half a last line, which readers pass over. Writing without making anybody wait is runtime/record.py's business.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import IO

import msgspec

from shoal.core.messages import (
    PROTOCOL,
    Asked,
    Command,
    Do,
    Done,
    Drop,
    Event,
    Failed,
    Find,
    Finish,
    Found,
    Note,
    Peer,
    Received,
    Send,
    Settings,
    Tick,
    Unreachable,
)
from shoal.shown import escaped, escaped_json
from shoal.traffic import Kept, Traffic

MAX_LINE_BYTES = 64 << 20  # one event with its commands: a view of 100,000 microbatches sent to 100 peers fits

AnyEvent = Received | Unreachable | Done | Failed | Tick | Found | Asked
AnyCommand = Send | Drop | Note | Finish | Find | Do


class Header(msgspec.Struct, frozen=True):
    """What a peer's machine was made from. `seed` seeds its random source; `config` is the digest of the run's configuration."""

    protocol: int
    peer: Peer
    settings: Settings
    seed: str
    found: bool
    config: str = ""


class Record(msgspec.Struct, frozen=True, array_like=True):
    """One call of a peer's machine. `time_s` is the time it was handed: seconds since some moment, alike for peers of one machine."""

    time_s: float
    peer: Peer
    event: AnyEvent
    commands: tuple[AnyCommand, ...]


class Carried(msgspec.Struct, frozen=True, tag="carried"):
    """Bytes that a peer had sent and received, and had kept at most, when it left `step`, or at its end. No machine was called."""

    time_s: float
    peer: Peer
    step: int
    sent: Traffic
    received: Traffic
    kept: Kept = Kept()


class Replay(msgspec.Struct, frozen=True):
    """What a replay found. `first` shows the first differing command, '' when all are the same."""

    peers: int
    events: int
    commands: int
    differing: int
    first: str = ""


_encoder = msgspec.json.Encoder()
_headers = msgspec.json.Decoder(Header)
_carried = msgspec.json.Decoder(Carried)
_CARRIED = b'{"type":"carried"'  # msgspec writes a tag first
_records = msgspec.json.Decoder(Record)


def line(item: Header | Record | Carried) -> bytes:
    return escaped_json(_encoder.encode(item)) + b"\n"


def line_of(time_s: float, peer: Peer, event: Event, commands: list[Command]) -> bytes:
    """The line of a Record, without making the record."""
    return escaped_json(_encoder.encode((time_s, peer, event, commands))) + b"\n"


def read(path: str | Path) -> Iterator[Header | Record | Carried]:
    """Everything in the trace, in order. ValueError names the line that is none; half a last line is passed over."""
    with open(path, "rb") as file:
        for number, text in enumerate(_lines(file, str(path)), start=1):
            try:
                if text.startswith(_CARRIED):
                    yield _carried.decode(text)
                else:
                    yield _headers.decode(text) if text.startswith(b"{") else _records.decode(text)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ValueError(f"{path}, line {number}: not a line of a trace ({error})") from None


def merge(paths: Iterable[str | Path], into: str | Path) -> int:
    """Several peers' traces as one, by time; all of one machine, whose peers share a clock. Returns the number of lines."""
    count = 0
    with ExitStack() as stack, open(into, "wb") as out:
        files = [(stack.enter_context(open(path, "rb")), str(path)) for path in paths]
        for _, text in heapq.merge(*(_timed(file, name) for file, name in files), key=lambda pair: pair[0]):
            out.write(text)
            count += 1
    return count


def replay(path: str | Path) -> Replay:
    """Feed every event of the trace to fresh machines and compare what they say with what was recorded."""
    from shoal.core.peer import PeerMachine  # here, so that reading a trace does not need the machines

    machines: dict[Peer, PeerMachine] = {}
    events = commands = differing = 0
    first = ""
    for item in read(path):
        if isinstance(item, Header):
            if item.protocol != PROTOCOL:
                raise ValueError(f"{path}: recorded under protocol {item.protocol}; this version speaks {PROTOCOL}")
            machines[item.peer] = PeerMachine(item.peer, item.settings, Random(item.seed), item.found)
            continue
        if isinstance(item, Carried):
            continue
        if item.peer not in machines:
            raise ValueError(f"{path}: {item.peer} acts before the header that introduces it")
        said = machines[item.peer].handle(item.event, item.time_s)
        events += 1
        commands += len(item.commands)
        wrong = _differing(item.commands, said)
        if wrong and not first:
            first = f"{item.peer} at {item.time_s:.6f} on {_around(_show(item.event), 0)}: {wrong[0]}"
        differing += len(wrong)
    return Replay(peers=len(machines), events=events, commands=commands, differing=differing, first=first)


def finite(value: object) -> bool:
    """Whether no number in this message is infinite or not a number: such a value is nobody's honest answer."""
    if isinstance(value, float):
        return value - value == 0.0
    if isinstance(value, msgspec.Struct):
        return all(finite(getattr(value, field)) for field in value.__struct_fields__)
    if isinstance(value, tuple) and value and not isinstance(value[0], (int, str)):
        return all(finite(part) for part in value)
    return True


def _differing(recorded: tuple[AnyCommand, ...], said: list[Command]) -> list[str]:
    wrong = []
    for position in range(max(len(recorded), len(said))):
        then = recorded[position] if position < len(recorded) else None
        now = said[position] if position < len(said) else None
        if then != now:
            wrong.append(_apart(_show(then), _show(now)))
    return wrong


def _show(item: object) -> str:
    return escaped(_encoder.encode(item).decode())


def _lines(file: IO[bytes], name: str) -> Iterator[bytes]:
    number = 0
    while text := file.readline(MAX_LINE_BYTES):
        number += 1
        if text.endswith(b"\n"):
            yield text
        elif len(text) == MAX_LINE_BYTES:
            raise ValueError(f"{name}, line {number}: longer than {MAX_LINE_BYTES} bytes, so it is not a trace")


def _timed(file: IO[bytes], name: str) -> Iterator[tuple[float, bytes]]:
    """Lines with their times; headers come before everything."""
    for text in _lines(file, name):
        if text.startswith(_CARRIED):
            yield _carried.decode(text).time_s, text
        else:
            yield (float("-inf") if text.startswith(b"{") else float(text[1 : text.index(b",")])), text


AROUND = 160  # characters shown on each side of a difference: whole views run to thousands


def _apart(recorded: str, replayed: str) -> str:
    """Where two commands part, with what stands around it."""
    same = 0
    while same < min(len(recorded), len(replayed)) and recorded[same] == replayed[same]:
        same += 1
    return f"recorded {_around(recorded, same)}, replayed {_around(replayed, same)}"


def _around(text: str, at: int) -> str:
    head = text[:40] + " ... " if at > AROUND + 40 else text[: max(0, at - AROUND)]
    tail = " ..." if len(text) > at + AROUND else ""
    return f"{head}{text[max(0, at - AROUND) : at + AROUND]}{tail}"

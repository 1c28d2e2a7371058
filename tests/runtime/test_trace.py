"""A trace gives back what was written, survives a torn end, and replays to the same commands."""

from __future__ import annotations

from pathlib import Path
from random import Random

import msgspec
import pytest

from shoal import trace
from shoal.core.messages import (
    PROTOCOL,
    BlobRef,
    Command,
    Do,
    Event,
    Fetch,
    Finish,
    Forward,
    Note,
    Received,
    Send,
    Settings,
    Tick,
)
from shoal.core.peer import PeerMachine

SETTINGS = Settings(stages=1, microbatches=2, steps=2)


def a_header(peer: str = "p1") -> trace.Header:
    return trace.Header(PROTOCOL, peer, SETTINGS, seed=f"0/{peer}", found=True, config="abc")


def a_record(time_s: float = 1.5, peer: str = "p1") -> trace.TraceRecord:
    message = Forward(epoch=0, step=3, index=1, stage=0, attempt=2, view=9)
    event = Received(peer="p2", message=message, blobs=(BlobRef("r/1", 64),))
    commands = (
        Do(Fetch("t/1", 3, 1, "t/x1")),
        Send("p2", message, ("t/x1",)),
        Note("route", "because"),
        Finish(True, "over"),
    )
    return trace.TraceRecord(time_s, peer, event, commands)


def write(path: Path, *items: trace.Header | trace.TraceRecord) -> Path:
    path.write_bytes(b"".join(map(trace.line, items)))
    return path


def a_lone_run(path: Path) -> list[trace.TraceRecord]:
    """A founder that waits for others, told the time for a while."""
    header = a_header()
    machine = PeerMachine(header.peer, header.settings, Random(header.seed), header.found)
    records = []
    for beat in range(20):
        event: Event = Tick()
        commands: list[Command] = machine.handle(event, now=beat * 0.25)
        records.append(trace.TraceRecord(beat * 0.25, header.peer, event, tuple(commands)))  # type: ignore[arg-type]
    write(path, header, *records)
    return records


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    items = [a_header(), a_record(0.1), a_record(2.0000000000000004)]
    assert list(trace.read(write(tmp_path / "t.jsonl", *items))) == items


def test_a_line_made_without_a_record_is_the_same_line() -> None:
    record = a_record()
    assert trace.line_of(record.time_s, record.peer, record.event, list(record.commands)) == trace.line(record)


def test_half_a_last_line_is_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", a_header(), a_record())
    whole = path.read_bytes()
    for cut in (1, 10, len(trace.line(a_record())) - 1):
        path.write_bytes(whole[:-cut])
        assert list(trace.read(path)) == [a_header()]


def test_a_line_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(trace.line(a_header()) + b'[1.0,"p1",{"type":"Nonsense"},[]]\n' + trace.line(a_record()))
    with pytest.raises(ValueError, match=r"t\.jsonl, line 2: not a line of a trace"):
        list(trace.read(path))


def test_a_line_without_end_is_refused_before_memory_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MAX_LINE_BYTES", 1000)
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"[" * 5000)
    with pytest.raises(ValueError, match="line 1: longer than 1000 bytes"):
        list(trace.read(path))


def test_traces_are_merged_by_time_with_all_headers_first(tmp_path: Path) -> None:
    one = write(tmp_path / "1.jsonl", a_header("p1"), a_record(1.0, "p1"), a_record(3.0, "p1"))
    two = write(tmp_path / "2.jsonl", a_header("p2"), a_record(2.0, "p2"))
    with open(two, "ab") as file:
        file.write(trace.line(a_record(4.0, "p2"))[:-7])  # killed while writing
    assert trace.merge([[one], [two]], tmp_path / "all.jsonl") == 5
    items = list(trace.read(tmp_path / "all.jsonl"))
    assert [item.peer for item in items] == ["p1", "p2", "p1", "p2", "p1"]
    assert [item.time_s for item in items if isinstance(item, trace.TraceRecord)] == [1.0, 2.0, 3.0]


def test_a_replay_says_the_same(tmp_path: Path) -> None:
    records = a_lone_run(tmp_path / "t.jsonl")
    replayed = trace.replay(tmp_path / "t.jsonl")
    said = sum(len(record.commands) for record in records)
    assert said > 0
    assert replayed == trace.Replay(peers=1, events=len(records), commands=said, differing=0)


def test_a_replay_shows_the_first_command_that_differs(tmp_path: Path) -> None:
    records = a_lone_run(tmp_path / "t.jsonl")
    at = next(n for n, record in enumerate(records) if record.commands)
    records[at] = msgspec.structs.replace(records[at], commands=(*records[at].commands, Note("route", "never said")))
    replayed = trace.replay(write(tmp_path / "t.jsonl", a_header(), *records))
    assert replayed.differing == 1
    assert "never said" in replayed.first
    assert "p1 at" in replayed.first


def test_a_trace_of_another_protocol_is_refused(tmp_path: Path) -> None:
    header = msgspec.structs.replace(a_header(), protocol=PROTOCOL + 1)
    with pytest.raises(ValueError, match=f"recorded under protocol {PROTOCOL + 1}"):
        trace.replay(write(tmp_path / "t.jsonl", header))


def test_a_number_that_is_not_finite_is_found_wherever_it_is() -> None:
    from shoal.core.messages import Booking, Heartbeat, OwnedSums, Reduced, Sketch

    assert trace.finite(Heartbeat(1, 1, 1, True, (Booking(0, 2.5), Booking(1, None)), queue_s=0.5))
    assert not trace.finite(Heartbeat(1, 1, 1, True, (Booking(0, 2.5), Booking(1, float("nan")))))
    assert not trace.finite(Heartbeat(1, 1, 1, True, rate=float("inf")))
    assert not trace.finite(Reduced(0, 1, 1, "d", float("-inf")))
    ours, theirs = Sketch(), Sketch(products=(0.0, 1.0, float("nan"), 0.0))
    assert trace.finite(Reduced(0, 1, 1, "d", 1.0, sums=(OwnedSums("d", ours, parts=(ours, ours)),)))
    assert not trace.finite(Reduced(0, 1, 1, "d", 1.0, sums=(OwnedSums("d", ours, parts=(ours, theirs)),)))

"""A trace keeps within its room, gives way to what matters more, and says what it lacks."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from random import Random

import msgspec
import pytest

from shoal import trace
from shoal.cli import main
from shoal.core.messages import PROTOCOL, Settings, Tick
from shoal.core.peer import PeerMachine
from shoal.runtime.records import tape
from shoal.runtime.records.record import Recorder
from shoal.runtime.records.tape import Tape, segments

HEADER = trace.Header(PROTOCOL, "p1", Settings(stages=1, microbatches=1, steps=1), seed="0/p1", found=True)


def lines(count: int, first: int = 0) -> list[bytes]:
    """What a founder's machine says that waits for others."""
    machine = PeerMachine("p1", HEADER.settings, Random(HEADER.seed), True)
    written = [trace.line_of(n * 0.25, "p1", Tick(), machine.handle(Tick(), n * 0.25)) for n in range(first + count)]
    return written[first:]


def disk_bytes(directory: Path) -> int:
    return sum(map(tape._size_bytes, directory.iterdir()))  # one may be packed just now


def merged(directory: Path, into: str = "all.jsonl") -> Path:
    place = directory.parent / into
    trace.merge(segments(directory).values(), place)
    return place


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "traces").mkdir()
    return tmp_path / "traces"


def test_a_trace_of_a_month_stays_within_its_room_and_keeps_its_beginning_and_its_newest_part(place: Path) -> None:
    limit, each, begun = 64 << 10, lines(1)[0], lines(100)
    recording = Tape(place / "p1.jsonl", HEADER, limit)
    count, most = 40 * limit // len(each), 0
    for n in range(count):
        line = begun[n] if n < len(begun) else each.replace(b"0.0", f"{n}.0".encode(), 1)
        assert recording.write([line]) == ""
        if n % 1000 == 0:
            most = max(most, disk_bytes(place))
    recording.close()
    assert max(most, disk_bytes(place)) <= limit
    items = list(trace.read(merged(place)))
    gap = next(n for n, item in enumerate(items) if isinstance(item, trace.Header) and item.before)
    header, kept = items[gap], items[gap + 1 :]
    assert isinstance(header, trace.Header) and header.before == count - len(kept) > gap
    assert [int(item.time_s) for item in kept if isinstance(item, trace.TraceRecord)] == [
        *range(count - len(kept), count)
    ]
    replayed = trace.replay(merged(place))
    assert replayed.events == gap - 1 >= 100 and replayed.missing == {"p1": header.before - replayed.events}
    assert len(kept) * len(each) > limit, "compressed, more than its room is kept"


def test_a_trace_in_several_segments_that_lacks_nothing_replays(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = Tape(place / "p1.jsonl", HEADER, 32 << 10)
    for line in lines(400):
        recording.write([line])
    recording.close()
    assert len(segments(place)["p1"]) > 2
    replayed = trace.replay(merged(place, "trace.jsonl.gz"))
    assert (replayed.events, replayed.differing, replayed.missing) == (400, 0, {})
    assert main.main(["replay", str(place.parent)]) == 0
    assert "identical" in capsys.readouterr().out


def test_what_is_missing_is_said_and_replayed_up_to_there(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, (first, count) in enumerate(((0, 100), (150, 50)), start=1):
        header = msgspec.structs.replace(HEADER, before=first)
        (place / f"p1.{number:06}.jsonl").write_bytes(trace.line(header) + b"".join(lines(count, first)))
    replayed = trace.replay(merged(place, "trace.jsonl"))
    assert (replayed.events, replayed.differing, replayed.missing) == (100, 0, {"p1": 50})
    assert main.main(["replay", str(place.parent)]) == 0
    assert "50 lines of 1 peers are not in this trace any more" in capsys.readouterr().out
    (place / "p1.000001.jsonl").unlink()
    assert trace.replay(merged(place, "trace.jsonl")).missing == {"p1": 150}
    assert main.main(["replay", str(place.parent)]) == 2
    assert "nothing can be replayed" in capsys.readouterr().err


def test_half_a_compressed_segment_counts_as_far_as_it_goes(place: Path) -> None:
    recording = Tape(place / "p1.jsonl", HEADER, 64 << 10)
    for line in lines(600):
        recording.write([line])
    recording.close()
    [packed, *_] = sorted(place.glob("*.gz"))
    packed.write_bytes(packed.read_bytes()[:-40])
    replayed = trace.replay(merged(place))
    assert 0 < replayed.events < 600 and replayed.differing == 0 and replayed.missing["p1"] > 0


def test_the_trace_gives_way_to_the_next_checkpoint_and_goes_on_when_there_is_room(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [1 << 30]
    monkeypatch.setattr(tape, "_free_bytes", lambda path: free[0] - disk_bytes(place))
    monkeypatch.setattr(tape, "CHECK_S", 0.0)
    monkeypatch.setattr(tape, "RETRY_S", 0.0)
    checkpoint = 10 << 20
    recording = Tape(place / "p1.jsonl", HEADER, 64 << 10, lambda: checkpoint)
    for line in lines(300):
        assert recording.write([line]) == ""
    wanted = checkpoint + tape.ACCOUNT_BYTES
    free[0] = wanted + 20_000  # room for the newest segment and no more
    assert recording.write(lines(1, 300)) == ""
    assert 0 < disk_bytes(place) <= 20_000
    free[0] = wanted - 1
    said = recording.write(lines(1, 301))
    assert said.startswith("the trace stops here, training goes on") and f"take {wanted:,}" in said
    assert [recording.write([line]) for line in lines(5, 302)] == [""] * 5, "told once"
    free[0] = 1 << 30
    assert recording.write(lines(1, 307)) == "there is room again: the trace goes on, with a gap"
    recording.close()
    *_, header, last = trace.read(merged(place))
    assert isinstance(header, trace.Header) and header.before == 307
    assert isinstance(last, trace.TraceRecord) and last.time_s == 307 * 0.25


class Narrow:
    """A file on a disk with so many bytes of room for everything in a directory."""

    def __init__(self, file: object, directory: Path, room: int) -> None:
        self.file, self.directory, self.room = file, directory, room

    def write(self, data: bytes) -> int:
        taken = min(len(data), self.room - disk_bytes(self.directory))
        if taken <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.file.write(data[:taken])  # type: ignore[attr-defined, no-any-return]

    def __getattr__(self, name: str) -> object:
        return getattr(self.file, name)


def test_a_full_disk_costs_the_oldest_segments_and_leaves_no_torn_line(place: Path) -> None:
    recording = Tape(place / "p1.jsonl", HEADER, 64 << 10)
    for line in lines(300):
        recording.write([line])
    assert recording._compressor is not None
    recording._compressor.join()
    room = disk_bytes(place) + 100
    recording._file = Narrow(recording._file, place, room)  # type: ignore[assignment]
    for line in lines(20, 300):
        recording.write([line])
    recording.close()
    items = list(trace.read(merged(place)))
    assert isinstance(items[-1], trace.TraceRecord) and items[-1].time_s == 319 * 0.25


def test_a_peer_without_a_trace_writes_none(tmp_path: Path) -> None:
    record = Recorder("p1", None)
    record.trace(HEADER, tmp_path / "t.jsonl", most_bytes=0)
    record.event(1.0, Tick(), [])
    record.close()
    assert not (tmp_path / "t.jsonl").exists()


def test_what_finds_no_room_in_memory_is_a_gap_that_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.runtime.records.record.BUFFER_BYTES", 1000)
    monkeypatch.setattr(tape, "RETRY_S", 0.0)
    busy, go = threading.Event(), threading.Event()
    write = Tape.write

    def slow(self: Tape, lines: list[bytes]) -> str:
        busy.set()
        go.wait()
        return write(self, lines)

    monkeypatch.setattr(Tape, "write", slow)
    record = Recorder("p1", None)
    record.trace(HEADER, tmp_path / "t.jsonl")
    record.event(0.0, Tick(), [])
    busy.wait()
    for n in range(100):
        record.event(float(n), Tick(), [])
    go.set()
    record.close()
    replayed = trace.replay(tmp_path / "t.jsonl")
    assert 1 < replayed.events < 101, "what was in memory, and no more"


def test_a_file_of_somebody_else_at_its_place_is_left_alone(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a run's directory was moved away and another run has begun there."""
    monkeypatch.setattr(tape, "RETRY_S", 0.0)
    recording = Tape(place / "p1.jsonl", HEADER, 32 << 10)
    os.rename(place, place.with_name("elsewhere"))
    place.mkdir()
    (place / "p1.jsonl").write_bytes(b"another's")
    said = [recording.write([line]) for line in lines(300)]
    assert sum("deleted or moved away" in text for text in said) == 1
    recording.close()
    assert [(path.name, path.read_bytes()) for path in place.iterdir()] == [("p1.jsonl", b"another's")]

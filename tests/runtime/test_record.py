"""The record never makes the driver wait or fail: what cannot be written is told, and the rest goes on."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from shoal import trace
from shoal.core.messages import PROTOCOL, Note, Settings, Tick, View
from shoal.runtime.records.record import Recorder
from shoal.runtime.records.report import Agreed, Listening, Notice, decode, encode

HEADER = trace.Header(PROTOCOL, "p1", Settings(stages=1, microbatches=1, steps=1), seed="0/p1", found=True)


class Pipe(io.BytesIO):
    """Keeps what was written when it is closed."""

    def lines(self) -> list[object]:
        return [decode(line) for line in self.getvalue().splitlines()]


def test_every_event_is_in_the_trace_and_every_note_is_told(tmp_path: Path) -> None:
    out = Pipe()
    record = Recorder("p1", out)
    record.trace(HEADER, tmp_path / "t.jsonl")
    for n in range(1000):
        record.event(float(n), Tick(), [Note("route", f"reason {n}")] if n % 100 == 0 else [])
    record.view(7.0, View(number=1, step=0, members=()))
    record.close()
    items = list(trace.read(tmp_path / "t.jsonl"))
    assert items[0] == HEADER
    assert [item.time_s for item in items[1:] if isinstance(item, trace.TraceRecord)] == [float(n) for n in range(1000)]
    assert [line.text for line in out.lines() if isinstance(line, Notice)] == [
        f"reason {n}" for n in range(0, 1000, 100)
    ]
    assert Agreed(7.0, View(number=1, step=0, members=())) in out.lines()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_ends_the_trace_and_nothing_else() -> None:
    out = Pipe()
    record = Recorder("p1", out)
    record.trace(HEADER, Path("/dev/full"))
    record.event(1.0, Tick(), [])
    while not any(isinstance(line, Notice) and line.kind == "trouble" for line in out.lines()):
        record.event(1.0, Tick(), [])  # the writing thread finds out in its own time
    record.event(2.0, Tick(), [Note("route", "still here")])
    record.close()
    notices = [line for line in out.lines() if isinstance(line, Notice)]
    assert "the trace stops here, training goes on" in notices[0].text
    assert notices[-1].text == "still here"


def test_a_reader_that_is_gone_does_not_stop_the_trace(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb", buffering=0) as out:
        record = Recorder("p1", out)
        record.trace(HEADER, tmp_path / "t.jsonl")
        record.tell(Listening("p1", ("127.0.0.1:1",)))
        for n in range(100):
            record.event(float(n), Tick(), [Note("route", "to nobody")])
        record.close()
    assert len(list(trace.read(tmp_path / "t.jsonl"))) == 101


def test_what_a_library_prints_is_no_report() -> None:
    line = Notice(1.0, "p1", "route", "why")
    assert decode(encode(line)) == line
    assert decode(encode(line)[:-5]) is None
    assert decode(b"Downloading: 100%\n") is None
    assert decode(b"\xff\xfe\n") is None
    assert decode(b'{"type":"Notice"}\n') is None

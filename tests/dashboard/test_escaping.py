"""What another peer wrote moves no cursor: through the report, the live view, the status, the account, a log and the trace."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from shoal import trace
from shoal.cli import main
from shoal.config import Config
from shoal.core.messages import PROTOCOL, Note, Received, Refused, Settings
from shoal.dashboard import account
from shoal.dashboard.terminal import Happening, PeerLine, Snapshot, Terminal
from shoal.escaping import describe, escaped, escaped_json, escaped_lines
from shoal.launcher.launch import PeerProcess
from shoal.launcher.peer import PlainFormatter
from shoal.launcher.watching.watch import Resumed, RunMonitor
from shoal.planner.inputs import measured
from shoal.runtime.records.record import Recorder
from shoal.runtime.records.report import Ended, Listening, Notice, decode

# A cleared screen, a window's title, C1's CSI, a line written over, a name turned round, a line of its own, a vanished one.
HOSTILE = (
    "\x1b[2J\x1b]0;owned\x07 \x9b31m\rall is well\b\x7f \u202egpj.exe\u202c \u2066x\u2069\u2028a\u2029b\x85c\ufeff\0"
)
FORBIDDEN = [
    *map(chr, [*range(0x20), *range(0x7F, 0xA0)]),
    *"\u061c\u200e\u200f\u2028\u2029\u202a\u202e\u2066\u2069\ufeff",
]
HEADER = trace.Header(PROTOCOL, "p1", Settings(stages=1, microbatches=1, steps=1), seed="0/p1", found=True)


def assert_harmless(text: str, but: str = "") -> None:
    assert [hex(ord(letter)) for letter in set(text) & set(FORBIDDEN) - set(but)] == []


def reported(tmp_path: Path) -> list[bytes]:
    """What a peer's process writes on its standard output when a decision quotes such a text; and its trace."""
    out = _Pipe()
    record = Recorder(HEADER.peer, out)
    record.trace(HEADER, tmp_path / "t.jsonl")
    record.event(1.0, Received("p2", Refused(0, 0, 0, 0, 0, True, HOSTILE)), [Note("route", f"p2 says {HOSTILE}")])
    record.note("network", 2.0, HOSTILE)
    record.close()
    return out.getvalue().splitlines(keepends=True)


class _Pipe(io.BytesIO):
    def close(self) -> None:
        """What was written is looked at afterwards."""


def a_watch(tmp_path: Path) -> RunMonitor:
    watch = RunMonitor(Config(), 0.0, Resumed())
    lines = [decode(line) for line in reported(tmp_path)]
    # As a peer of another version, which escapes nothing, would tell them.
    lines += [
        Listening("p2", ()),
        Notice(3.0, "p2", "checkpoint", f"step 1 saved at /x/{HOSTILE}"),
        Ended(False, HOSTILE),
    ]
    for line in lines:
        assert line is not None
        watch.hear("p1", line, 1.0)
    return watch


def test_the_live_view_obeys_nothing(tmp_path: Path) -> None:
    snapshot = a_watch(tmp_path).snapshot(4.0)
    assert len(snapshot.happenings) == 4
    for terminal in (True, False):
        shown = io.StringIO()
        console = Console(file=shown, force_terminal=terminal, width=400, height=60, highlight=False)
        with Terminal(console) as view:
            view.show(snapshot)
            view.show(msgspec.structs.replace(snapshot, state=HOSTILE, peers=(PeerLine(HOSTILE, stage=0),)))
        text = shown.getvalue()
        assert text.count(r"\x1b[2J\x1b]0;owned\x07 \x9b31m") >= 4 and r"\u202egpj.exe" in text
        for sequence in ("\x1b[2J", "\x1b]0", "\x07", "\x9b", "\u202e", "\u2066", "\u2028", "\x85", "\b", "\x7f"):
            assert sequence not in text, repr(sequence)


def test_status_and_account_obey_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watch = a_watch(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    snapshots = [watch.snapshot(4.0)]
    # And a file that somebody else wrote.
    event = Happening(0, 1.0, HOSTILE, HOSTILE, HOSTILE)
    snapshots.append(Snapshot(name=HOSTILE, elapsed_s=1, step=1, steps=2, stages=1, state=HOSTILE, happenings=(event,)))
    for snapshot in snapshots:
        (run / "status.json").write_bytes(msgspec.json.encode(snapshot))
        assert main.main(["status", str(run)]) == 0
        assert_harmless(capsys.readouterr().out, but="\n")
    summary = watch.summary(5.0, early=HOSTILE)
    data = account.encode(msgspec.structs.replace(summary, reason=HOSTILE, checkpoint=HOSTILE))
    assert_harmless(data.decode(), but="\n")
    (run / "summary.json").write_bytes(data)
    assert main.main(["status", str(run)]) == 0
    assert_harmless(capsys.readouterr().out, but="\n")


def test_reports_and_traces_hold_nothing_for_a_terminal_and_mean_the_same(tmp_path: Path) -> None:
    for line in [*reported(tmp_path), *(tmp_path / "t.jsonl").read_bytes().splitlines(keepends=True)]:
        assert_harmless(line.decode(), but="\n")
    [_, recorded] = trace.read(tmp_path / "t.jsonl")
    assert isinstance(recorded, trace.TraceRecord) and isinstance(recorded.event, Received)
    assert recorded.event.message == Refused(0, 0, 0, 0, 0, True, HOSTILE), "a replay sees what the machine saw"


def test_an_error_and_a_log_obey_nothing(tmp_path: Path) -> None:
    assert_harmless(describe(ValueError(HOSTILE)))
    assert_harmless(describe(FileNotFoundError(2, "no such file", HOSTILE)))
    record = logging.LogRecord("shoal", logging.WARNING, "x.py", 1, "%s is dropped: it sent\n%s", ("p2", HOSTILE), None)
    assert_harmless(PlainFormatter("%(name)s: %(message)s").format(record))
    log = tmp_path / "p1.log"
    log.write_text(f"one\n{HOSTILE}\n")
    words = PeerProcess.last_words(a_child(log))
    assert words.startswith("one\n")
    assert_harmless(words, but="\n")


def a_child(log: Path) -> PeerProcess:
    child = PeerProcess.__new__(PeerProcess)
    child.log = log
    return child


def test_a_machines_name_cannot_write_into_cluster_toml() -> None:
    device = measured.device_from(
        f'[[device]]\nname = {json.dumps(HOSTILE)}\nflops = "1 GFLOP/s"\nmemory_bytes = "1 GB"\n'
    )
    quoted = msgspec.structs.replace(device, name='a"\nb = 1')
    assert measured.named([quoted]) == ["ab = 1"]
    text = measured.cluster_text(
        [measured.Machine(name, device) for name in measured.named([device])],
        [measured.MeasuredLink("a", "b", 0.0, 0.0, HOSTILE)],
    )
    assert_harmless(text, but="\n")


def test_what_is_shown_can_still_be_read() -> None:
    kept = "naïve – 日本語 می‌خواهم 👨‍👩‍👧 |\\x1b|"  # joiners are letters' business
    assert escaped(kept) == escaped_lines(kept) == kept
    assert escaped("a\nb\tc") == r"a\x0ab\x09c" and escaped_lines("a\nb\tc") == "a\nb\tc"
    assert escaped_json(kept.encode()) == kept.encode()

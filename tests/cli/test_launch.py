"""What a launcher keeps of its peers for months: logs that stay short, and traces of the dead within a room of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shoal.launcher import launch
from shoal.launcher.files import rundir
from shoal.launcher.launch import PeerProcess

TALKER = """
import sys
for line in sys.stdin:
    sys.stderr.write(line)
    sys.stderr.flush()
    print("written", flush=True)
"""


def test_a_log_begins_anew_under_a_process_that_goes_on_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "LOG_BYTES", 1000)
    child = PeerProcess.__new__(PeerProcess)
    child.log = tmp_path / "p1.log"
    with open(child.log, "ab") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", TALKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    assert process.stdin is not None and process.stdout is not None
    most = 0
    for n in range(300):
        process.stdin.write(f"line {n} of the log\n")
        process.stdin.flush()
        process.stdout.readline()
        child.trim_log()
        most = max(most, sum(path.stat().st_size for path in tmp_path.iterdir()))
    process.communicate()
    assert most <= 2 * 1000 + 50
    before, now = (tmp_path / "p1.log.1").read_text(), child.log.read_text()
    log_lines = [f"line {n} of the log" for n in range(300)]
    assert (before + now).splitlines() == log_lines[-len((before + now).splitlines()) :], (
        "the newest lines, none torn or lost"
    )
    assert "line 299" in child.last_words()


def test_traces_of_the_dead_go_before_those_of_the_living(tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    traces.mkdir()
    for label in ("p1", "p2", "p3"):
        (traces / f"{label}.000001.jsonl.gz").write_bytes(bytes(600))
        (traces / f"{label}.jsonl").write_bytes(bytes(400))
    assert rundir.thin_traces(tmp_path, ["p1", "p2"], 2000) == []
    assert rundir.thin_traces(tmp_path, ["p2", "p1"], 1500) == ["p2"]
    assert sorted(path.name for path in traces.iterdir()) == [
        "p1.000001.jsonl.gz",
        "p1.jsonl",
        "p3.000001.jsonl.gz",
        "p3.jsonl",
    ]

"""Files of a launcher on a disk that is full for a while: nothing ends for it, and commits come whole, once and in order."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec
import pytest
from tests.recorded_run import RecordedRun

from shoal.config import microbatches
from shoal.core.messages import Committed
from shoal.dashboard.plot import THINNED, curve
from shoal.dashboard.terminal import Happening, PeerLine, Snapshot
from shoal.launcher.files import run_directory, rundir
from shoal.launcher.files.output_files import OutputFiles
from shoal.launcher.files.run_directory import STATUS_BPS, StatusFile
from shoal.launcher.watching.reader import RunReader
from shoal.runtime.records import account
from shoal.runtime.records.account import CommitHistory, CommittedStep
from shoal.traffic import Traffic


def a_step(number: int) -> CommittedStep:
    return CommittedStep(epoch=0, commit=Committed(number, 1, 1.0, 2.0, (), ()), heard_s=float(number))


class Narrow:
    """A file on a disk with room for so many bytes."""

    def __init__(self, file: object, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = min(self.room, len(data))
        self.room -= taken
        self.file.write(data[:taken])  # type: ignore[attr-defined]
        return taken

    def close(self) -> None:
        self.file.close()  # type: ignore[attr-defined]


def test_commits_wait_for_room_and_no_line_is_torn(tmp_path: Path) -> None:
    warnings: list[str] = []
    files = OutputFiles(tmp_path, warnings.append)
    narrow = files._commits = Narrow(files._commits, room=100)  # type: ignore[assignment]
    for number in range(5):
        files.commit(a_step(number))
    assert warnings == [f"{tmp_path / 'commits.jsonl'} cannot be written, training goes on: No space left on device"]
    narrow.room = 10_000  # type: ignore[attr-defined]
    files.flush()
    files.commit(a_step(5))
    files.close()
    lines = (tmp_path / "commits.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(line, type=CommittedStep).commit.step for line in lines] == [*range(6)]


def test_a_file_that_cannot_be_written_is_told_once_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    files = OutputFiles(tmp_path, warnings.append)
    assert files.put("status.json", b"old")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        assert not files.put("status.json", b"new") and not files.put("status.json", b"newer")
    assert len(warnings) == 1 and "status.json cannot be written" in warnings[0]
    assert (tmp_path / "status.json").read_bytes() == b"old"
    assert files.put("status.json", b"newest") and (tmp_path / "status.json").read_bytes() == b"newest"
    files.close()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


LOSSES = tuple(2.0 + 1 / (1 + n) for n in range(20_000))


def a_snapshot(steps: int, elapsed_s: float = 1.0) -> Snapshot:
    return Snapshot(
        name="r",
        elapsed_s=elapsed_s,
        step=steps,
        steps=10**6,
        stages=1,
        losses=LOSSES[:steps],
        peers=tuple(PeerLine(f"p{n}", 0, sent=Traffic(10**9, 10**9)) for n in range(6)),
        happenings=tuple(
            Happening(n, 1.0, "commit", "step 12 committed: loss 2.31, norm 0.9, round 0") for n in range(60)
        ),
    )


@pytest.mark.slow
def test_status_costs_little_however_long_the_run_and_shows_the_same_curve(tmp_path: Path) -> None:
    written: list[int] = []

    class Counted(OutputFiles):
        def put(self, name: str, data: bytes) -> bool:
            written.append(len(data))
            return super().put(name, data)

    files = Counted(tmp_path, lambda text: None)
    status = StatusFile(files, tmp_path / "watched")
    for second in range(3600):
        status.write(a_snapshot(10_000 + second, float(second)), float(second))
    assert sum(written) <= 3600 * STATUS_BPS + max(written) and len(written) > 300
    snapshot = msgspec.json.decode((tmp_path / "status.json").read_bytes(), type=Snapshot)
    last = a_snapshot(snapshot.step)
    assert snapshot.losses[-1] == last.losses[-1] and len(snapshot.losses) == THINNED
    assert len(curve(snapshot.losses, 80, 5)) == pytest.approx(len(curve(last.losses, 80, 5)), abs=20)

    written.clear()
    for second in range(3600, 7200):
        status.write(a_snapshot(20_000, float(second)), float(second))  # nothing happens
    assert len(written) <= 361
    status.write(a_snapshot(20_000, 7200.0), float("inf"))
    assert msgspec.json.decode((tmp_path / "status.json").read_bytes(), type=Snapshot).elapsed_s == 7200.0
    files.close()


def test_the_file_of_commits_grows_by_a_short_line_per_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account, "WHOLE", 4)
    monkeypatch.setattr(run_directory, "REWRITE_STEPS", 8)
    with RecordedRun(tmp_path / "month") as run:
        reader = RunReader(run.output.path)
        for _ in range(40):
            run.tick(2.0)
            run.output.keep(run.monitor.books.steps)
            reader.read()
        run.output.keep(run.monitor.books.steps)
        written, steps = rundir.commits(run.output.path), run.monitor.books.steps
        assert len(steps) > 30 and [step.commit.step for step in written] == [step.commit.step for step in steps]
        assert sum(bool(step.commit.groups) for step in written) <= 4 + 8
        again = CommitHistory(3, microbatches(run.config.train), 0, tuple(written))
        assert again.lost == 0 and [s.commit.loss for s in again.steps] == [s.commit.loss for s in steps]
        assert len(reader.series.figures) == len(steps), "who reads along sees each step once"

"""Files of a launcher on a disk that is full for a while: nothing ends for it, and commits come whole, once and in order."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec
import pytest

from shoal.cli.files import Files
from shoal.core.messages import Committed
from shoal.runtime.account import Step


def a_step(number: int) -> Step:
    return Step(epoch=0, commit=Committed(number, 1, 1.0, 2.0, (), ()), heard_s=float(number))


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
    told: list[str] = []
    files = Files(tmp_path, told.append)
    narrow = files._commits = Narrow(files._commits, room=100)  # type: ignore[assignment]
    for number in range(5):
        files.commit(a_step(number))
    assert told == [f"{tmp_path / 'commits.jsonl'} cannot be written, training goes on: No space left on device"]
    narrow.room = 10_000  # type: ignore[attr-defined]
    files.flush()
    files.commit(a_step(5))
    files.close()
    lines = (tmp_path / "commits.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(line, type=Step).commit.step for line in lines] == [*range(6)]


def test_a_file_that_cannot_be_written_is_told_once_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    files = Files(tmp_path, told.append)
    assert files.put("status.json", b"old")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        assert not files.put("status.json", b"new") and not files.put("status.json", b"newer")
    assert len(told) == 1 and "status.json cannot be written" in told[0]
    assert (tmp_path / "status.json").read_bytes() == b"old"
    assert files.put("status.json", b"newest") and (tmp_path / "status.json").read_bytes() == b"newest"
    files.close()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []

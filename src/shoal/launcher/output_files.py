"""Files that a launcher writes while it watches a run, on a disk that may be full: training never ends for that.

For cli/run.py. What others look at is simply tried again with the next news; commits, which are the account, wait here until there is
room, and are written once and in order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from shoal.escaping import escaped_json
from shoal.runtime.records.account import Step
from shoal.runtime.records.report import replace


class OutputFiles:
    """`tell` hears, once for each time, that a file cannot be written."""

    def __init__(self, directory: Path, tell: Callable[[str], None]) -> None:
        self._directory, self._tell = directory, tell
        self._commits = open(directory / "commits.jsonl", "ab", buffering=0)
        self._unwritten = b""  # commits that the disk had no room for
        self._full: set[str] = set()  # files that could not be written when it was tried last

    def put(self, name: str, data: bytes) -> bool:
        """A small file, whole. Was there room?"""
        try:
            replace(self._directory / name, data)
        except OSError as error:
            self._tell_full(name, error)
            return False
        self._full.discard(name)
        return True

    def rewrite(self, steps: Iterable[Step]) -> None:
        """The directory is another: all commits so far belong into it. OSError: there is no room."""
        lines = b"".join(escaped_json(msgspec.json.encode(step)) + b"\n" for step in steps)
        replace(self._directory / "commits.jsonl", lines)
        self._commits.close()
        self._commits = open(self._directory / "commits.jsonl", "ab", buffering=0)
        self._unwritten = b""

    def commit(self, step: Step) -> None:
        """One line more of commits.jsonl. That of a step with a checkpoint is on the disk before this returns, so that no checkpoint
        is ahead of it, should the whole machine die."""
        self._unwritten += escaped_json(msgspec.json.encode(step)) + b"\n"
        self.flush(safely=step.commit.save)

    def flush(self, safely: bool = False) -> None:
        """What waits, as far as there is room."""
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._commits.write(self._unwritten) :]
            if safely:
                os.fsync(self._commits.fileno())
        except OSError as error:
            self._tell_full("commits.jsonl", error)
        else:
            self._full.discard("commits.jsonl")

    def close(self) -> None:
        self.flush()
        self._commits.close()

    def _tell_full(self, name: str, error: OSError) -> None:
        if name not in self._full:
            self._full.add(name)
            self._tell(f"{self._directory / name} cannot be written, training goes on: {error.strerror}")

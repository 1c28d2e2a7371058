"""Files that a launcher writes during a run, on a disk that may be full: training never ends because of it.

For run_directory.py. A file for readers is tried again with its next change. Commits, which are the account, wait in memory until
there is room, and are written once and in order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from shoal.escaping import escaped_json
from shoal.runtime.records.account import CommittedStep
from shoal.runtime.records.report import replace


class OutputFiles:
    """`warn` is called when a file cannot be written, once until it can again."""

    def __init__(self, directory: Path, warn: Callable[[str], None]) -> None:
        self._directory, self._warn = directory, warn
        self._commits = open(directory / "commits.jsonl", "ab", buffering=0)
        self._unwritten = b""  # commits that the disk had no room for
        self._full: set[str] = set()  # files that could not be written at the last try

    def put(self, name: str, data: bytes) -> bool:
        """Replace a small file. False: there was no room."""
        try:
            replace(self._directory / name, data)
        except OSError as error:
            self._warn_full(name, error)
            return False
        self._full.discard(name)
        return True

    def rewrite(self, steps: Iterable[CommittedStep]) -> None:
        """The directory was made again: write all commits so far. OSError: there is no room."""
        lines = b"".join(escaped_json(msgspec.json.encode(step)) + b"\n" for step in steps)
        replace(self._directory / "commits.jsonl", lines)
        self._commits.close()
        self._commits = open(self._directory / "commits.jsonl", "ab", buffering=0)
        self._unwritten = b""

    def shorten(self, steps: Iterable[CommittedStep]) -> None:
        """Write all commits anew, if there is room for a copy."""
        try:
            self.rewrite(steps)
        except OSError as error:
            self._warn_full("commits.jsonl", error)

    def commit(self, step: CommittedStep) -> None:
        """Append a line to commits.jsonl. The line of a step with a checkpoint is on the disk when this returns, so that no checkpoint
        is ahead of it if the machine fails."""
        self._unwritten += escaped_json(msgspec.json.encode(step)) + b"\n"
        self.flush(safely=step.commit.save)

    def flush(self, safely: bool = False) -> None:
        """Write what waits, as far as there is room."""
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._commits.write(self._unwritten) :]
            if safely:
                os.fsync(self._commits.fileno())
        except OSError as error:
            self._warn_full("commits.jsonl", error)
        else:
            self._full.discard("commits.jsonl")

    def close(self) -> None:
        self.flush()
        self._commits.close()

    def _warn_full(self, name: str, error: OSError) -> None:
        if name not in self._full:
            self._full.add(name)
            self._warn(f"{self._directory / name} cannot be written, training goes on: {error.strerror}")

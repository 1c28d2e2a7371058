"""proofs.jsonl of a run: its newest commits as their voters signed them, at most twice HALF_BYTES.

For run_directory.py and `shoal leaderboard`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from shoal.core.messages import Committed
from shoal.runtime.proofs import Verifier
from shoal.runtime.records.report import Proven

FILE, OLDER = "proofs.jsonl", "proofs.older.jsonl"
HALF_BYTES = 32 << 20  # the older half is deleted when the newer one is full

_LINES = msgspec.json.Decoder(
    Proven
)  # at import: msgspec 0.22 crashes when two threads decode a type for the first time


class ProofFile:
    """Of one session. A disk that is full costs proofs, which `warn` is told once, and never the run."""

    def __init__(self, directory: Path, warn: Callable[[str], None], half_bytes: int = HALF_BYTES) -> None:
        self._path, self._older, self._warn, self._half = directory / FILE, directory / OLDER, warn, half_bytes
        self._number = -1  # of the newest view that is written
        self._passes: dict[str, bytes] = {}  # of whoever has signed in this session
        self._full = False

    def add(self, line: Proven) -> None:
        """Several peers report each commit: the first is written."""
        new = {key: shown for key, shown in line.passes.items() if key not in self._passes}
        self._passes |= new
        number = line.number
        if number <= self._number and not new:
            return
        self._number = max(number, self._number)
        try:
            if self._path.exists() and self._path.stat().st_size >= self._half:
                os.replace(self._path, self._older)
            if not self._path.exists():  # each file can be checked by itself
                line = msgspec.structs.replace(line, passes=dict(self._passes))
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")
        except OSError as error:
            if not self._full:
                self._warn(f"{self._path} cannot be written, training goes on: {error.strerror}")
            self._full = True
        else:
            self._full = False


def verified(directory: Path, run: str) -> tuple[list[Committed], list[str]]:
    """The commits that the files prove, and what is wrong with other lines. `run`: the id of the run's key."""
    commits: list[Committed] = []
    wrong: list[str] = []
    verifier = Verifier(run)
    for name, number, text in _lines(directory):
        try:
            commits.append(verifier.check(_LINES.decode(text)))
        except (ValueError, msgspec.MsgspecError) as error:
            wrong.append(f"{name}, line {number}: {error}")
    return commits, wrong


def _lines(directory: Path) -> Iterator[tuple[str, int, bytes]]:
    for name in (OLDER, FILE):
        path = directory / name
        if path.exists():
            with path.open("rb") as file:
                for number, text in enumerate(file, 1):
                    if text.endswith(b"\n"):  # else the launcher was killed while it wrote
                        yield name, number, text

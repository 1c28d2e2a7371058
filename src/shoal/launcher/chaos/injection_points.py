"""Points at which `shoal chaos` can disturb a peer: it begins a task, and its trace says so while the task runs.

A run with network.fault_injection writes its peers' traces at once (runtime/records/record.py), so what is read here is milliseconds old.
Only bytes are searched: a task's tag occurs in a trace only in the command that begins it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from shoal.core.messages import Apply, CheckChunk, Cut, ReadChunk, RunBackward, RunPublish, RunSave


class InjectionPoint(msgspec.Struct, frozen=True):
    """The task that begins there, and a description of it for messages."""

    task: type[msgspec.Struct]
    words: str

    @property
    def tag(self) -> bytes:
        return f'"type":"{self.task.__name__}"'.encode()


INJECTION_POINTS = {
    "backward": InjectionPoint(RunBackward, "a backward"),
    "averaging": InjectionPoint(Cut, "averaging"),
    "optimizer": InjectionPoint(Apply, "the optimizer step"),
    "checkpoint": InjectionPoint(RunSave, "its shard of a checkpoint"),
    "publishing": InjectionPoint(RunPublish, "to publish a checkpoint"),
    "download": InjectionPoint(CheckChunk, "to take in a chunk of its stage's state"),
    "upload": InjectionPoint(ReadChunk, "to give a chunk of its stage's state"),
}


class TraceTail:
    """Follows the traces of a run's peers."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "traces"
        self._read: dict[str, int] = {}  # bytes of each, by label

    def skip(self) -> None:
        """Skip what has been written so far."""
        self._read = {path.stem: path.stat().st_size for path in self._directory.glob("*.jsonl")}

    def new_lines(self, labels: Iterable[str]) -> dict[str, bytes]:
        """Complete lines that were added to these peers' traces since the last call."""
        return {label: self._new_lines(label) for label in labels}

    def _new_lines(self, label: str) -> bytes:
        path = self._directory / f"{label}.jsonl"
        begin = self._read.get(label, 0)
        try:
            with open(path, "rb") as file:
                if begin > os.fstat(file.fileno()).st_size:  # the trace was rotated
                    begin = 0
                file.seek(begin)
                added = file.read()
        except FileNotFoundError:  # the peer has not begun its trace
            return b""
        whole = added.rfind(b"\n") + 1  # an incomplete line is read again
        self._read[label] = begin + whole
        return added[:whole]

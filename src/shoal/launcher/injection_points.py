"""Moments at which `shoal chaos` can strike: a peer begins something, and its trace says so while it is at it.

A run with network.faults writes its peers' traces at once (runtime/records/record.py), so what is read here is milliseconds old. Only
bytes are looked for: a task's tag stands in a trace nowhere but in the command that begins it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from shoal.core.messages import Apply, CheckChunk, Cut, ReadChunk, RunBackward, RunPublish, RunSave


class InjectionPoint(msgspec.Struct, frozen=True):
    """The task that begins it, and what the peer is doing then, in words."""

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
    """What has been added to the traces of a run's peers since the last look."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "traces"
        self._read: dict[str, int] = {}  # bytes of each, by label

    def skip(self) -> None:
        """What is there already is no news."""
        self._read = {path.stem: path.stat().st_size for path in self._directory.glob("*.jsonl")}

    def news(self, labels: Iterable[str]) -> dict[str, bytes]:
        """Whole lines of these peers since the last look."""
        return {label: self._news(label) for label in labels}

    def _news(self, label: str) -> bytes:
        path = self._directory / f"{label}.jsonl"
        begin = self._read.get(label, 0)
        try:
            with open(path, "rb") as file:
                if begin > os.fstat(file.fileno()).st_size:  # another segment has begun
                    begin = 0
                file.seek(begin)
                news = file.read()
        except FileNotFoundError:  # it has not begun yet
            return b""
        whole = news.rfind(b"\n") + 1  # half a line is read again
        self._read[label] = begin + whole
        return news[:whole]

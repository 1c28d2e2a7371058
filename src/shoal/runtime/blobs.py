"""The tensors that a peer holds under names, of which the oldest lie on disk when they are many. For hands.py.

With direct hops both ends of a boundary keep its tensors until the step is committed, and the gradients a server made cannot be
computed again: what is kept grows with the batch, not with what runs at once. Beyond `memory_bytes` the oldest are written to
files that have no name, so that nothing is left behind whatever ends the process, and are mapped from there: whoever reads one
sees the same bytes, and the system gives their memory to others when it is short. A disk that is full costs nothing but memory.
"""

from __future__ import annotations

import logging
import mmap
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from shoal.runtime import coding
from shoal.runtime.coding import Held
from shoal.runtime.state import raw
from shoal.transport.base import Blob

log = logging.getLogger(__name__)

SMALL = 1 << 16  # bytes; fewer are not worth a file


class Blobs:
    """`later` runs a piece of work on a thread that may wait for the disk. Safe to use from any thread."""

    def __init__(self, memory_bytes: int, directory: Path, later: Callable[[Callable[[], None]], None]) -> None:
        self._most = memory_bytes
        self._directory = directory
        self._later = later
        self._held: dict[str, Held] = {}
        self._here: dict[str, int] = {}  # bytes of what is in memory and could go, oldest first
        self._going: dict[str, int] = {}  # being written
        self._on_disk: dict[str, int] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def disk_bytes(self) -> int:
        with self._lock:
            return sum(self._on_disk.values())

    @property
    def memory_bytes(self) -> int:
        """Of what could lie on disk."""
        with self._lock:
            return sum(self._here.values()) + sum(self._going.values())

    def put(self, name: str, held: Held) -> None:
        nbytes = coding.nbytes(held)
        with self._lock:
            self._held[name] = held
            if self._most <= 0 or nbytes < SMALL:
                return
            self._here[name] = nbytes
            over = self._over()
        for each in over:
            self._later(lambda each=each: self._write(each))  # type: ignore[misc]

    def get(self, name: str) -> Held | None:
        """None: never put, or dropped."""
        with self._lock:
            return self._held.get(name)

    def drop(self, name: str) -> None:
        with self._lock:
            self._held.pop(name, None)
            for table in (self._here, self._going, self._on_disk):
                table.pop(name, None)

    def names(self) -> list[str]:
        with self._lock:
            return list(self._held)

    def _over(self) -> list[str]:
        """What has to go, oldest first; it is counted as going."""
        excess, names = sum(self._here.values()) - self._most, list[str]()
        for name, nbytes in self._here.items():
            if excess <= 0:
                break
            names.append(name)
            excess -= nbytes
        for name in names:
            self._going[name] = self._here.pop(name)
        return names

    def _write(self, name: str) -> None:
        held = self.get(name)
        if held is None:
            return
        try:
            moved = self._mapped(held)
        except OSError as error:
            log.warning("boundary tensors stay in memory from now on: they cannot be written to disk (%s)", error)
            self._most = 0
            return
        with self._lock:
            if self._held.get(name) is held:
                self._held[name] = moved
                self._on_disk[name] = self._going.pop(name)

    def _mapped(self, held: Held) -> Held:
        """The same, in a file. Writing to it changes memory only. OSError: no room."""
        data = raw(held) if isinstance(held, torch.Tensor) else memoryview(held.data).cast("B")
        with tempfile.TemporaryFile(dir=self._directory if self._directory.is_dir() else None) as file:
            file.write(data)
            file.flush()
            mapping = mmap.mmap(file.fileno(), len(data), access=mmap.ACCESS_COPY)
        if isinstance(held, Blob):
            return msgspec.structs.replace(held, data=memoryview(mapping))
        return torch.frombuffer(mapping, dtype=held.dtype).view(held.shape)

"""The tensors that a peer holds under names, of which the oldest lie on disk when they are many. For task_runner.py.

Both ends of a boundary keep its tensors until the step is committed, and the gradients a server made cannot be
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
from functools import partial
from pathlib import Path

import msgspec
import torch

from shoal.runtime.state import raw
from shoal.runtime.tasks import coding
from shoal.runtime.tasks.coding import Held
from shoal.transport.base import Blob

log = logging.getLogger(__name__)

SMALL = 1 << 16  # bytes; fewer are not worth a file


class Blobs:
    """`later` runs a piece of work on a thread that may wait for the disk. Safe to use from any thread."""

    def __init__(self, memory_bytes: int, directory: Path, later: Callable[[Callable[[], None]], None]) -> None:
        self._most = memory_bytes
        self._directory = directory
        self._later = later
        self.memory_bytes = self.disk_bytes = 0  # of all that is held
        self.most_memory_bytes = self.most_disk_bytes = 0  # so far
        self._held: dict[str, Held] = {}
        self._stays: dict[str, int] = {}  # bytes of what is in memory for good
        self._here: dict[str, int] = {}  # of what could go, oldest first
        self._going: dict[str, int] = {}  # being written
        self._on_disk: dict[str, int] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    def put(self, name: str, held: Held) -> None:
        nbytes = coding.nbytes(held)
        with self._lock:
            self._forget(name)
            self._held[name] = held
            stays = self._most <= 0 or nbytes < SMALL
            (self._stays if stays else self._here)[name] = nbytes
            self._count(nbytes, 0)
            over = [] if stays else self._over()
        for each in over:
            self._later(partial(self._write, each))

    def get(self, name: str) -> Held | None:
        """None: never put, or dropped."""
        with self._lock:
            return self._held.get(name)

    def drop(self, name: str) -> None:
        with self._lock:
            self._forget(name)

    def names(self) -> list[str]:
        with self._lock:
            return list(self._held)

    def _forget(self, name: str) -> None:
        self._held.pop(name, None)
        memory = sum(table.pop(name, 0) for table in (self._stays, self._here, self._going))
        self._count(-memory, -self._on_disk.pop(name, 0))

    def _count(self, memory: int, disk: int) -> None:
        self.memory_bytes += memory
        self.disk_bytes += disk
        self.most_memory_bytes = max(self.most_memory_bytes, self.memory_bytes)
        self.most_disk_bytes = max(self.most_disk_bytes, self.disk_bytes)

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
            if self._held.get(name) is held and name in self._going:
                self._held[name] = moved
                self._on_disk[name] = nbytes = self._going.pop(name)
                self._count(-nbytes, nbytes)

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

"""A peer's tensors by name; beyond a limit the oldest are moved to disk. For task_runner.py.

Both ends of a boundary keep its tensors until the step is committed, and a server's gradients cannot be recomputed, so the
store grows with the batch. Beyond `memory_bytes` the oldest are written to unnamed files, which no crash leaves behind, and
mapped from there: readers see the same bytes, and the system can page them out. With a full disk they stay in memory.
"""

from __future__ import annotations

import logging
import mmap
import tempfile
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import msgspec
import torch

from shoal.runtime.state import raw
from shoal.runtime.tasks import coding
from shoal.runtime.tasks.coding import Held
from shoal.transport.base import Blob

log = logging.getLogger(__name__)

SMALL = 1 << 16  # bytes; a smaller tensor stays in memory


class Blobs:
    """Thread-safe. `later` runs a function on a thread that may wait for the disk."""

    def __init__(self, memory_bytes: int, directory: Path, later: Callable[[Callable[[], None]], None]) -> None:
        self._limit_bytes = memory_bytes
        self._directory = directory
        self._run_later = later
        self.memory_bytes = self.disk_bytes = 0  # of all tensors
        self.most_memory_bytes = self.most_disk_bytes = 0  # peaks
        self._values: dict[str, Held] = {}
        self._pinned_bytes: dict[str, int] = {}  # name -> bytes, always in memory
        self._memory_bytes_of: dict[str, int] = {}  # name -> bytes, can move to disk, oldest first
        self._writing_bytes_of: dict[str, int] = {}  # name -> bytes, being written
        self._disk_bytes_of: dict[str, int] = {}
        self._awaited: set[str] = set()  # of tasks that are not done
        self._unwanted: set[str] = set()  # dropped before the task that makes them was done
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def expect(self, names: Iterable[str]) -> None:
        """A task makes these; until `settle`, a dropped one of them is not stored."""
        with self._lock:
            self._awaited.update(names)

    def settle(self, names: Iterable[str]) -> None:
        with self._lock:
            self._awaited.difference_update(names)
            self._unwanted.difference_update(names)

    def put(self, name: str, held: Held) -> None:
        nbytes = coding.nbytes(held)
        with self._lock:
            if name in self._unwanted:
                return
            self._remove(name)
            self._values[name] = held
            pinned = self._limit_bytes <= 0 or nbytes < SMALL
            (self._pinned_bytes if pinned else self._memory_bytes_of)[name] = nbytes
            self._count(nbytes, 0)
            names = [] if pinned else self._excess()
        for excess_name in names:
            self._run_later(partial(self._write, excess_name))

    def get(self, name: str) -> Held | None:
        """None: unknown or dropped."""
        with self._lock:
            return self._values.get(name)

    def drop(self, name: str) -> None:
        """Forget a tensor, also one that a task is still making."""
        with self._lock:
            self._remove(name)
            if name in self._awaited:
                self._unwanted.add(name)

    def names(self) -> list[str]:
        with self._lock:
            return list(self._values)

    def _remove(self, name: str) -> None:
        self._values.pop(name, None)
        memory = sum(
            table.pop(name, 0) for table in (self._pinned_bytes, self._memory_bytes_of, self._writing_bytes_of)
        )
        self._count(-memory, -self._disk_bytes_of.pop(name, 0))

    def _count(self, memory: int, disk: int) -> None:
        self.memory_bytes += memory
        self.disk_bytes += disk
        self.most_memory_bytes = max(self.most_memory_bytes, self.memory_bytes)
        self.most_disk_bytes = max(self.most_disk_bytes, self.disk_bytes)

    def _excess(self) -> list[str]:
        """The names that have to move to disk, oldest first; they count as being written."""
        excess, names = sum(self._memory_bytes_of.values()) - self._limit_bytes, list[str]()
        for name, nbytes in self._memory_bytes_of.items():
            if excess <= 0:
                break
            names.append(name)
            excess -= nbytes
        for name in names:
            self._writing_bytes_of[name] = self._memory_bytes_of.pop(name)
        return names

    def _write(self, name: str) -> None:
        held = self.get(name)
        if held is None:
            return
        try:
            moved = self._mapped(held)
        except OSError as error:
            log.warning("boundary tensors stay in memory from now on: they cannot be written to disk (%s)", error)
            self._limit_bytes = 0
            return
        with self._lock:
            if self._values.get(name) is held and name in self._writing_bytes_of:
                self._values[name] = moved
                self._disk_bytes_of[name] = nbytes = self._writing_bytes_of.pop(name)
                self._count(-nbytes, nbytes)

    def _mapped(self, pending: Held) -> Held:
        """A copy mapped from a file; writes to it change memory only. OSError: no room."""
        held = coding.ready(pending)
        data = raw(held) if isinstance(held, torch.Tensor) else memoryview(held.data).cast("B")
        with tempfile.TemporaryFile(dir=self._directory if self._directory.is_dir() else None) as file:
            file.write(data)
            file.flush()
            mapping = mmap.mmap(file.fileno(), len(data), access=mmap.ACCESS_COPY)
        if isinstance(held, Blob):
            return msgspec.structs.replace(held, data=memoryview(mapping))
        return torch.frombuffer(mapping, dtype=held.dtype).view(held.shape)

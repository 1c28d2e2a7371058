"""A peer's trace on the disk, bounded: segments of which the newest are kept, older ones compressed, and given up before anything else is.

For runtime/records/record.py, from its one thread. `p1.jsonl` is the segment that is written; full, it becomes `p1.000001.jsonl.gz`. Each
begins with the peer's Header, which says how many lines came before it: so a reader knows what is missing (trace.py). All of them
together stay below `most_bytes`. When the disk has less free than `reserve` says (the next checkpoint and the account), or is full,
the oldest segments go, then nothing more is written until there is room again. Why so: docs/design/2026-11-22-bounded-traces.md.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec

from shoal import trace

SEGMENTS = 8  # the trace's room is shared out among so many before they are compressed
SEGMENT_BYTES = 32 << 20  # at most: seconds to compress
LOOK_S = 2.0  # between looks at the disk
AGAIN_S, AGAIN_MOST_S = 10.0, 600.0  # from giving up to the next try; doubled each time
ACCOUNT_BYTES = 1 << 20  # for commits, the account and the status


class Tape:
    """`reserve` says what must stay free on that disk. OSError: not even the first line can be written."""

    def __init__(
        self, path: Path, header: trace.Header, most_bytes: int, reserve: Callable[[], int] = lambda: 0
    ) -> None:
        self._path, self._header, self._most_bytes, self._reserve = path, header, most_bytes, reserve
        self._segment_bytes = max(4096, min(SEGMENT_BYTES, most_bytes // SEGMENTS))
        self._number = 1
        self._lines = 0  # of this peer so far, those that were not written too
        self._size_bytes = 0
        self._file: IO[bytes] | None = None
        self._looked_s = float("-inf")
        self._again_s, self._pause_s = 0.0, AGAIN_S
        self._packing: threading.Thread | None = None
        self._news = ""
        self._begun = (0, 0)
        self._begin()

    def write(self, lines: list[bytes]) -> str:
        """What is news about the trace itself, in words; '' nearly always."""
        news, self._news = self._news, ""
        if self._file is None:
            news = news or self._try_again()
        if self._file is not None and (short := self._short()):
            news = self._stop(short)
        if self._file is not None:
            try:
                self._append(b"".join(lines))
            except OSError as error:
                news = self._stop(f"{self._path}: {error.strerror}")
        self._lines += len(lines)
        if self._file is not None and self._size_bytes >= self._segment_bytes:
            try:
                self._turn()
            except OSError as error:
                news = self._stop(f"{self._path}: {error.strerror}")
        return news

    def skip(self, lines: int, why: str) -> str:
        """So many lines were not kept for us. The words to tell."""
        self._lines += lines
        return self._stop(why) if self._file is not None else ""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._packing is not None:
            self._packing.join()

    # ----------------------------------------------------------------------------------------------------- segments

    def _begin(self) -> None:
        self._file = open(self._path, "wb", buffering=0)
        self._size_bytes = 0
        found = os.fstat(self._file.fileno())
        self._begun = found.st_dev, found.st_ino
        header = msgspec.structs.replace(self._header, before=self._lines) if self._lines else self._header
        try:
            self._append(trace.line(header))
        except OSError as error:
            if self._lines:
                raise
            self._news = self._stop(f"{self._path}: {error.strerror}")  # nobody listens yet: told with the first line

    def _own(self) -> bool:
        """Is what lies at the path the file that was begun here last?"""
        try:
            found = self._path.stat()
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._begun

    def _append(self, data: bytes) -> None:
        """Whole lines or none: what a full disk took half of is taken back. Older segments make room."""
        assert self._file is not None
        while True:
            view = memoryview(data)
            try:
                while view:
                    view = view[self._file.write(view) :]
            except OSError:
                with contextlib.suppress(OSError):  # a device that is no file
                    self._file.truncate(self._size_bytes)
                    self._file.seek(self._size_bytes)
                if not self._drop_oldest():
                    raise
                continue
            self._size_bytes += len(data)
            return

    def _turn(self) -> None:
        """The segment is full: the next one begins, and the full one is compressed beside."""
        assert self._file is not None
        if self._packing is not None:
            self._packing.join()
        if not self._own():
            raise FileNotFoundError(errno.ENOENT, "it was deleted or moved away")
        self._file.close()
        full = self._path.with_name(f"{self._path.stem}.{self._number:06}.jsonl")
        os.rename(self._path, full)
        self._number += 1
        while self._kept_bytes() > self._most_bytes - 2 * self._segment_bytes and self._drop_oldest(but=full):
            pass
        self._begin()
        self._packing = threading.Thread(target=_pack, args=(full,), name="trace", daemon=True)
        self._packing.start()

    def _kept(self) -> list[Path]:
        """Segments that are full, oldest first."""
        return sorted(self._path.parent.glob(f"{self._path.stem}.[0-9]*.jsonl*"))

    def _kept_bytes(self) -> int:
        return sum(_size_bytes(path) for path in self._kept())

    def _drop_oldest(self, but: Path | None = None) -> bool:
        for path in self._kept():
            if path != but:
                with contextlib.suppress(OSError):
                    path.unlink()
                    return True
        return False

    # --------------------------------------------------------------------------------------------------------- room

    def _short(self) -> str:
        """Why nothing may be written now, after older segments have gone: '' when there is room."""
        now = time.monotonic()
        if now - self._looked_s < LOOK_S:
            return ""
        self._looked_s = now
        wanted = ACCOUNT_BYTES + self._reserve()
        while (free := _free_bytes(self._path)) < wanted:
            if not self._drop_oldest():
                return f"{free:,} bytes are free, and the next checkpoint and the account take {wanted:,}"
        return ""

    def _stop(self, why: str) -> str:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._again_s = time.monotonic() + self._pause_s
        self._pause_s = min(AGAIN_MOST_S, 2 * self._pause_s)
        return f"the trace stops here, training goes on: {why}"

    def _try_again(self) -> str:
        """What was written before the gap stays, as a segment of its own."""
        if time.monotonic() < self._again_s:
            return ""
        self._again_s = time.monotonic() + self._pause_s
        if _free_bytes(self._path) < ACCOUNT_BYTES + self._reserve() + 2 * self._segment_bytes:
            return ""
        try:
            if self._path.exists() and not self._own():  # another run's, in the place of one that was deleted
                return ""
            if self._path.exists():
                os.rename(self._path, self._path.with_name(f"{self._path.stem}.{self._number:06}.jsonl"))
                self._number += 1
            self._begin()
        except OSError:
            self._stop("")
            return ""
        return "there is room again: the trace goes on, with a gap"


def segments(directory: Path) -> dict[str, list[Path]]:
    """The traces in a directory: of each peer's label its segments, oldest first."""
    found: dict[str, list[Path]] = {}
    for path in sorted(directory.glob("*.jsonl*")):
        label, _, rest = path.name.partition(".")
        if rest.endswith(("jsonl", "jsonl.gz")):
            found.setdefault(label, []).append(path)
    # "p1.000001.jsonl" before "p1.jsonl": by name, digits stand before letters. One that is packed and not yet removed counts once.
    return {label: [path for path in paths if Path(f"{path}.gz") not in paths] for label, paths in found.items()}


def _pack(full: Path) -> None:
    draft = full.with_name(f".{full.name}.gz.tmp")
    try:
        with open(full, "rb") as source, gzip.open(draft, "wb", compresslevel=1) as target:
            shutil.copyfileobj(source, target, 1 << 20)
        os.replace(draft, f"{full}.gz")
        full.unlink()
    except OSError:  # no room for both: it stays as it is, and goes sooner
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # packed or dropped just now
        return 0


def _free_bytes(path: Path) -> int:
    try:
        return shutil.disk_usage(path.parent).free
    except OSError:  # the directory is gone: whoever opens the next segment says so
        return 1 << 62

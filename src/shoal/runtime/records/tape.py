"""A peer's trace on disk, bounded: compressed segments, of which the first stays, so that the beginning replays, and the newest.

For the thread of runtime/records/record.py. It writes `p1.jsonl`; a full segment becomes `p1.000001.jsonl.gz`. Each starts with
the peer's Header, which counts the lines before it, so that a reader knows what is missing (trace.py). Their total stays below
`most_bytes`. When the disk has less free than `reserve` (the next checkpoint and the account), the oldest segments are deleted,
then the trace pauses until there is room. The reason: docs/design/2026-11-22-bounded-traces.md.
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

SEGMENTS = 8  # uncompressed segments that fill the limit
SEGMENT_BYTES = 32 << 20  # largest segment: compressed in seconds
CHECK_S = 2.0  # between two checks of the free disk
RETRY_S, MAX_RETRY_S = 10.0, 600.0  # pause before the trace is tried again; doubled each time
ACCOUNT_BYTES = 1 << 20  # for commits, the account and the status


class Tape:
    """`reserve`: returns the bytes that must stay free on that disk. OSError: the first line cannot be written."""

    def __init__(
        self, path: Path, header: trace.Header, most_bytes: int, reserve: Callable[[], int] = lambda: 0
    ) -> None:
        self._path, self._header, self._most_bytes, self._reserve = path, header, most_bytes, reserve
        self._segment_bytes = max(4096, min(SEGMENT_BYTES, most_bytes // SEGMENTS))
        self._number = 1
        self._lines = 0  # of this peer so far, unwritten ones included
        self._size_bytes = 0
        self._file: IO[bytes] | None = None
        self._checked_at_s = float("-inf")
        self._retry_at_s, self._pause_s = 0.0, RETRY_S
        self._compressor: threading.Thread | None = None
        self._message = ""
        self._inode = (0, 0)
        self._start_segment()

    def write(self, lines: list[bytes]) -> str:
        """Write lines. Returns a message about the trace itself, mostly ''."""
        message, self._message = self._message, ""
        if self._file is None:
            message = message or self._try_again()
        if self._file is not None and (reason := self._why_full()):
            message = self._stop(reason)
        if self._file is not None:
            try:
                self._append(b"".join(lines))
            except OSError as error:
                message = self._stop(f"{self._path}: {error.strerror}")
        self._lines += len(lines)
        if self._file is not None and self._size_bytes >= self._segment_bytes:
            try:
                self._rotate()
            except OSError as error:
                message = self._stop(f"{self._path}: {error.strerror}")
        return message

    def skip(self, lines: int, why: str) -> str:
        """Count lines that were dropped before. Returns the message to report."""
        self._lines += lines
        return self._stop(why) if self._file is not None else ""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._compressor is not None:
            self._compressor.join()

    # ----------------------------------------------------------------------------------------------------- segments

    def _start_segment(self) -> None:
        self._file = open(self._path, "wb", buffering=0)
        self._size_bytes = 0
        status = os.fstat(self._file.fileno())
        self._inode = status.st_dev, status.st_ino
        header = msgspec.structs.replace(self._header, before=self._lines) if self._lines else self._header
        try:
            self._append(trace.line(header))
        except OSError as error:
            if self._lines:
                raise
            self._message = self._stop(f"{self._path}: {error.strerror}")  # returned by the first write

    def _own(self) -> bool:
        """Whether the file at the path is the one created here."""
        try:
            status = self._path.stat()
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._inode

    def _append(self, data: bytes) -> None:
        """Append whole lines or none: a partial write is undone. Deletes older segments for room."""
        assert self._file is not None
        while True:
            view = memoryview(data)
            try:
                while view:
                    view = view[self._file.write(view) :]
            except OSError:
                with contextlib.suppress(OSError):  # a device
                    self._file.truncate(self._size_bytes)
                    self._file.seek(self._size_bytes)
                if not self._drop_oldest():
                    raise
                continue
            self._size_bytes += len(data)
            return

    def _rotate(self) -> None:
        """Start the next segment and compress the full one in a thread."""
        assert self._file is not None
        if self._compressor is not None:
            self._compressor.join()
        if not self._own():
            raise FileNotFoundError(errno.ENOENT, "it was deleted or moved away")
        self._file.close()
        full = self._path.with_name(f"{self._path.stem}.{self._number:06}.jsonl")
        os.rename(self._path, full)
        self._number += 1
        while self._segments_bytes() > self._most_bytes - 2 * self._segment_bytes and self._drop_oldest(
            but=full, keep_first=True
        ):
            pass
        self._start_segment()
        self._compressor = threading.Thread(target=_compress, args=(full,), name="trace", daemon=True)
        self._compressor.start()

    def _full_segments(self) -> list[Path]:
        """Full segments, oldest first."""
        return sorted(self._path.parent.glob(f"{self._path.stem}.[0-9]*.jsonl*"))

    def _segments_bytes(self) -> int:
        return sum(_size_bytes(path) for path in self._full_segments())

    def _drop_oldest(self, but: Path | None = None, keep_first: bool = False) -> bool:
        """Delete the oldest segment but the first, which goes last: only from it can anything be replayed."""
        full = self._full_segments()
        for path in [*full[1:], *([] if keep_first else full[:1])]:
            if path != but:
                with contextlib.suppress(OSError):
                    path.unlink()
                    return True
        return False

    # --------------------------------------------------------------------------------------------------------- room

    def _why_full(self) -> str:
        """Why the trace cannot go on, after deleting older segments; '': there is room."""
        now = time.monotonic()
        if now - self._checked_at_s < CHECK_S:
            return ""
        self._checked_at_s = now
        needed = ACCOUNT_BYTES + self._reserve()
        while (free := _free_bytes(self._path)) < needed:
            if not self._drop_oldest():
                return f"{free:,} bytes are free, and the next checkpoint and the account take {needed:,}"
        return ""

    def _stop(self, why: str) -> str:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._retry_at_s = time.monotonic() + self._pause_s
        self._pause_s = min(MAX_RETRY_S, 2 * self._pause_s)
        return f"the trace stops here, training goes on: {why}"

    def _try_again(self) -> str:
        """Try to go on. The lines before the gap stay in a segment of their own."""
        if time.monotonic() < self._retry_at_s:
            return ""
        self._retry_at_s = time.monotonic() + self._pause_s
        if _free_bytes(self._path) < ACCOUNT_BYTES + self._reserve() + 2 * self._segment_bytes:
            return ""
        try:
            if self._path.exists() and not self._own():  # the file of another run at the same path
                return ""
            if self._path.exists():
                os.rename(self._path, self._path.with_name(f"{self._path.stem}.{self._number:06}.jsonl"))
                self._number += 1
            self._start_segment()
        except OSError:
            self._stop("")
            return ""
        return "there is room again: the trace goes on, with a gap"


def segments(directory: Path) -> dict[str, list[Path]]:
    """The traces in a directory: for each peer's label its segments, oldest first."""
    by_label: dict[str, list[Path]] = {}
    for path in sorted(directory.glob("*.jsonl*")):
        label, _, rest = path.name.partition(".")
        if rest.endswith(("jsonl", "jsonl.gz")):
            by_label.setdefault(label, []).append(path)
    # "p1.000001.jsonl" before "p1.jsonl": digits sort before letters. A compressed one counts once until its source is removed.
    return {label: [path for path in paths if Path(f"{path}.gz") not in paths] for label, paths in by_label.items()}


def _compress(full: Path) -> None:
    draft = full.with_name(f".{full.name}.gz.tmp")
    try:
        with open(full, "rb") as source, gzip.open(draft, "wb", compresslevel=1) as target:
            shutil.copyfileobj(source, target, 1 << 20)
        os.replace(draft, f"{full}.gz")
        full.unlink()
    except OSError:  # no room for both: it stays uncompressed
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # compressed or deleted meanwhile
        return 0


def _free_bytes(path: Path) -> int:
    try:
        return shutil.disk_usage(path.parent).free
    except OSError:  # the directory is deleted: opening the next segment will fail
        return 1 << 62

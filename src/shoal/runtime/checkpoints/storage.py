"""Files of a checkpoint directory, at a local path or any fsspec URL: written whole or not at all, listed, renamed, deleted.

For catalog.py and checkpoint.py, which know what the files mean. Names are relative to the directory. Nothing here imports torch, so that a
launcher can look at checkpoints before anything slow begins.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import posixpath
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

log = logging.getLogger(__name__)

PLACE = ".place"  # a file whose content names the place
ALONE_S, POLL_S = 30.0, 0.02
READ_BYTES = 8 << 20  # at a time, when every byte of a file is hashed


class File(msgspec.Struct, frozen=True):
    """SHA-256: in the standard library, computed by the CPU's own instructions where it has them (0.7 GiB/s here on a busy core, BLAKE2b
    0.8), and what `sha256sum` and the Hugging Face hub say of the same file, so that a user can check a copy without Shoal."""

    bytes: int
    sha256: str


class Storage:
    """ValueError when that kind of storage is not at hand."""

    def __init__(self, url: str) -> None:
        import fsspec  # 40 ms, which commands that look at no checkpoint save
        from fsspec.implementations.local import LocalFileSystem

        self.url = url
        try:
            self._fs, self.root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ValueError(f"checkpoint.url = {url!r}: {error}") from error
        self.local = isinstance(self._fs, LocalFileSystem)

    def path(self, name: str) -> str:
        """For people and other programs."""
        place = self._place(name)
        return place if self.local else str(self._fs.unstrip_protocol(place))

    def place(self, *, make: bool) -> str:
        """Names this place, for all who reach it, on whatever machine; '' when it has no name yet and (`make`) none can be written there.
        A local copy of it is another place: it has another inode."""
        try:
            if make and self.size(PLACE) is None:
                self._name_place()
            with self.open(PLACE) as handle:
                text = handle.read(100)
            inode = os.stat(self._place(PLACE)).st_ino if self.local else 0
        except OSError:
            return ""
        return hashlib.sha256(b"%s %d" % (text, inode)).hexdigest()[:16]

    def _name_place(self) -> None:
        """Several peers may do so at once: the first one's name stays, unless the file system has no links (FAT, some network mounts)."""
        path, name = self._place(PLACE), uuid.uuid4().hex
        with contextlib.suppress(FileExistsError):
            if not self.local:
                self._fs.makedirs(self.root, exist_ok=True)
                self._fs.pipe_file(path, name.encode(), mode="create")
                return
            os.makedirs(self.root, exist_ok=True)
            draft = f"{path}.{name}.tmp"
            try:
                with open(draft, "wb") as handle:
                    handle.write(name.encode())
                    handle.flush()
                    os.fsync(handle.fileno())
                try:
                    os.link(draft, path)  # refuses where a rename would replace
                except FileExistsError:
                    pass
                except OSError:
                    os.replace(draft, path)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(draft)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Of local storage: one process or thread after the other is inside, of all that reach this place. One that dies lets go. Where
        the file system has no locks all are inside at once.

        TimeoutError: another one stays inside."""
        if not self.local or not self.place(make=True):
            yield
            return
        with open(self._place(PLACE), "rb+") as handle:  # writable: NFS locks nothing else
            until = time.monotonic() + ALONE_S
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise TimeoutError(
                            f"another peer has been making a checkpoint visible at {self.url} for {ALONE_S:g} s"
                        ) from None
                    time.sleep(POLL_S)
                except OSError as error:
                    log.warning("%s: peers that publish there at once are not kept apart: %s", self.url, error)
                    break
            yield

    def free_bytes(self) -> int | None:
        """Left on its disk; None: not known."""
        try:
            return shutil.disk_usage(self.root).free if self.local else None
        except OSError:
            return None

    def used_bytes(self) -> int:
        """Of local storage: what its files take."""
        return sum(path.stat().st_size for path in Path(self.root).rglob("*") if path.is_file())

    def names(self) -> list[str]:
        """What the directory holds; nothing when there is none."""
        self._fs.invalidate_cache()
        try:
            return sorted(posixpath.basename(name.rstrip("/")) for name in self._fs.ls(self.root, detail=False))
        except FileNotFoundError:
            return []

    def size(self, name: str) -> int | None:
        """Bytes of a file; None when there is no such file."""
        try:
            found = self._fs.info(self._place(name))
        except FileNotFoundError:
            return None
        return int(found["size"]) if found["type"] == "file" else None

    def open(self, name: str) -> Any:
        """For reading bytes."""
        return self._fs.open(self._place(name), "rb")

    def hash(self, name: str) -> str:
        """SHA-256 of the file's content. OSError: it cannot be read to its end."""
        sha = hashlib.sha256()
        with self.open(name) as handle:
            while data := handle.read(READ_BYTES):
                sha.update(data)
        return sha.hexdigest()

    def write(self, name: str, pieces: Iterable[memoryview]) -> File:
        """Write a file whole or not at all."""
        path = self._place(name)
        if not self.local:
            self._fs.makedirs(posixpath.dirname(path), exist_ok=True)
            with self._fs.open(path, "wb") as handle:
                return written(handle, pieces)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        draft = f"{path}.{uuid.uuid4().hex}.tmp"  # two replicas may write the same shard: equal bytes, either may win
        try:
            with open(draft, "wb") as handle:
                file = written(handle, pieces)
                handle.flush()
                os.fsync(handle.fileno())
            os.replace(draft, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft)
            raise
        return file

    def read(self, name: str, most_bytes: int) -> bytes:
        """ValueError: it is longer. OSError: it cannot be read."""
        with self.open(name) as handle:
            data: bytes = handle.read(most_bytes + 1)
        if len(data) > most_bytes:
            raise ValueError(f"{self.path(name)} is longer than {most_bytes} bytes")
        return data

    def delete(self, name: str) -> None:
        """A file; one that is not there is what was wanted."""
        path = self._place(name)
        with contextlib.suppress(FileNotFoundError):
            if self.local:
                os.unlink(path)
            elif self._fs.exists(path):
                self._fs.rm_file(path)

    def delete_folder(self, name: str) -> None:
        """Locally as far as possible: another peer may be deleting or writing in it, and the next call tries again."""
        if self.local:
            shutil.rmtree(self._place(name), ignore_errors=True)
        else:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm(self._place(name), recursive=True)

    def exists(self, name: str) -> bool:
        """Of local storage."""
        return os.path.lexists(self._place(name))

    def rename(self, name: str, to: str) -> None:
        """Of local storage: at no moment is half of it there."""
        os.rename(self._place(name), self._place(to))

    def keep_only(self, folder: str, names: set[str]) -> None:
        """Of local storage: delete all other files below `folder`, and have the disk hold what is left before this returns."""
        place = self._place(folder)
        for base, _, found in os.walk(place, topdown=False):
            for name in found:
                if posixpath.relpath(posixpath.join(base, name), place) not in names:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(posixpath.join(base, name))
            _sync(base)

    def sync(self) -> None:
        """Of local storage: renames in the directory survive the machine's death."""
        _sync(self.root)

    def _place(self, name: str) -> str:
        return posixpath.join(self.root, name)


def written(handle: Any, pieces: Iterable[memoryview]) -> File:
    """Write `pieces` and return their size and hash."""
    sha, size = hashlib.sha256(), 0
    for piece in pieces:
        handle.write(piece)
        sha.update(piece)
        size += len(piece)
    return File(size, sha.hexdigest())


def _sync(folder: str) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

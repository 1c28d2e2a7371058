"""A corpus of files: which ones, in which order, and their tokens, cached on disk for all peers of a machine."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import os
import platform
import sysconfig
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np

from shoal import guest
from shoal.config import Data
from shoal.runtime.data.rows import Rows
from shoal.runtime.data.sampling import Stored

# Directories and files of the library that differ between distributions of the same Python, or belong to a machine.
NOT_LIBRARY = frozenset(
    ["__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip"]
)
NOT_LIBRARY_FILES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")


class Corpus(msgspec.Struct, frozen=True):
    """Text in files, in an order that does not depend on the machine. `lines`: each is lines of JSON."""

    name: str
    root: Path
    files: tuple[Path, ...]
    lines: bool = False

    @property
    def count(self) -> int:
        return len(self.files)

    def rows(self) -> Iterator[tuple[str, bytes]]:
        """Where each file or line stands, and its bytes."""
        for path in self.files:
            if not self.lines:
                yield str(path), path.read_bytes().replace(b"\r\n", b"\n")
                continue
            with path.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield f"{path}:{number}", line


def open_corpus(data: Data) -> Corpus:
    if data.source == "python":
        return _library()
    if data.source not in ("text", "jsonl"):
        raise ValueError(f"data.source = {data.source!r}: choose one of python, text, jsonl, huggingface")
    if not data.path:
        raise ValueError(f"data.source = {data.source!r} needs data.path: a file, a directory or a glob")
    suffix = ".txt" if data.source == "text" else ".jsonl"
    root, files = _files(data.path, suffix, data.root)
    if data.root:
        guest.refuse_outside(data.root, files, "data.path")
    return Corpus(f"{data.source} files at {data.path}", root, files, data.source == "jsonl")


def parts(corpus: Corpus, names: Collection[str]) -> list[Corpus]:
    """The files below each of these names. ValueError: a file below none or several, or a name with no files."""
    held: dict[str, list[Path]] = {name: [] for name in names}
    for file in corpus.files:
        path = file.relative_to(corpus.root)
        below = [name for name in names if path.is_relative_to(name)]
        if len(below) != 1:
            raise ValueError(
                f"data.weights: {path} is below {' and '.join(map(repr, below)) or 'none of its names'}; it must be below one"
            )
        held[below[0]].append(file)
    if empty := next((name for name in names if not held[name]), ""):
        raise ValueError(f"data.weights: no file of data.path is below {empty!r}; names are relative to {corpus.root}")
    return [
        msgspec.structs.replace(corpus, name=f"{corpus.name}, {name}", files=tuple(files))
        for name, files in held.items()
    ]


def _files(path: str, suffix: str, within: str = "") -> tuple[Path, tuple[Path, ...]]:
    """The directory that names are relative to, and the files. `within`: only files below that directory, whatever `path` says."""
    place = guest.below(within, path, "data.path") if within else Path(path).expanduser()
    if place.is_file():
        return place.parent, (place,)
    if place.is_dir():
        return place, _ordered(place, _in_directory(place, path, suffix))
    matching = _matching(place, path, within)
    root = Path(within or ".")
    if place.is_absolute() and not within:
        root = Path(os.path.commonpath([file.parent for file in matching]))
    return root, _ordered(root, matching)


def _in_directory(directory: Path, path: str, suffix: str) -> list[Path]:
    files = [file for file in directory.rglob(f"*{suffix}") if file.is_file()]
    if not files:
        raise ValueError(
            f"data.path = {path!r}: no {suffix} files in this directory; a glob such as '{path}/**/*' takes others"
        )
    return files


def _matching(place: Path, path: str, within: str) -> list[Path]:
    """The files that a glob matches."""
    names = glob.glob(path, root_dir=within, recursive=True) if within else glob.glob(str(place), recursive=True)
    files = [file for name in names if (file := Path(within, name)).is_file()]
    if not files:
        reason = "no file matches" if glob.has_magic(path) else "no such file or directory"
        raise ValueError(f"data.path = {path!r}: {reason}; it is looked for from {within or Path.cwd()}")
    return files


def _ordered(root: Path, found: list[Path]) -> tuple[Path, ...]:
    """By relative path, as bytes: the same order wherever the corpus lies."""
    return tuple(sorted(found, key=lambda p: p.relative_to(root).as_posix().encode()))


def _library() -> Corpus:
    """The installed Python library's own text, less what distributions leave out or change."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, inner, names in os.walk(root):
        inner[:] = [
            name for name in inner if name not in NOT_LIBRARY
        ]  # what is installed is many times larger than the library
        chosen = (name for name in names if name.endswith(".py") and not name.startswith(NOT_LIBRARY_FILES))
        found += [Path(folder, name) for name in chosen if name not in NOT_LIBRARY]
    if not found:
        raise ValueError(
            f"data.source = 'python': no library text in {root}; give text files with data.source = 'text'"
        )
    return Corpus(f"library of Python {platform.python_version()}", root, _ordered(root, found))


class Stock(msgspec.Struct, frozen=True):
    """All tokens of a corpus."""

    tokens: Stored
    digest: str
    skipped: int  # wrong rows


def read_tokens(corpus: Corpus, rows: Rows, cache: Path | None) -> Stock:
    """From the cache when it holds them. ValueError: a wrong row."""
    if cache is None:
        held = bytearray()
        digest = _write_tokens(corpus, rows, held.extend)
        return Stock(np.frombuffer(held, dtype=rows.dtype), digest, rows.skipped)
    place = cache / f"{_cache_key(corpus, rows)}.tokens"
    note = place.with_suffix(".sha256")
    cache.mkdir(parents=True, exist_ok=True)
    with _alone(cache):  # peers that start together wait for the first, which writes
        if not note.exists():
            _write_cache(corpus, rows, place, note)
    digest, skipped = note.read_text().split()
    empty = place.stat().st_size == 0
    tokens = np.empty(0, dtype=rows.dtype) if empty else np.memmap(place, dtype=rows.dtype, mode="r")
    return Stock(tokens, digest, int(skipped))


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Nobody else on this machine writes to that cache meanwhile; a process that dies no longer does."""
    held = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks: each writes the same bytes, and any of them may be last
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def _write_cache(corpus: Corpus, rows: Rows, place: Path, note: Path) -> None:
    with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as file:
        try:
            digest = _write_tokens(corpus, rows, file.write)
        except BaseException:
            os.unlink(file.name)
            raise
    os.replace(file.name, place)
    _write_whole(note, f"{digest} {rows.skipped}".encode())


def _write_whole(path: Path, text: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)


def _write_tokens(corpus: Corpus, rows: Rows, write: Callable[[bytes], object]) -> str:
    sha = hashlib.sha256()
    for tokens in rows.pieces(corpus.rows()):
        data = tokens.astype(rows.dtype).tobytes()
        sha.update(data)
        write(data)
    return sha.hexdigest()


def _cache_key(corpus: Corpus, rows: Rows) -> str:
    sha = hashlib.sha256(rows.name.encode())
    for path in corpus.files:
        stat = path.stat()
        sha.update(f"\0{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
    return sha.hexdigest()[:32]

"""A corpus of files: which ones, in which order, and their tokens, cached on disk for all peers of a machine."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import platform
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np

from shoal import guest
from shoal.config import Data
from shoal.runtime.data.sampling import Stored
from shoal.runtime.data.tokenizer import Tokenizer, encode_document

# Directories and files of the library that differ between distributions of the same Python, or belong to a machine.
NOT_LIBRARY = frozenset(
    ["__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip"]
)
NOT_LIBRARY_FILES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")


class Corpus(msgspec.Struct, frozen=True):
    """Text in files, in an order that does not depend on the machine. `json_field` is set for JSON lines."""

    name: str
    root: Path
    files: tuple[Path, ...]
    json_field: str = ""

    @property
    def count(self) -> int:
        return len(self.files)

    def documents(self) -> Iterator[bytes]:
        for path in self.files:
            if not self.json_field:
                yield path.read_bytes().replace(b"\r\n", b"\n")
                continue
            with path.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield text_field(_json(line, path, number), self.json_field, f"{path}:{number}")


def _json(line: bytes, path: Path, number: int) -> object:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(
            f"{path}:{number}: not a line of JSON ({error}); data.source = 'text' reads plain text"
        ) from error


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
    field = data.field if data.source == "jsonl" else ""
    return Corpus(f"{data.source} files at {data.path}", root, files, field)


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
    found = [
        p
        for p in root.rglob("*.py")
        if not NOT_LIBRARY.intersection(p.relative_to(root).parts) and not p.name.startswith(NOT_LIBRARY_FILES)
    ]
    if not found:
        raise ValueError(
            f"data.source = 'python': no library text in {root}; give text files with data.source = 'text'"
        )
    return Corpus(f"library of Python {platform.python_version()}", root, _ordered(root, found))


def text_field(row: object, field: str, where: str) -> bytes:
    if not isinstance(row, dict) or field not in row:
        names = ", ".join(map(repr, sorted(row))) if isinstance(row, dict) else f"a {type(row).__name__}"
        raise ValueError(f"{where}: no field {field!r}; it has {names or 'none'}; set data.field")
    if not isinstance(row[field], str):
        raise ValueError(f"{where}: field {field!r} holds a {type(row[field]).__name__}, not text; set data.field")
    return str(row[field]).encode()


def read_tokens(corpus: Corpus, tokenizer: Tokenizer, cache: Path | None) -> tuple[Stored, str]:
    """All tokens of the corpus and their digest, from the cache when it holds them."""
    dtype = np.dtype("<u1" if tokenizer.vocabulary <= 1 << 8 else "<u2" if tokenizer.vocabulary <= 1 << 16 else "<u4")
    if cache is None:
        held = bytearray()
        digest = _write_tokens(corpus, tokenizer, dtype, held.extend)
        return np.frombuffer(held, dtype=dtype), digest
    place = cache / f"{_cache_key(corpus, tokenizer)}.tokens"
    note = place.with_suffix(".sha256")
    if not note.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cache, delete=False) as file:
            try:
                digest = _write_tokens(corpus, tokenizer, dtype, file.write)
            except BaseException:
                os.unlink(file.name)
                raise
        os.replace(file.name, place)  # peers that start together write the same bytes: any of them may be last
        _write_whole(note, digest.encode())
    if place.stat().st_size == 0:
        return np.empty(0, dtype=dtype), note.read_text()
    return np.memmap(place, dtype=dtype, mode="r"), note.read_text()


def _write_whole(path: Path, text: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)


def _write_tokens(
    corpus: Corpus, tokenizer: Tokenizer, dtype: np.dtype[np.unsignedinteger], write: Callable[[bytes], object]
) -> str:
    sha = hashlib.sha256()
    for text in corpus.documents():
        data = encode_document(tokenizer, text).astype(dtype).tobytes()
        sha.update(data)
        write(data)
    return sha.hexdigest()


def _cache_key(corpus: Corpus, tokenizer: Tokenizer) -> str:
    sha = hashlib.sha256(f"{tokenizer.fingerprint}\0{corpus.json_field}".encode())
    for path in corpus.files:
        stat = path.stat()
        sha.update(f"\0{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
    return sha.hexdigest()[:32]

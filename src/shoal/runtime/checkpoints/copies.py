"""Shards of checkpoints on their way between places: read in chunks for others, written here from chunks that others sent.

core/transfer/copies.py decides which; this is what its tasks do with files. What comes from the network never becomes a path: a shard's
files are named by its number, the small files by a pattern and the hashes of a marker that bears this run's key. Sizes are
compared with what the shard's record or the marker says, and with the room here, before anything is written; nothing takes its place
before its hash is right.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec

from shoal.core.messages import ABOUT, Manifest, OfferShard, ReadShard, Result, RunCopy, WriteChunk
from shoal.runtime.checkpoints import marker
from shoal.runtime.checkpoints.catalog import folder
from shoal.runtime.checkpoints.checkpoint import RECORDS, Store
from shoal.runtime.checkpoints.marker import MARKER, Training
from shoal.runtime.checkpoints.storage import READ_BYTES, File
from shoal.runtime.state import MAX_CHUNK_BYTES

CHUNK_BYTES = 4 << 20  # a quarter of a state's: whatever trains waits for no more than one of them on a link
MOST_CHUNKS = 8192  # of a shard; larger ones have larger chunks
ABOUT_BYTES = 256 << 20  # of all small files: a tokenizer takes some 20 MiB
SMALL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")  # name of a small file
OFFERED = 8  # shards that are read for others


class Incoming(msgspec.Struct):
    """A shard that is being written: in `files` under `folder`, one for each of the names that it will have."""

    folder: Path
    files: dict[str, File]
    size_bytes: int

    def path(self, name: str) -> Path:
        return self.folder / f"{list(self.files).index(name)}"


class Copies:
    """Of one place. Called from one thread. ValueError and OSError say why something cannot be done."""

    def __init__(self, store: Store, stages: int) -> None:
        self._store, self._stages = store, stages
        self._storage, self._catalog = store.catalog.storage, store.catalog
        self._about: dict[int, bytes] = {}  # the bundle of small files, by step
        # Names and sizes; bytes of a chunk
        self._offered: dict[tuple[int, str], tuple[list[tuple[str, int]], int]] = {}
        self._incoming: dict[tuple[int, str], Incoming] = {}

    def carry_out(self, task: OfferShard | RunCopy) -> Result:
        if isinstance(task, OfferShard):
            return Result(manifest=self.offer(task))
        return Result(record=self.finish(task))

    # ----------------------------------------------------------------------------------------------------- for others

    def offer(self, task: OfferShard) -> Manifest:
        """Read the shard, which must have the content that its name says."""
        if task.shard == ABOUT:
            bundle = self._about[task.step] = self._bundle(task.step)
            self._about = {task.step: bundle}
            chunks = [bundle[start : start + CHUNK_BYTES] for start in range(0, len(bundle), CHUNK_BYTES)]
            return Manifest(tuple(hashlib.sha256(chunk).hexdigest() for chunk in chunks), tuple(map(len, chunks)))
        for names in self._candidates(task.step, task.stage):
            sizes = [self._storage.size(name) for name in names]
            if None in sizes:
                continue
            files = [(name, size or 0) for name, size in zip(names, sizes, strict=True)]
            total = sum(size for _, size in files)
            chunk_bytes = max(CHUNK_BYTES, -(-total // MOST_CHUNKS))
            if chunk_bytes > MAX_CHUNK_BYTES:
                raise ValueError(f"a shard of {total} bytes is larger than any that can be copied")
            content, manifest = self._hashed(files, chunk_bytes)
            if content == task.shard:
                self._offered[task.step, task.shard] = files, chunk_bytes
                while len(self._offered) > OFFERED:
                    del self._offered[next(iter(self._offered))]
                return manifest
        raise ValueError(f"shard {task.stage + 1} of step {task.step} is not whole at {self._store.url}")

    def read(self, task: ReadShard) -> bytearray:
        if task.shard == ABOUT:
            bundle = self._about.get(task.step, b"")
            return bytearray(bundle[task.chunk * CHUNK_BYTES : (task.chunk + 1) * CHUNK_BYTES])
        files, chunk_bytes = self._offered.get((task.step, task.shard), ([], 0))
        data, start, end = bytearray(), task.chunk * chunk_bytes, (task.chunk + 1) * chunk_bytes
        for name, size in files:
            low, high = max(start, 0), min(end, size)
            if low < high:
                with self._storage.open(name) as handle:
                    handle.seek(low)
                    data += handle.read(high - low)
            start, end = start - size, end - size
        if not data:
            raise ValueError(f"shard {task.stage + 1} of step {task.step} is not offered any more")
        return data

    def _candidates(self, step: int, stage: int) -> Iterator[tuple[str, ...]]:
        """Where that shard's files may be: of a checkpoint that is being written, or of one that was."""
        yield tuple(f"{self._store.unfinished(step)}/{name}" for name in marker.shard_names(stage, self._stages))
        training = self._catalog.inspect(step).training
        if training is not None and stage < training.stages:
            yield tuple(f"{folder(step)}/{name}" for name in training.shard_files(stage))

    def _hashed(self, files: list[tuple[str, int]], chunk_bytes: int) -> tuple[str, Manifest]:
        """The shard's name, and its chunks: every byte is read once."""
        content: list[File] = []
        hashes, sizes = [], []
        chunk, filled = hashlib.sha256(), 0
        for name, size in files:
            whole = hashlib.sha256()
            with self._storage.open(name) as handle:
                while data := handle.read(min(READ_BYTES, chunk_bytes - filled)):
                    whole.update(data)
                    chunk.update(data)
                    filled += len(data)
                    if filled == chunk_bytes:
                        hashes.append(chunk.hexdigest())
                        sizes.append(filled)
                        chunk, filled = hashlib.sha256(), 0
            content.append(File(size, whole.hexdigest()))
        if filled:
            hashes.append(chunk.hexdigest())
            sizes.append(filled)
        return marker.content_of(content), Manifest(tuple(hashes), tuple(sizes))

    def _bundle(self, step: int) -> bytes:
        """training.json and the small files beside it."""
        training = self._catalog.open(step)
        small = {name: file for name, file in training.files.items() if training.shard_of(name) is None}
        if sum(file.bytes for file in small.values()) > ABOUT_BYTES:
            raise ValueError(f"the small files of step {step} take more than {ABOUT_BYTES} bytes")
        for name, file in small.items():
            if fault := self._catalog.fault(step, name, file):
                raise ValueError(f"damaged: {fault}")
        names = [MARKER, *small]
        return msgspec.msgpack.encode(
            {name: self._storage.read(f"{folder(step)}/{name}", ABOUT_BYTES) for name in names}
        )

    # ----------------------------------------------------------------------------------------------------------- here

    def write(self, task: WriteChunk, data: memoryview) -> int:
        """Bytes written: 0 when the chunk differs from its hash."""
        incoming = self._incoming.get((task.step, task.shard))
        if incoming is None:
            incoming = self._begin(task)
        if task.size_bytes != incoming.size_bytes or not 0 <= task.start <= task.size_bytes - len(data):
            raise ValueError(f"{len(data)} bytes from {task.start} on are none of a shard of {incoming.size_bytes}")
        if hashlib.sha256(data).hexdigest() != task.digest:
            return 0
        start, end = task.start, task.start + len(data)
        for name, file in incoming.files.items():
            low, high = max(start, 0), min(end, file.bytes)
            if low < high:
                path = incoming.path(name)
                with open(path, "r+b" if path.exists() else "w+b") as handle:
                    handle.seek(low)
                    handle.write(data[low - start : high - start])
            start, end = start - file.bytes, end - file.bytes
        return len(data)

    def finish(self, task: RunCopy) -> str:
        """Put the shard in its place. ValueError: nothing of it was written and it is not there already, or its content is wrong."""
        incoming = self._incoming.pop((task.step, task.shard), None)
        if incoming is None:
            self._look(task)
            return task.record
        try:
            for name, file in incoming.files.items():
                if (digest := _hash(incoming.path(name))) != file.sha256 and task.shard != ABOUT:
                    raise ValueError(
                        f"{name} of step {task.step} came with SHA-256 {digest[:16]}, not {file.sha256[:16]}"
                    )
            if task.shard == ABOUT:
                self._unbundle(task.step, incoming.path(ABOUT).read_bytes())
                return ""
            place = self._store.unfinished(task.step) if task.record else folder(task.step)
            for name in incoming.files:
                self._move(incoming.path(name), f"{place}/{name}")
        finally:
            shutil.rmtree(incoming.folder, ignore_errors=True)
        return task.record

    def _begin(self, task: WriteChunk) -> Incoming:
        for key in [key for key in self._incoming if key != (task.step, task.shard)]:  # it was given up
            shutil.rmtree(self._incoming.pop(key).folder, ignore_errors=True)
        files = self._files(task)
        if task.size_bytes != sum(file.bytes for file in files.values()):
            raise ValueError(f"shard {task.stage + 1} of step {task.step} is offered with {task.size_bytes} bytes")
        self._store.refuse_full(task.size_bytes)
        if task.record:
            self._store.begin(task.step)
        if self._storage.local:
            place = Path(self._storage.root, self._store.unfinished(task.step), uuid.uuid4().hex)
            place.mkdir(parents=True)
        else:
            place = Path(tempfile.mkdtemp(prefix="shoal-"))
        incoming = self._incoming[task.step, task.shard] = Incoming(place, files, task.size_bytes)
        return incoming

    def _files(self, task: WriteChunk | RunCopy) -> dict[str, File]:
        """The files that the shard consists of."""
        if task.shard == ABOUT and isinstance(task, WriteChunk):
            if not 0 < task.size_bytes <= ABOUT_BYTES:
                raise ValueError(f"small files of {task.size_bytes} bytes; {ABOUT_BYTES} are taken")
            return {ABOUT: File(task.size_bytes, "")}
        if task.record:
            record = RECORDS.decode(task.record)
            if (record.step, record.stage, record.stages) != (task.step, task.stage, self._stages):
                raise ValueError(f"the record is of shard {record.stage + 1} of {record.stages} of step {record.step}")
            names = marker.shard_names(record.stage, record.stages)
            files = dict(zip(names, (record.model, record.optimizer), strict=True))
        else:
            files = self._training(task.step).shard_files(task.stage)
        if marker.content_of(files.values()) != task.shard:
            raise ValueError(f"shard {task.stage + 1} of step {task.step} is not what was asked for")
        return files

    def _training(self, step: int) -> Training:
        training = self._catalog.inspect(step).training
        if training is None or training.authority != (self._catalog.authority or ""):
            raise ValueError(f"no {MARKER} of this run's step {step} is at {self._store.url}")
        return training

    def _look(self, task: RunCopy) -> None:
        """ValueError: the shard is not whole here."""
        if task.shard == ABOUT:
            self._bundle(task.step)
            return
        files = self._files(task)
        places = (self._store.unfinished(task.step), folder(task.step)) if task.record else (folder(task.step),)
        for place in places:
            with contextlib.suppress(FileNotFoundError):
                if all(self._storage.hash(f"{place}/{name}") == file.sha256 for name, file in files.items()):
                    return
        raise ValueError(f"shard {task.stage + 1} of step {task.step} is not here yet")

    def _unbundle(self, step: int, data: bytes) -> None:
        """Write the small files. ValueError: another checkpoint of that step is here."""
        text, content, small = self._small_files(step, data)
        self._store.refuse_full(len(data))
        if self._storage.size(f"{folder(step)}/{MARKER}") is not None or any(
            self._storage.size(f"{folder(step)}/{name}") is not None and self._catalog.fault(step, name, file)
            for name, file in small.items()
        ):
            self._store.refuse_taken(step)  # without a marker it is this run's if its files are
        for name, value in ((MARKER, text), *content.items()):  # killed in between, what is missing is known
            self._storage.write(f"{folder(step)}/{name}", [memoryview(value)])

    def _small_files(self, step: int, data: bytes) -> tuple[bytes, dict[str, bytes], dict[str, File]]:
        """The marker in a bundle, its small files, and the sizes and hashes that the marker gives them. ValueError: they do not fit."""
        content = msgspec.msgpack.decode(data, type=dict[str, bytes])
        text = content.pop(MARKER, b"")
        training = marker.decoded(text)
        small = {name: file for name, file in training.files.items() if training.shard_of(name) is None}
        whole = marker.intact(text) and training.step == step and small.keys() == content.keys()
        if not whole or training.authority != (self._catalog.authority or ""):
            raise ValueError(f"what came is no {MARKER} of this run's step {step}")
        for name, value in content.items():
            if SMALL.fullmatch(name) is None or hashlib.sha256(value).hexdigest() != small[name].sha256:
                raise ValueError(f"{name[:80]!r} of step {step} is not what {MARKER} says")
        return text, content, small

    def _move(self, source: Path, name: str) -> None:
        if not self._storage.local:
            self._storage.write(name, _pieces(source))
            return
        target = Path(self._storage.root, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(source, "rb") as handle:
            os.fsync(handle.fileno())
        os.replace(source, target)


def _pieces(path: Path) -> Iterator[memoryview]:
    with open(path, "rb") as handle:
        while data := handle.read(READ_BYTES):
            yield memoryview(data)


def _hash(path: Path) -> str:
    sha = hashlib.sha256()
    with contextlib.suppress(FileNotFoundError):
        for piece in _pieces(path):
            sha.update(piece)
    return sha.hexdigest()

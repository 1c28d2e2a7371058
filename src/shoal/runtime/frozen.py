"""Frozen weights of a stage, between peers: given in chunks as they are held here, and written here beside a list of the chunks.

core/transfer/copies.py decides which chunk is requested from whom; this is what its tasks do. The stream is a safetensors file. A peer
without the model knows names, types and shapes of what it needs from the model's description, so that nothing of another size is
written. Whose bits they are says the digest in the downloaded state (tasks/seat.py). A file stays for this machine's other peers and
for later starts; a download that was interrupted goes on with the chunks that are listed and have their hash.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from shoal.config import Config
from shoal.core.messages import FROZEN, Lack, Manifest, OfferShard, ReadShard, Result, RunCopy, WriteChunk
from shoal.executor.base import Executor, frozen
from shoal.model import lent
from shoal.model.remote import PARTIAL
from shoal.runtime.checkpoints.checkpoint import Unloadable
from shoal.runtime.checkpoints.copies import CHUNK_BYTES, MOST_CHUNKS
from shoal.runtime.state import MAX_CHUNK_BYTES, header
from shoal.units import size

LISTED = ".chunks"  # follows the name of a file: a line for each chunk that is there
SPARE_BYTES = 1 << 30  # of the disk that stay free


class Incomplete(ValueError):
    """The weights are not whole here. `held`: SHA-256 of the chunks that are."""

    def __init__(self, held: tuple[str, ...]) -> None:
        super().__init__("the frozen weights of that stage are not whole here")
        self.held = held


class OtherBase(ValueError):
    """A downloaded state was trained beside other frozen weights than those that are here."""


class Chunk(NamedTuple):
    """Bytes of a file, with their SHA-256."""

    start: int
    size_bytes: int
    digest: str


class Stream:
    """Weights as chunks of a file. They are read where they lie: no copy of the stage is made."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        named = {lent.base_name(name): value for name, value in weights.items()}
        self._head = header(named, {})
        self._values = list(named.values())
        self.nbytes = len(self._head) + sum(value.nbytes for value in self._values)
        self._chunk_bytes = max(CHUNK_BYTES, -(-self.nbytes // MOST_CHUNKS))
        if self._chunk_bytes > MAX_CHUNK_BYTES:
            raise ValueError(f"frozen weights of {size(self.nbytes)} are more than can be given")

    def manifest(self) -> Manifest:
        hashes, sizes = [], []
        for chunk in range(-(-self.nbytes // self._chunk_bytes)):
            data = self.read(chunk)
            hashes.append(hashlib.sha256(data).hexdigest())
            sizes.append(len(data))
        return Manifest(tuple(hashes), tuple(sizes))

    def read(self, chunk: int) -> bytearray:
        """ValueError: no such chunk."""
        start, stop = chunk * self._chunk_bytes, min((chunk + 1) * self._chunk_bytes, self.nbytes)
        if not 0 <= start < stop:
            raise ValueError(f"there is no chunk {chunk} of {size(self.nbytes)}")
        data, first = bytearray(self._head[start:stop]), len(self._head)
        for value in self._values:
            low, high = max(start, first), min(stop, first + value.nbytes)
            if low < high:
                flat = value.detach().contiguous().view(-1).view(torch.uint8)
                data += flat[low - first : high - first].cpu().numpy().data
            first += value.nbytes
        return data


class Frozen:
    """Of one peer. Called from one thread."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._given: dict[int, Stream] = {}  # by stage
        self._unread: set[int] = set()  # chunks of another stage than the one that is served
        self._of: tuple[int, Executor | None] = -1, None
        self._whole: dict[int, tuple[Path, bytes, int]] = {}  # by stage: where its file belongs, its header, its size
        self._right: dict[Path, dict[int, Chunk]] = {}  # chunks that are there, by their start

    # ----------------------------------------------------------------------------------------------------- for others

    def serve(self, stage: int, executor: Executor | None) -> None:
        """What may be given from now on; None: nothing. Called from the thread that builds stages: an old one is let go."""
        self._given, self._of = {}, (stage, executor)

    def carry_out(self, task: OfferShard | RunCopy) -> Result:
        return self.offer(task) if isinstance(task, OfferShard) else self.finish(task)

    def offer(self, task: OfferShard) -> Result:
        stage, executor = self._of
        if not self._config.tune.lend:
            raise ValueError("this run gives no frozen weights away (tune.lend)")
        if executor is None or stage != task.stage:
            return self._offer_another(task.stage)
        given = Stream(frozen(executor))
        manifest = given.manifest()
        if self._of == (stage, executor):
            self._given[stage] = given
        return Result(manifest=manifest)

    def _offer_another(self, stage: int) -> Result:
        """A stage whose replicas are gone, from the model that lies here: in the host's memory until each chunk was read."""
        if lent.borrowed(self._config.model.path):
            raise ValueError(f"stage {stage} is not here")
        from shoal.executor import fit
        from shoal.model import stages

        fit.check_host(self._config, stage)
        given = Stream(dict(stages.build(self._config, stage).named_frozen()))
        manifest = given.manifest()
        self._given = {own: stream for own, stream in self._given.items() if own == self._of[0]} | {stage: given}
        self._unread = set(range(len(manifest.sizes)))
        return Result(manifest=manifest)

    def read(self, task: ReadShard) -> bytearray:
        given = self._given.get(task.stage)
        if given is None:
            raise ValueError(f"the frozen weights of stage {task.stage} are not offered any more")
        data = given.read(task.chunk)
        if task.stage != self._of[0]:
            self._unread.discard(task.chunk)
            if not self._unread:
                self._given.pop(task.stage, None)
        return data

    # ----------------------------------------------------------------------------------------------------------- here

    def write(self, task: WriteChunk, data: memoryview) -> int:
        """Bytes written: 0 when the chunk differs from its hash."""
        file, head, size_bytes = self._place(task.stage)
        if task.size_bytes != size_bytes or not 0 <= task.start <= size_bytes - len(data):
            raise ValueError(
                f"{size(task.size_bytes)} of frozen weights are offered, and stage {task.stage} of this model has {size(size_bytes)}"
            )
        if hashlib.sha256(data).hexdigest() != task.digest:
            return 0
        if task.start == 0 and bytes(data[: len(head)]) != head[: len(data)]:
            return 0  # other names, types or shapes
        right = self._right.setdefault(file, {})
        if not right:
            self._refuse_full(file, size_bytes)
        with open(
            os.open(_partial(file), os.O_RDWR | os.O_CREAT, 0o644), "r+b"
        ) as stream:  # another peer may write it, too
            stream.seek(task.start)
            stream.write(data)
        right[task.start] = chunk = Chunk(task.start, len(data), task.digest)
        with open(_listed(file), "a") as lines:
            lines.write(f"\n{json.dumps(chunk)}\n")  # the line before may be torn
        return len(data)

    def finish(self, task: RunCopy) -> Result:
        """Incomplete: chunks of it are missing here."""
        file, _, size_bytes = self._place(task.stage)
        right = self._right.get(file)
        if right is None:
            right = self._right[file] = _verified(file)
        if sum(chunk.size_bytes for chunk in right.values()) != size_bytes:
            if file.exists():
                file.replace(_partial(file))
            raise Incomplete(tuple(chunk.digest for chunk in right.values()))
        if file.exists():
            _partial(file).unlink(missing_ok=True)
        else:
            _partial(file).replace(file)
        return Result()

    @contextmanager
    def building(self, stage: int) -> Iterator[None]:
        """While a stage is built: none is given. What turns out to be other weights than its replicas hold is deleted. Unloadable: this
        machine has no model, and those weights are not here."""
        self.serve(stage, None)
        if not lent.borrowed(self._config.model.path):
            yield
            return
        file, _, _ = self._place(stage)
        if not file.is_file():
            raise Unloadable(f"the frozen weights of stage {stage} are not here", None, (Lack(stage, FROZEN),))
        try:
            yield
        except OtherBase:
            for each in (file, _partial(file), _listed(file)):
                each.unlink(missing_ok=True)
            self._right.pop(file, None)
            raise

    def _place(self, stage: int) -> tuple[Path, bytes, int]:
        if not lent.borrowed(self._config.model.path):
            raise ValueError("this machine reads its model itself")
        if stage not in self._whole:
            from shoal.model import stages

            named = list(stages.hollow(self._config, stage).named_frozen())
            head = header({lent.base_name(name): value for name, value in named}, {})
            size_bytes = len(head) + sum(value.nbytes for _, value in named)
            self._whole[stage] = lent.place(self._config.model.path, named), head, size_bytes
        return self._whole[stage]

    def _refuse_full(self, file: Path, size_bytes: int) -> None:
        free_bytes = shutil.disk_usage(file.parent).free
        if free_bytes < size_bytes + SPARE_BYTES:
            raise ValueError(
                f"frozen weights of {size(size_bytes)} do not fit on the disk of {file.parent}, which has {size(free_bytes)} free:"
                f" {size(SPARE_BYTES)} of it are spared; name another with run.dir"
            )


def _partial(file: Path) -> Path:
    return file.with_name(file.name + PARTIAL)


def _listed(file: Path) -> Path:
    return file.with_name(file.name + LISTED)


def _verified(file: Path) -> dict[int, Chunk]:
    """The chunks that are listed and have their hash."""
    there = file if file.is_file() else _partial(file)
    if not there.is_file() or not _listed(file).is_file():
        return {}
    with there.open("rb") as stream:
        return {chunk.start: chunk for chunk in _lines(_listed(file)) if _has(stream, chunk)}


def _has(stream: BinaryIO, chunk: Chunk) -> bool:
    stream.seek(chunk.start)
    return hashlib.sha256(stream.read(chunk.size_bytes)).hexdigest() == chunk.digest


def _lines(listed: Path) -> Iterator[Chunk]:
    for line in listed.read_text().splitlines():
        with suppress(json.JSONDecodeError, TypeError, ValueError):
            start, size_bytes, digest = json.loads(line)
            if isinstance(start, int) and 0 < int(size_bytes) <= MAX_CHUNK_BYTES and isinstance(digest, str):
                yield Chunk(start, size_bytes, digest)

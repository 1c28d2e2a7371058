"""Places for checkpoints in symbols, and what a peer's tasks do with them: published, offered to others, copied from them. For
task_runner.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

from shoal.core import messages as m

Blob = tuple[Any, ...]
CHUNKS = 3  # of a stage's state, and of a checkpoint's shard


def short(*parts: object) -> str:
    """A digest of nested tuples of plain values."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


class Storage:
    """A place for checkpoints: one that all peers share, or a machine's own. `full` fails every write."""

    def __init__(self) -> None:
        self.full = False
        self.damaged: set[int] = set()  # steps of published checkpoints that nobody can load
        self.shards: dict[tuple[int, int], str] = {}  # by step and stage, of checkpoints that are not published yet
        self.published: dict[int, tuple[str, ...]] = {}  # what training.json says of every stage
        self.epochs: dict[int, int] = {}  # in which those were published
        self.held: dict[int, set[int]] = {}  # the stages of a published checkpoint whose shards are here

    def has(self, step: int, stage: int, digest: str) -> bool:
        """A whole shard of a published checkpoint."""
        whole = step in self.published and step not in self.damaged and stage in self.held[step]
        return whole and self.published[step][stage] == digest

    def delete_undone(self, step: int, epoch: int) -> None:
        """Published checkpoints of later steps, by older epochs."""
        for later in [later for later, of in self.epochs.items() if later > step and of < epoch]:
            del self.published[later], self.held[later], self.epochs[later]

    def need_room(self) -> None:
        if self.full:
            raise ValueError("no space left on the storage")


class Copies:
    """One peer's part in checkpoints at its `place`. `faults`: what no machine may ever ask for."""

    def __init__(self, stages: int, place: str, storage_of: Callable[[str], Storage], faults: list[str]) -> None:
        self.stages, self.place, self.faults = stages, place, faults
        self._storage_of = storage_of
        self._kept: dict[tuple[int, int], str] = {}  # parameters to be saved, by stage and version
        self._written: dict[tuple[int, str], dict[int, Blob]] = {}  # chunks of a checkpoint's shard, by step and shard

    @property
    def storage(self) -> Storage:
        return self._storage_of(self.place)

    def keep(self, stage: int, version: int, digest: str) -> None:
        """A checkpoint of these parameters will be saved."""
        self._kept[(stage, version)] = digest

    def save(self, task: m.RunSave, current: str | None) -> m.Result:
        """`current`: the parameters that the stage has now, if they are of the version to be saved."""
        self.storage.need_room()
        digest = self._kept.get((task.stage, task.step), current)
        if digest is None:
            raise ValueError(f"no copy of stage {task.stage} version {task.step}")
        self.storage.shards[(task.step, task.stage)] = digest
        record = json.dumps({"step": task.step, "stage": task.stage, "digest": digest})
        return m.Result(record=record, digest=shard_name(task.step, task.stage, digest))

    def publish(self, task: m.RunPublish) -> m.Result:
        storage = self.storage
        storage.need_room()
        records = sorted((json.loads(record) for record in task.records), key=lambda record: record["stage"])
        stages = [(record["step"], record["stage"]) for record in records]
        if stages != [(task.step, stage) for stage in range(self.stages)]:
            self.faults.append(f"RunPublish of step {task.step} with records {records}")
            raise ValueError("records are not one of each stage")
        digests = tuple(record["digest"] for record in records)
        here = {stage for stage in range(self.stages) if not task.copies or self.place in task.copies[stage]}
        missing = [stage for stage in here if storage.shards.get((task.step, stage)) != digests[stage]]
        if missing and not all(storage.has(task.step, stage, digests[stage]) for stage in missing):
            raise ValueError(f"shards {missing} of step {task.step} are not here")
        storage.damaged.discard(task.step)
        storage.published[task.step], storage.held[task.step] = digests, here
        storage.epochs[task.step] = task.epoch
        storage.delete_undone(task.step, task.epoch)
        for stage in here:
            storage.shards.pop((task.step, stage), None)
        return m.Result(record=f"checkpoints/step-{task.step}")

    def _find_shard(self, task: m.OfferShard | m.ReadShard | m.RunCopy) -> Blob:
        """What that shard holds, if it is whole here."""
        storage, step = self.storage, task.step
        published = storage.published.get(step)
        if task.shard == m.ABOUT and published is not None and step not in storage.damaged:
            return published
        for digest in (storage.shards.get((step, task.stage)), published[task.stage] if published else None):
            if digest is not None and shard_name(step, task.stage, digest) == task.shard:
                if storage.shards.get((step, task.stage)) == digest or storage.has(step, task.stage, digest):
                    return (digest,)
        raise ValueError(f"shard {task.stage} of step {step} is not here")

    def offer(self, task: m.OfferShard) -> m.Result:
        held = self._find_shard(task)
        hashes = tuple(short(("shard", task.shard, held, chunk)) for chunk in range(CHUNKS))
        return m.Result(manifest=m.Manifest(hashes, (1000,) * CHUNKS))

    def read(self, task: m.ReadShard) -> Blob:
        return ("shard", task.shard, self._find_shard(task), task.chunk)

    def write(self, task: m.WriteChunk, chunk: Blob) -> m.Result:
        self.storage.need_room()
        if short(chunk) != task.digest:
            return m.Result()
        self._written.setdefault((task.step, task.shard), {})[task.start] = chunk
        return m.Result(nbytes=1000)

    def finish(self, task: m.RunCopy) -> m.Result:
        chunks = self._written.pop((task.step, task.shard), {})
        storage = self.storage
        if not chunks:
            if not task.record:
                storage.shards.pop((task.step, task.stage), None)  # of an older epoch: not what is loaded
            self._find_shard(task)
            return m.Result(record=task.record)
        held = {chunk[2] for chunk in chunks.values() if chunk[:2] == ("shard", task.shard)}
        if len(chunks) != CHUNKS or len(held) != 1:
            raise ValueError(f"chunks {chunks} make no shard")
        self.storage.need_room()
        (content,) = held
        if task.shard == m.ABOUT:
            storage.published[task.step] = content
            storage.held.setdefault(task.step, set())
            storage.epochs.setdefault(task.step, 0)
            if task.step in storage.damaged:  # which of its files are, each peer finds when it loads
                storage.damaged.discard(task.step)
                storage.held[task.step] = set()
            return m.Result()
        if shard_name(task.step, task.stage, *content) != task.shard:
            raise ValueError("its content is another than its name says")
        if task.record:
            storage.shards[(task.step, task.stage)] = content[0]
        else:
            storage.held[task.step].add(task.stage)
        return m.Result(record=task.record)


def shard_name(step: int, stage: int, digest: str) -> str:
    return short("shard", step, stage, digest)

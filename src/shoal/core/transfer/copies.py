"""Copies of a checkpoint's shards on other machines: downloading one that is wanted here, and giving those that are here to others.

A shard is named by its content, so that whoever has it can give it. The leader asks a peer of another place to keep a copy
(CopyRequest, leader/saving.py), and a peer that finds a shard missing or damaged when it loads its stage downloads it from anybody
(`repair`). So does a peer without the model get its stage's frozen weights, from that stage's replicas alone. One shard at a time, by
the download of download.py; files are the driver's. For transfer.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from shoal.core.messages import (
    FROZEN,
    BlobRef,
    Chunk,
    ChunkRequest,
    Command,
    CopyRequest,
    Do,
    Done,
    Drop,
    Failed,
    Lack,
    Manifest,
    Nobody,
    Note,
    Offer,
    OfferShard,
    Peer,
    ReadShard,
    RunCopy,
    Saved,
    Send,
    Settings,
    StateRequest,
    View,
)
from shoal.core.replica_state import TEXT, drop
from shoal.core.transfer.download import DONORS, Downloader, Shard, Target
from shoal.core.transfer.given import Given, chunk_key

if TYPE_CHECKING:
    from random import Random

READS_AT_ONCE = 8  # for one peer; requests beyond that are not answered
OFFERED = 8  # shards whose manifests are kept
READERS = 64  # requests for a shard that is being read for its manifest
REFUSALS = 4  # after which peers of other stages are asked for frozen weights, one at a time: they read that stage of the model
PATIENCE_BEATS = 120  # without a chunk, after which a copy is given up: another place may do better


Key = tuple[int, int, str]  # step, stage, shard


class Job(msgspec.Struct, frozen=True):
    """A shard to be downloaded. `leader`: who asked for a copy; '' of a repair."""

    shard: Shard
    epoch: int
    holders: tuple[Peer, ...]
    leader: Nobody = ""


class ShardDonor:
    """Gives shards that are here to any member or joiner of the view."""

    def __init__(self, serial: Iterator[int]) -> None:
        self._serial = serial
        self._manifests: dict[Key, Manifest] = {}
        self._offering: dict[str, tuple[Key, list[tuple[Peer, StateRequest]]]] = {}  # by task
        self._reading: dict[str, tuple[Peer, ChunkRequest]] = {}  # by task
        self.given = Given()

    def on_state_request(self, peer: Peer, request: StateRequest) -> list[Command]:
        key = request.since, request.stage, request.shard
        if key in self._manifests:
            return [Send(peer, _offer(request, self._manifests[key]))]
        for offered, waiting in self._offering.values():
            if offered == key:
                if len(waiting) < READERS and (peer, request) not in waiting:
                    waiting.append((peer, request))
                return []
        if len(self._offering) >= OFFERED:
            return []  # it is asked again
        task = self._id()
        self._offering[task] = key, [(peer, request)]
        return [Do(OfferShard(task, request.since, request.stage, request.shard))]

    def on_chunk_request(self, peer: Peer, request: ChunkRequest) -> list[Command]:
        manifest = self._manifests.get((request.step, request.stage, request.shard))
        if manifest is None or request.chunk >= len(manifest.sizes):
            return [Send(peer, _chunk(request, gone=True))]
        running = [chunk_key(peer, one) for reader, one in self._reading.values() if reader == peer]
        if chunk_key(peer, request) in running or len(running) >= READS_AT_ONCE or self.given.comes(peer, request):
            return []
        task = self._id()
        self._reading[task] = peer, request
        return [Do(ReadShard(task, request.step, request.stage, request.shard, request.chunk, task))]

    def on_done(self, done: Done) -> list[Command]:
        if done.id in self._offering:
            key, waiting = self._offering.pop(done.id)
            manifest = done.result.manifest or Manifest((), ())
            self._manifests[key] = manifest
            while len(self._manifests) > OFFERED:
                del self._manifests[next(iter(self._manifests))]
            return [Send(peer, _offer(request, manifest)) for peer, request in waiting]
        if done.id in self._reading:
            peer, request = self._reading.pop(done.id)
            self.given.send(peer, request)
            return [Send(peer, _chunk(request), (done.id,)), Drop((done.id,))]
        return []

    def on_failed(self, failed: Failed) -> list[Command]:
        if failed.id in self._offering:
            _, waiting = self._offering.pop(failed.id)
            return [Send(peer, _offer(request, Manifest((), ()))) for peer, request in waiting]
        if failed.id in self._reading:
            peer, request = self._reading.pop(failed.id)
            self._manifests.pop((request.step, request.stage, request.shard), None)
            return [Send(peer, _chunk(request, gone=True))]
        return []

    def _id(self) -> str:
        return f"y/{next(self._serial)}"


class Copier:
    """`repaired` is set when every shard that `repair` was called for is here ('') or one cannot be had (why); transfer.py clears it."""

    def __init__(self, name: Peer, settings: Settings, rng: Random, serial: Iterator[int]) -> None:
        self._name, self._settings, self._serial = name, settings, serial
        self.downloader = Downloader(name, settings, rng, serial)
        self._view: View | None = None
        self._queue: list[Job] = []
        self._job: Job | None = None
        self._task = ""  # RunCopy: first it looks whether the shard is here already, then it puts what was downloaded in its place
        self._chunk_at = 0.0  # when the last chunk was written
        self._saved: dict[tuple[int, int, int], Saved] = {}  # answers, by epoch, step and stage
        self._refusals = 0  # in a row, of a stage's replicas that have no frozen weights to give
        self.repaired: str | None = None

    @property
    def loaded(self) -> int:
        """Chunks that are here of what a state waits for."""
        return self.downloader.loaded if self._job is not None and not self._job.leader else 0

    def on_view(self, view: View, now: float) -> list[Command]:
        """What an older epoch wanted is void; nobody that is not in the view has anything to give."""
        self._view = view
        self._queue = [job for job in self._queue if job.epoch == view.epoch]
        if self._job is not None and self._job.epoch != view.epoch:
            self._drop()
        target = self.downloader.target
        if target is not None:
            self.downloader.target = msgspec.structs.replace(target, holders=_present(view, target.holders))
            if not self.downloader.target.holders:
                return self._fail("nobody that has it is left", now)
        return self._go_on(now)

    def copy(self, peer: Peer, message: CopyRequest, now: float) -> list[Command]:
        """The leader wants a copy here."""
        view, key = self._view, (message.epoch, message.step, message.stage)
        if view is None or message.epoch != view.epoch:
            return []
        answer = self._saved.get(key)
        if answer is not None and answer.shard == message.shard:
            return [Send(peer, answer)]
        job = Job(Shard(message.step, message.stage, message.shard, message.record), *key[:1], message.holders, peer)
        jobs = [self._job, *self._queue] if self._job is not None else self._queue
        if any(known.shard == job.shard and known.leader for known in jobs):
            return []
        self._forget_others(message.epoch, message.step)
        self._queue.append(job)
        return self._go_on(now)

    def _forget_others(self, epoch: int, step: int) -> None:
        """The leader now saves that step: it has given up or completed every other checkpoint."""
        if self._job is not None and self._job.leader and self._job.shard.step != step:
            self._drop()
        self._queue = [job for job in self._queue if not job.leader or job.shard.step == step]
        self._saved = {key: saved for key, saved in self._saved.items() if key[:2] == (epoch, step)}

    def repair(self, lacks: tuple[Lack, ...], view: View, step: int, now: float) -> list[Command]:
        """Download these shards from whoever has them: before any copy, for which nobody waits."""
        self._view = view
        self.stop_repair()
        jobs = []
        others = [member for member in view.members + view.joining if member.peer != self._name]
        for lack in lacks:
            frozen = lack.shard == FROZEN
            replicas = tuple(member.peer for member in others if member.stage == lack.stage)
            alone = frozen and replicas and self._refusals < REFUSALS
            holders = replicas if alone else tuple(member.peer for member in others)
            jobs.append(Job(Shard(0 if frozen else step, lack.stage, lack.shard), view.epoch, holders))
        self._queue = [*jobs, *self._queue]
        return self._go_on(now)

    def stop_repair(self) -> None:
        self.repaired = None
        self._queue = [job for job in self._queue if job.leader]
        if self._job is not None and not self._job.leader:
            self._drop()

    def tick(self, now: float) -> list[Command]:
        if not self.downloader.due(now) or self._job is None or self._task:
            return []
        patient = self._job.shard.shard == FROZEN  # no other place will do better, and a slow line takes its time
        if not patient and now - self._chunk_at >= PATIENCE_BEATS * self._settings.heartbeat_s:
            return self._fail(f"no chunk of it has arrived for {now - self._chunk_at:.0f} s", now)
        return self.downloader.give_up_late(now) if self.downloader.has_donors else self._request(now)

    # --------------------------------------------------------------------------------------------------- messages

    def on_offer(self, peer: Peer, offer: Offer, now: float) -> list[Command]:
        target, view = self.downloader.target, self._view
        if target is None or view is None or self._task or target.shard != offer.shard or peer not in target.holders:
            return []
        current = self.downloader.current
        if offer.manifest.sizes and current is not None and len(current.donors) >= DONORS:
            return []
        commands = self.downloader.on_offer(peer, offer, view, 0, now)
        if not offer.manifest.sizes and offer.epoch == target.epoch:
            left = tuple(one for one in target.holders if one != peer)
            self.downloader.target = msgspec.structs.replace(target, holders=left)
            if not left:
                return self._fail("no other peer has it", now)
        return commands

    def on_chunk(self, peer: Peer, chunk: Chunk, blobs: tuple[BlobRef, ...], fault: str, now: float) -> list[Command]:
        if self._task:
            return drop(tuple(blob.id for blob in blobs))
        return self.downloader.on_chunk(peer, chunk, blobs, fault, now)

    def on_done(self, done: Done, now: float) -> list[Command] | None:
        """None: not a task of this class."""
        if self._task and done.id == self._task:
            return self._finish(done.result.record, now)
        if not self.downloader.is_checking(done.id):
            return None
        if not done.result.nbytes:
            return self.downloader.on_wrong(done.id, "a chunk differs from its hash", now)
        self._chunk_at = now
        if self.downloader.on_right(done.id) is None:
            return self.downloader.go_on(now)
        return self._run()

    def on_failed(self, failed: Failed, now: float) -> list[Command] | None:
        if self._task and failed.id == self._task:
            downloaded, self._task = self.downloader.complete, ""
            return self._fail(failed.reason, now) if downloaded else self._begin(failed.held, now)
        if not self.downloader.is_checking(failed.id):
            return None
        return self._fail(failed.reason, now)  # not its donor's fault: no room, say

    # ---------------------------------------------------------------------------------------------------- private

    def _go_on(self, now: float) -> list[Command]:
        if self._job is not None or not self._queue:
            return []
        self._job = self._queue.pop(0)
        return self._run()

    def _run(self) -> list[Command]:
        assert self._job is not None
        shard, self._task = self._job.shard, f"y/{next(self._serial)}"
        self.downloader.retry_at = None
        return [Do(RunCopy(self._task, shard.step, shard.stage, shard.shard, shard.record))]

    def _begin(self, held: tuple[str, ...], now: float) -> list[Command]:
        """It is not here, but for the chunks with these hashes: download it."""
        job, view = self._job, self._view
        assert job is not None and view is not None
        holders = _present(view, job.holders, but=self._name)
        self.downloader.begin(Target(job.epoch, job.shard.stage, (job.shard.stage,), job.shard, holders), held)
        self._chunk_at = now
        return self._request(now) if holders else self._fail("no other peer is here", now)

    def _request(self, now: float) -> list[Command]:
        assert self._view is not None and self._job is not None
        self.downloader.wait(now)
        if self._job.shard.shard == FROZEN and self._refusals >= REFUSALS:
            self.downloader.retry_at = now + PATIENCE_BEATS * self._settings.heartbeat_s
            return self.downloader.request(self._view, 0, 1)
        repairs = not self._job.leader  # whoever has it may be anybody: all are asked at once
        return self.downloader.request(self._view, 0, len(self._job.holders) if repairs else DONORS)

    def _finish(self, record: str, now: float) -> list[Command]:
        job = self._job
        assert job is not None
        self._drop()
        if not job.leader:
            self.repaired = "" if all(one.leader for one in self._queue) else None
            frozen, self._refusals = job.shard.shard == FROZEN, 0
            note = [Note("state", f"the frozen weights of stage {job.shard.stage} are here")] if frozen else []
            return [*note, *self._go_on(now)]
        shard = job.shard
        saved = Saved(job.epoch, shard.step, shard.stage, record or shard.record, shard=shard.shard)
        self._saved[job.epoch, shard.step, shard.stage] = saved
        return [Send(job.leader, saved), *self._go_on(now)]

    def _fail(self, why: str, now: float) -> list[Command]:
        job = self._job
        if job is None:
            return []
        self._drop()
        if not job.leader:
            self.stop_repair()
            self._refusals += job.shard.shard == FROZEN
            self.repaired = why or "failed"
            return self._go_on(now)
        shard = job.shard
        failed = Saved(job.epoch, shard.step, shard.stage, failed=why[:TEXT] or "failed", shard=shard.shard)
        return [Send(job.leader, failed), *self._go_on(now)]

    def _drop(self) -> None:
        self._job, self._task = None, ""
        self.downloader.abandon()


def _present(view: View, peers: tuple[Peer, ...], but: Peer = "") -> tuple[Peer, ...]:
    present = {member.peer for member in view.members + view.joining}
    return tuple(peer for peer in peers if peer in present and peer != but)


def _offer(request: StateRequest, manifest: Manifest) -> Offer:
    return Offer(request.epoch, request.since, request.stage, manifest, request.shard)


def _chunk(request: ChunkRequest, *, gone: bool = False) -> Chunk:
    return Chunk(request.epoch, request.step, request.stage, request.chunk, gone, request.shard)

"""Downloading a stage's state from up to DONORS of its replicas at once.

The donors offer the same manifest (hashes and sizes of the chunks of one version). Each chunk comes from one of them and is compared
with its hash. A donor that dies, lies or falls silent costs the chunks requested of it; the verified chunks stay. A late chunk is as
good as one in time, and lengthens the patience: otherwise a line on which each chunk takes longer than the deadline would never deliver
one. When all chunks are requested, whoever has sent its own is asked for the last ones of slower donors, too.

For transfer.py, which decides what to download and what to do with a whole state, and for copies.py, which downloads shards of
checkpoints from whoever holds them. The sending sides are donor.py and copies.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from shoal.core.latency import Latency
from shoal.core.messages import (
    FROZEN,
    BlobRef,
    CheckChunk,
    Chunk,
    ChunkRequest,
    Command,
    Do,
    Manifest,
    Note,
    Offer,
    Peer,
    Send,
    Settings,
    StateRequest,
    View,
    WriteChunk,
)
from shoal.core.replica_state import drop

if TYPE_CHECKING:
    from random import Random

DONORS = 3  # replicas that a download is spread over
CHUNKS_AT_ONCE = 2  # in flight from one donor: one travels while the other is read
# At which a chunk is thought to come before one has; at most so large, whatever is offered
COLD_Bps, COLD_BYTES = 5e6, 16 << 20
RETRY_BEATS = 8  # a silent donor is given up; chunks that usually take longer get four times as long,
DOUBLED = 4  # and twice as long, at most so many times, after each donor given up since the last chunk arrived
LAST = 2.0  # times as long as a donor without a request takes for a chunk, that one of another is waited for


class Shard(msgspec.Struct, frozen=True):
    """A shard of the checkpoint of `step`, named by its content, or frozen weights. `record`: what its files are; '' if the checkpoint's
    marker says so."""

    step: int
    stage: int
    shard: str
    record: str = ""


class Target(msgspec.Struct, frozen=True):
    """The state to prepare, and the stages that it is made from: its own, or its two neighbours if it is rebuilt. Or a `saved` shard,
    which `holders` may have."""

    epoch: int
    stage: int
    sources: tuple[int, ...]
    saved: Shard | None = None
    holders: tuple[Peer, ...] = ()

    @property
    def shard(self) -> str:
        """'' of a state."""
        return self.saved.shard if self.saved is not None else ""


class Download(msgspec.Struct):
    """One version of one source's state, on its way here. A chunk is `wanted`, `open` (requested: of which peer, when), being checked,
    or in `have`. The driver keeps them from number `first` on."""

    stage: int
    first: int
    step: int
    manifest: Manifest
    wanted: list[int]
    have: set[int]
    donors: dict[Peer, None] = {}
    open: dict[int, tuple[Peer, float]] = {}
    given_up: dict[
        tuple[int, Peer], float
    ] = {}  # when that chunk was requested first of that peer, which may send it yet
    checking: dict[str, tuple[int, Peer]] = {}
    # When each donor's newest chunk came, and what that took since the one before, or since it was requested
    came_at: dict[Peer, float] = {}
    took_s: dict[Peer, float] = {}

    def came(self, peer: Peer, requested_at: float, now: float) -> None:
        """A chunk of that donor."""
        self.took_s[peer] = now - max(requested_at, self.came_at.get(peer, requested_at))
        self.came_at[peer] = now

    def last_of(self, idle: Peer) -> tuple[float, int] | None:
        """Of the chunks that others are to send: from when on that donor, which has sent its own, is asked for one, too, and which. The one
        that was requested last of whoever has sent nothing for longest."""
        if idle not in self.took_s or any(peer == idle for peer, _ in self.open.values()):
            return None
        last = {peer: (self.came_at.get(peer, at), at, chunk) for chunk, (peer, at) in self.open.items()}
        able = [(since, at, chunk) for since, at, chunk in last.values() if (chunk, idle) not in self.given_up]
        if not able:
            return None
        _, at, chunk = min(able)
        return at + LAST * self.took_s[idle], chunk

    def holds(self, chunk: int) -> bool:
        """It is here, if its hash is right."""
        return chunk in self.have or any(number == chunk for number, _ in self.checking.values())

    def late(self, chunk: int, peer: Peer) -> float | None:
        """When that chunk was requested of `peer`, which was given up since; None if it was not, or is not needed any more."""
        at = self.given_up.pop((chunk, peer), None)
        return None if self.holds(chunk) else at


class Downloader:
    """transfer.py calls `begin` with what it wants, `request` to find donors, and `abandon` when it wants it no more."""

    def __init__(self, name: Peer, settings: Settings, rng: Random, serial: Iterator[int]) -> None:
        self._name, self._settings, self._rng, self._serial = name, settings, rng, serial
        self.target: Target | None = None
        self.current: Download | None = None
        self.whole: list[int] = []  # chunks of each source that is here
        self.retry_at: float | None = None
        self._shunned: set[Peer] = set()  # donors that failed, not used again while there are others
        self._usual = Latency()  # seconds from requesting a chunk to receiving it
        self._asked: dict[
            Peer, bool
        ] = {}  # for the next source, since the last `request`; whether it may still say that it has nothing
        self._misses = 0  # donors given up since the last chunk arrived
        self._held: frozenset[str] = frozenset()  # chunks of the target, by hash, that are here from before

    @property
    def loaded(self) -> int:
        """Chunks that are here and verified."""
        return sum(self.whole) + (len(self.current.have) if self.current is not None else 0)

    @property
    def whole_s(self) -> float | None:
        """About what the source on its way takes as a whole, by the chunks that have come."""
        current, usual_s = self.current, self._usual.value
        if current is None or usual_s is None:
            return None
        return usual_s * len(current.manifest.sizes) / (CHUNKS_AT_ONCE * max(len(current.donors), 1))

    @property
    def complete(self) -> bool:
        """All sources are here."""
        return self.target is not None and len(self.whole) == len(self.target.sources)

    @property
    def has_donors(self) -> bool:
        return self.current is not None and bool(self.current.donors)

    # ---------------------------------------------------------------------------------------------- the download

    def begin(self, target: Target, held: tuple[str, ...] = ()) -> None:
        """`held`: hashes of chunks that are here from an earlier download."""
        self.abandon()
        self.target, self._held = target, frozenset(held)

    def abandon(self) -> None:
        """Forget the target and the chunks."""
        self.target, self.current, self.retry_at, self._misses = None, None, None, 0
        self._shunned.clear()
        self.whole.clear()

    def start_over(self, now: float) -> None:
        """The chunks could not be made into a state."""
        self.current = None
        self.whole.clear()
        self.wait(now)

    def wait(self, now: float) -> None:
        self.retry_at = now + RETRY_BEATS * self._settings.heartbeat_s

    def due(self, now: float) -> bool:
        """Something is late. The deadline is then no longer set."""
        if self.retry_at is None or now < self.retry_at:
            return False
        self.retry_at = None
        return True

    def request(self, view: View, since: int, most: int = DONORS) -> list[Command]:
        """Ask replicas of the next source for their state. `since`: the oldest version of the target's own stage that is useful. `most`: so
        many are asked."""
        current = self.current
        able = [peer for peer in self._able(view) if peer != self._name]
        able = [peer for peer in able if current is None or peer not in current.donors]
        if not set(able) - self._shunned:
            self._shunned.clear()
        able = [peer for peer in able if peer not in self._shunned]
        chosen = self._rng.sample(able, min(most, len(able)))  # none: repeated when a view brings one
        self._asked = dict.fromkeys(chosen, True)
        return self._ask(chosen, view, since)

    def _ask(self, chosen: list[Peer], view: View, since: int) -> list[Command]:
        target, source = self.target, self._source
        assert target is not None
        oldest = self._oldest(view, since)
        request = StateRequest(epoch=target.epoch, stage=source, since=oldest, shard=target.shard)
        return [Send(peer, request) for peer in chosen]

    def give_up_late(self, now: float) -> list[Command]:
        """Go on without the donors whose chunks are late."""
        assert self.current is not None
        late = {peer for peer, at in self.current.open.values() if now - at >= self._patience_s}
        commands: list[Command] = []
        for peer in sorted(late):
            self._misses += 1
            commands += self._without(peer, "it does not answer", now)
        commands += self._request_last(now)
        if self.retry_at is None:
            self._watch(now)
        return commands

    # -------------------------------------------------------------------------------------------------- messages

    def on_offer(self, peer: Peer, offer: Offer, view: View, since: int, now: float) -> list[Command]:
        target, source = self.target, self._source
        if target is None or (target.epoch, source, target.shard) != (offer.epoch, offer.stage, offer.shard):
            return []
        if peer not in self._able(view):
            return []  # only a replica of that stage has its state
        sizes, hashes = offer.manifest.sizes, offer.manifest.hashes
        if not sizes or len(sizes) != len(hashes) or offer.step < self._oldest(view, since):
            if not self.has_donors:
                self.retry_at = now + self._settings.heartbeat_s
            return self._ask_another(peer, view, since)
        current = self.current
        if current is not None and (current.step, current.manifest) != (offer.step, offer.manifest):
            if current.donors:
                return []
            self.current = None  # no donor has that version any more
        if self.current is None:
            self.current = Download(source, sum(self.whole), offer.step, offer.manifest, *self._parted(hashes))
        self.current.donors[peer] = None
        return self.go_on(now)

    def _ask_another(self, instead: Peer, view: View, since: int) -> list[Command]:
        """Of the replicas that have not been asked for the state, one, in the place of one that has nothing to give."""
        assert self.target is not None
        tried = {self._name, *self._asked, *self._shunned}
        rest = [peer for peer in self._able(view) if peer not in tried]
        if self.target.saved is not None or not rest or not self._asked.get(instead):
            return []
        chosen = self._rng.choice(rest)
        self._asked |= {instead: False, chosen: True}
        return self._ask([chosen], view, since)

    def on_chunk(self, peer: Peer, chunk: Chunk, blobs: tuple[BlobRef, ...], fault: str, now: float) -> list[Command]:
        unused = drop(tuple(blob.id for blob in blobs))
        current, target = self.current, self.target
        version = (chunk.epoch, chunk.stage, chunk.step, chunk.shard)
        if current is None or target is None or (target.epoch, current.stage, current.step, target.shard) != version:
            return unused
        usable = not chunk.gone and not fault and len(blobs) == 1
        donor, requested_at = current.open.get(chunk.chunk, ("", 0.0))
        if donor == peer and not usable:
            return unused + self._without(peer, fault or "it has moved on", now)
        if donor != peer:
            late = current.late(chunk.chunk, peer)
            if late is None or not usable:
                return unused
            requested_at = late
        requested_at = min(requested_at, current.given_up.pop((chunk.chunk, peer), requested_at))
        current.open.pop(chunk.chunk, None)
        current.wanted = [number for number in current.wanted if number != chunk.chunk]
        self._usual.add(now - requested_at)
        self._misses = 0
        current.came(peer, requested_at, now)
        task = f"y/{next(self._serial)}"
        current.checking[task] = chunk.chunk, peer
        return [Do(_check(task, current, chunk.chunk, blobs[0].id, target.saved)), *unused]

    # ------------------------------------------------------------------------------------------------ task results

    def is_checking(self, task: str) -> bool:
        return self.current is not None and task in self.current.checking

    def on_right(self, task: str) -> Download | None:
        """The chunk has its hash. Returns the download if it was the last one."""
        current = self.current
        assert current is not None
        chunk, _ = current.checking.pop(task)
        current.have.add(chunk)
        chunks = len(current.manifest.sizes)
        if len(current.have) < chunks:
            return None
        self.current = None
        self.whole.append(chunks)
        if not self.complete:
            self._shunned.clear()
        return current

    def on_wrong(self, task: str, why: str, now: float) -> list[Command]:
        """The chunk does not have its hash."""
        assert self.current is not None
        chunk, peer = self.current.checking.pop(task)
        self.current.wanted.append(chunk)
        return self._without(peer, why, now)

    def go_on(self, now: float) -> list[Command]:
        """Request as many chunks as the donors may have in flight."""
        current, target = self.current, self.target
        if current is None or target is None or not current.donors:
            return []
        commands: list[Command] = []
        for donor in current.donors:
            busy = sum(peer == donor for peer, _ in current.open.values())
            while current.wanted and busy < CHUNKS_AT_ONCE:
                chunk = current.wanted.pop(0)
                current.open[chunk] = donor, now
                busy += 1
                again = (chunk, donor) in current.given_up
                request = ChunkRequest(target.epoch, current.step, current.stage, chunk, target.shard, again)
                commands.append(Send(donor, request))
        commands += self._request_last(now)
        self._watch(now)
        return commands

    # --------------------------------------------------------------------------------------------------- private

    def _parted(self, hashes: tuple[str, ...]) -> tuple[list[int], set[int]]:
        """The chunks to request, and those that are here. One is requested at least: what follows a download follows its last chunk."""
        have = {chunk for chunk, digest in enumerate(hashes) if digest in self._held}
        if len(have) == len(hashes):
            have.remove(len(hashes) - 1)
        return [chunk for chunk in range(len(hashes)) if chunk not in have], have

    @property
    def _source(self) -> int:
        """The stage whose state comes next."""
        return self.target.sources[len(self.whole)] if self.target is not None else -1

    def _able(self, view: View) -> tuple[Peer, ...]:
        """Who may have the next source."""
        if self.target is not None and self.target.saved is not None:
            return self.target.holders
        return tuple(member.peer for member in view.members if member.stage == self._source)

    def _oldest(self, view: View, since: int) -> int:
        """The oldest version of the next source that is useful: neighbours' states must be those of the view."""
        assert self.target is not None
        if self.target.saved is not None:
            return self.target.saved.step
        return since if self._source == self.target.stage else view.step

    def _request_last(self, now: float) -> list[Command]:
        """Donors that have nothing to send any more are asked for what others take long for. Whichever copy comes first counts."""
        current, target = self.current, self.target
        if current is None or target is None or current.wanted:
            return []
        commands: list[Command] = []
        for donor in current.donors:
            last = current.last_of(donor)
            if last is not None and now >= last[0]:
                chunk = last[1]
                peer, requested_at = current.open[chunk]
                current.given_up.setdefault((chunk, peer), requested_at)
                current.open[chunk] = donor, now
                commands.append(
                    Send(donor, ChunkRequest(target.epoch, current.step, current.stage, chunk, target.shard))
                )
        return commands

    def _watch(self, now: float) -> None:
        """Set the deadline to when the next chunk is late, or asked of another donor."""
        current = self.current
        requested = [at for _, at in current.open.values()] if current is not None else []
        self.retry_at = min(requested, default=now) + self._patience_s
        if current is not None and not current.wanted:
            lasts = [last[0] for donor in current.donors if (last := current.last_of(donor)) is not None]
            self.retry_at = min([self.retry_at, *(max(at, now) for at in lasts)])

    @property
    def _patience_s(self) -> float:
        cold_s = min(COLD_BYTES, max(self.current.manifest.sizes)) / COLD_Bps if self.current is not None else 0.0
        usual_s = max(RETRY_BEATS * self._settings.heartbeat_s, 4 * (self._usual.value or cold_s))
        return float(usual_s * 2 ** min(self._misses, DOUBLED))

    def _without(self, peer: Peer, why: str, now: float) -> list[Command]:
        """Request the open chunks of `peer`, a donor no longer, of the others."""
        current = self.current
        assert current is not None
        current.donors.pop(peer, None)
        self._shunned.add(peer)
        lost = [chunk for chunk, (donor, _) in current.open.items() if donor == peer]
        for chunk in lost:
            requested_at = current.open.pop(chunk)[1]
            current.given_up.setdefault((chunk, peer), requested_at)
        current.wanted = sorted({*current.wanted, *lost})
        have = f"{len(current.have)} of {len(current.manifest.sizes)} chunks are here"
        lent = self.target is not None and self.target.shard == FROZEN
        what = "the frozen weights" if lent else f"version {current.step}"
        note = Note("state", f"no more of {what} from {peer}: {why}; {have}")
        if current.donors:
            return [note, *self.go_on(now)]
        self.retry_at = now + self._settings.heartbeat_s
        return [note]


def _check(task: str, current: Download, chunk: int, blob: str, saved: Shard | None) -> CheckChunk | WriteChunk:
    """What compares a chunk with its hash: one of a state is kept in memory, one of a checkpoint's shard is written."""
    digest, sizes = current.manifest.hashes[chunk], current.manifest.sizes
    if saved is None:
        return CheckChunk(id=task, chunk=current.first + chunk, digest=digest, blob=blob)
    return WriteChunk(
        id=task,
        step=saved.step,
        stage=saved.stage,
        shard=saved.shard,
        record=saved.record,
        start=sum(sizes[:chunk]),
        size_bytes=sum(sizes),
        digest=digest,
        blob=blob,
    )

"""How a peer comes to hold its stage's state, and how it gives it to others.

Before the first step the state is built from the seed or from the checkpoint the run resumes (Init). Later it is
downloaded from up to DONORS of the stage's replicas at once: they offer the same manifest (hashes and sizes of the chunks of
one version), each chunk comes from one of them and is compared with its hash, and only a whole, verified state is taken
(Import). A donor that dies, lies or falls silent costs the chunks asked of it; what is here stays. A chunk that comes late is
as good as one in time, and teaches patience: else a line on which every chunk takes longer than a donor is waited for would
never deliver one. The run goes on meanwhile: what it commits is heard and applied afterwards (catch_up.py), so a download
begins anew only when its version is older than what was heard. For peer.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from shoal.core.latency import Latency
from shoal.core.messages import (
    Blend,
    BlobRef,
    CheckChunk,
    Chunk,
    ChunkRequest,
    Command,
    Do,
    Done,
    Drop,
    Export,
    Failed,
    Import,
    Init,
    Manifest,
    Member,
    Note,
    Offer,
    Peer,
    ReadChunk,
    Send,
    Settings,
    StateRequest,
    View,
    Wire,
)

if TYPE_CHECKING:
    from random import Random

    from shoal.core.server.server import Server

DONORS = 3  # replicas that a download is spread over
CHUNKS_AT_ONCE = 2  # asked of one donor and not yet here: one travels while the other is read
READS_AT_ONCE = 8  # for one joiner; whoever asks for more is not answered
RETRY_BEATS = 8  # a silent donor is given up; chunks that usually take longer get four times as long,
DOUBLED = 4  # and twice as long, at most so many times, after every donor that was given up since a chunk came


class Download(msgspec.Struct):
    """One version of a stage's state on its way here. Chunks are `wanted`, `open` (asked for: of whom, when), checking or in
    `have`; the driver keeps them from number `first` on."""

    stage: int
    first: int
    step: int
    manifest: Manifest
    wanted: list[int]
    donors: dict[Peer, None]
    open: dict[int, tuple[Peer, float]] = {}
    given_up: dict[tuple[int, Peer], float] = {}  # when that chunk was asked of that peer, which may still send it
    checking: dict[str, tuple[int, Peer]] = {}
    have: set[int] = set()

    def holds(self, chunk: int) -> bool:
        """It is here, if its hash is right."""
        return chunk in self.have or any(number == chunk for number, _ in self.checking.values())


class Sync:
    """The download of this peer's stage, and the offers it makes."""

    def __init__(self, name: Peer, settings: Settings, rng: Random, server: Server) -> None:
        self.name, self.settings, self.rng, self.server = name, settings, rng, server
        self.view: View | None = None
        self.member = False  # in the newest view
        self.seat: tuple[int, int] | None = None  # (epoch, stage) being prepared
        self.serial = 0
        self.task = ""  # the Init or Import under way
        self.task_step = 0  # the version it makes
        self.void = ""  # one that runs, and whose stage nobody wants any more
        self.next: Init | Import | Blend | None = None  # waits until that has ended
        self.download: Download | None = None
        self.sources: tuple[int, ...] = ()  # stages whose states mine is made from: itself, or its two neighbours
        self.whole: list[int] = []  # chunks of each source that is here
        self.shunned: set[Peer] = set()  # donors that failed me, not asked again while there are others
        self.usual = Latency()  # seconds from asking for a chunk to holding it
        self.misses = 0  # donors given up since the last chunk came
        self.retry_at: float | None = None
        self.export: tuple[int, int, int] | None = None  # (epoch, stage, step) of the copy held for others
        self.offered: Manifest | None = None
        self.exporting = ""
        self.takers: set[Peer] = set()  # joiners that were offered that copy
        self.waiting: dict[Peer, StateRequest] = {}
        self.reading: dict[str, tuple[Peer, ChunkRequest]] = {}

    @property
    def deadline(self) -> float | None:
        return self.retry_at

    @property
    def loaded(self) -> int:
        """Chunks that are here, of a state on its way."""
        return sum(self.whole) + (len(self.download.have) if self.download is not None else 0)

    # ------------------------------------------------------------------------------------------------ own state

    def on_view(self, view: View, now: float) -> list[Command]:
        """Prepare the stage the view gives me, unless it stands."""
        self.view = view
        self.takers &= {
            member.peer for member in view.joining + (view.members if view.rebuilt and not view.started else ())
        }
        me = _me(view, self.name)
        if me is None:
            return self._abandon()
        before, self.member = self.member, any(member.peer == self.name for member in view.members)
        if before and not self.member and self.server.has_state:  # demoted: whatever I hold is not trusted
            return self._abandon() + self.server.drop_state() + self._begin(now)
        return self.review(now)

    def review(self, now: float) -> list[Command]:
        """See whether what I hold or what is on its way is still what the view wants."""
        view, server = self.view, self.server
        me = _me(view, self.name) if view is not None else None
        if view is None or me is None:
            return []
        place = view.epoch, me.stage
        if server.has_state and (server.epoch, server.stage) == place and (self.member or not server.unfit):
            return []  # a member applies what is committed, a joiner hears it; one that is unfit has told the leader
        if self.seat != place:
            back = self.server.take_back(view, me.stage, now)
            return self._begin(now) if back is None else back
        if not self.task and self.sources != _sources(view, me.stage):
            return self._begin(now)
        if self.task and self.task_step < server.since:
            return []  # seen to when it has ended: it cannot be called off
        if self.download is not None and self.download.step < server.since:
            step, self.download = self.download.step, None
            why = f"version {step} is too old, version {server.since} or newer is needed"
            return [Note("state", f"the download begins anew: {why}"), *self._ask(now)]
        return []

    def _begin(self, now: float) -> list[Command]:
        """Build my stage, or ask for it."""
        view = self.view
        assert view is not None
        me = _me(view, self.name)
        assert me is not None
        commands = self._abandon()
        if self.server.has_state:
            commands += self.server.drop_state()
        self.seat, self.sources = (view.epoch, me.stage), _sources(view, me.stage)
        return commands + self._ask(now)

    def _ask(self, now: float) -> list[Command]:
        """Build the state where it is known to all, else ask the stage's replicas for it."""
        view = self.view
        assert view is not None and self.seat is not None
        epoch, stage = self.seat
        self.retry_at = now + RETRY_BEATS * self.settings.beat_s
        if view.step == self.settings.first_step or not (view.started or view.kept):
            return self._build(Init(id=self._id(), stage=stage, step=view.step))
        source = self.sources[len(self.whole)]
        able = [member.peer for member in view.members if member.stage == source and member.peer != self.name]
        able = [peer for peer in able if self.download is None or peer not in self.download.donors]
        if not set(able) - self.shunned:
            self.shunned.clear()
        able = [peer for peer in able if peer not in self.shunned]
        chosen = self.rng.sample(able, min(DONORS, len(able)))  # none: asked again when a view brings one
        since = self.server.since if source == stage else view.step
        return [Send(peer, StateRequest(epoch=epoch, stage=source, since=since)) for peer in chosen]

    def tick(self, now: float) -> list[Command]:
        if self.retry_at is None or now < self.retry_at:
            return []
        self.retry_at = None
        if self.seat is None or self.task:
            return []
        download = self.download
        if download is None or not download.donors:
            return self._ask(now)
        late = {peer for peer, at in download.open.values() if now - at >= self._patience_s}
        commands: list[Command] = []
        for peer in sorted(late):
            self.misses += 1
            commands += self._without(peer, "it does not answer", now)
        if self.retry_at is None:
            self._watch(now)
        return commands

    def _watch(self, now: float) -> None:
        """Look again when the next chunk is late."""
        asked = [at for _, at in self.download.open.values()] if self.download is not None else []
        self.retry_at = min(asked, default=now) + self._patience_s

    @property
    def _patience_s(self) -> float:
        usual_s = max(RETRY_BEATS * self.settings.beat_s, 4 * (self.usual.value or 0.0))
        return float(usual_s * 2 ** min(self.misses, DOUBLED))

    def _on_offer(self, peer: Peer, offer: Offer, now: float) -> list[Command]:
        if self.seat is None or self.task or self.server.has_state or self.view is None:
            return []
        source = self.sources[len(self.whole)]
        if (self.seat[0], source) != (offer.epoch, offer.stage):
            return []
        if not any((member.peer, member.stage) == (peer, source) for member in self.view.members):
            return []  # only a replica of that stage has its state
        since = self.server.since if source == self.seat[1] else self.view.step
        sizes, hashes = offer.manifest.sizes, offer.manifest.hashes
        if not sizes or len(sizes) != len(hashes) or offer.step < since:
            if self.download is None or not self.download.donors:
                self.retry_at = now + self.settings.beat_s
            return []
        held = self.download
        same = held is not None and (held.step, held.manifest) == (offer.step, offer.manifest)
        if held is not None and not same:
            if held.donors:
                return []
            self.download = None  # nobody has that version any more
        if self.download is None:
            self.download = Download(source, sum(self.whole), offer.step, offer.manifest, list(range(len(sizes))), {})
        self.download.donors[peer] = None
        return self._ask_chunks(now)

    def _ask_chunks(self, now: float) -> list[Command]:
        """Keep every donor busy."""
        download = self.download
        assert self.seat is not None and download is not None
        epoch, stage = self.seat[0], download.stage
        commands: list[Command] = []
        for donor in download.donors:
            busy = sum(peer == donor for peer, _ in download.open.values())
            while download.wanted and busy < CHUNKS_AT_ONCE:
                chunk = download.wanted.pop(0)
                download.open[chunk] = donor, now
                busy += 1
                commands.append(Send(donor, ChunkRequest(epoch=epoch, step=download.step, stage=stage, chunk=chunk)))
        self._watch(now)
        return commands

    def _on_chunk(self, peer: Peer, chunk: Chunk, blobs: tuple[BlobRef, ...], fault: str, now: float) -> list[Command]:
        drop: list[Command] = [Drop(tuple(blob.id for blob in blobs))] if blobs else []
        download = self.download
        of = (chunk.epoch, chunk.stage, chunk.step)
        if download is None or self.seat is None or (self.seat[0], download.stage, download.step) != of:
            return drop
        donor, asked = download.open.get(chunk.chunk, ("", 0.0))
        if donor != peer:
            late = download.given_up.pop((chunk.chunk, peer), None)
            if late is None or download.holds(chunk.chunk) or chunk.gone or fault or len(blobs) != 1:
                return drop
            asked = late
        elif chunk.gone or fault or len(blobs) != 1:
            return drop + self._without(peer, fault or "it has moved on", now)
        download.open.pop(chunk.chunk, None)
        download.wanted = [number for number in download.wanted if number != chunk.chunk]
        self.usual.add(now - asked)
        self.misses = 0
        task = self._id()
        download.checking[task] = chunk.chunk, peer
        digest = download.manifest.hashes[chunk.chunk]
        kept_as = download.first + chunk.chunk
        return [Do(CheckChunk(id=task, chunk=kept_as, digest=digest, blob=blobs[0].id)), *drop]

    def _without(self, peer: Peer, why: str, now: float) -> list[Command]:
        """That donor gives no more; the others take over what was asked of it."""
        download = self.download
        assert download is not None
        download.donors.pop(peer, None)
        self.shunned.add(peer)
        lost = [chunk for chunk, (donor, _) in download.open.items() if donor == peer]
        for chunk in lost:
            download.given_up[chunk, peer] = download.open.pop(chunk)[1]
        download.wanted = sorted({*download.wanted, *lost})
        have = f"{len(download.have)} of {len(download.manifest.sizes)} chunks are here"
        commands: list[Command] = [Note("state", f"no more of version {download.step} from {peer}: {why}; {have}")]
        if download.donors:
            return commands + self._ask_chunks(now)
        self.retry_at = now + self.settings.beat_s
        return commands

    def _abandon(self) -> list[Command]:
        if self.task and self.next is None:
            self.void = self.task
        self.seat, self.task, self.next = None, "", None
        self.download, self.retry_at, self.misses = None, None, 0
        self.shunned.clear()
        self.whole.clear()
        return []

    # --------------------------------------------------------------------------------------------------- giving

    def _on_ask_state(self, peer: Peer, ask: StateRequest, now: float) -> list[Command]:
        """Offer the copy at hand if it is new enough; make one if nobody needs that one any more."""
        server, view = self.server, self.view
        if view is None or not self._may_have(peer, ask.stage):
            return []
        if not server.ready or (server.epoch, server.stage) != (ask.epoch, ask.stage):
            return [Send(peer, _nothing(ask))]
        if self.exporting:
            self.waiting[peer] = ask
            return []
        if self._suits(ask):
            self.takers.add(peer)
            return [Send(peer, self._offer(ask.stage))]
        held = self.export is not None and self.export[:2] == (view.epoch, server.stage)
        in_use = self.takers - {peer} if held else set()
        if in_use or server.step < ask.since:
            return [Send(peer, _nothing(ask))]
        self.waiting[peer] = ask
        self.exporting = self._id()
        self.export, self.offered, self.takers = (server.epoch, server.stage, server.step), None, set()
        return [Do(Export(id=self.exporting, step=server.step))]

    def _may_have(self, peer: Peer, stage: int) -> bool:
        """That peer joins the stage, or makes a lost neighbour of it from its state."""
        assert self.view is not None
        if any((member.peer, member.stage) == (peer, stage) for member in self.view.joining):
            return True
        lost = self.view.rebuilt if not self.view.started else ()
        beside = {one.stage for one in lost if abs(one.stage - stage) == 1}
        return any(m.peer == peer and m.stage in beside for m in self.view.members + self.view.joining)

    def _suits(self, ask: StateRequest) -> bool:
        if self.export is None or self.offered is None:
            return False
        epoch, stage, step = self.export
        return (epoch, stage) == (ask.epoch, ask.stage) and step >= ask.since

    def _offer(self, stage: int) -> Offer:
        assert self.export is not None and self.offered is not None
        return Offer(epoch=self.export[0], step=self.export[2], stage=stage, manifest=self.offered)

    def _on_ask_chunk(self, peer: Peer, ask: ChunkRequest) -> list[Command]:
        view, manifest = self.view, self.offered
        asked_for = self.export == (ask.epoch, ask.stage, ask.step) and self.server.stage == ask.stage
        if view is None or not self._may_have(peer, ask.stage):
            return []
        if manifest is None or not asked_for or ask.chunk >= len(manifest.sizes):
            gone = Chunk(epoch=ask.epoch, step=ask.step, stage=ask.stage, chunk=ask.chunk, gone=True)
            return [Send(peer, gone)]
        busy = [one for reader, one in self.reading.values() if reader == peer]
        if ask in busy or len(busy) >= READS_AT_ONCE:
            return []
        task = self._id()
        self.reading[task] = (peer, ask)
        return [Do(ReadChunk(id=task, step=ask.step, chunk=ask.chunk, out=task))]

    # --------------------------------------------------------------------------------------------------- events

    def on_message(
        self, peer: Peer, message: Wire, blobs: tuple[BlobRef, ...], fault: str, now: float
    ) -> list[Command]:
        match message:
            case Offer():
                return self._on_offer(peer, message, now)
            case Chunk():
                return self._on_chunk(peer, message, blobs, fault, now)
            case StateRequest():
                return self._on_ask_state(peer, message, now)
            case ChunkRequest():
                return self._on_ask_chunk(peer, message)
        return []

    def on_done(self, done: Done, now: float) -> list[Command]:
        if done.id == self.task and self.seat is not None:
            return self._seated(done, now)
        if done.id == self.void:
            return self._free()
        if self.download is not None and done.id in self.download.checking:
            return self._checked(self.download, done.id, now)
        if done.id == self.exporting:
            self.exporting, self.offered = "", done.result.manifest
            asks, self.waiting = self.waiting, {}
            suited = {peer: ask for peer, ask in asks.items() if self._suits(ask)}
            self.takers.update(suited)
            return [Send(peer, self._offer(a.stage) if peer in suited else _nothing(a)) for peer, a in asks.items()]
        if done.id in self.reading:
            peer, ask = self.reading.pop(done.id)
            chunk = Chunk(epoch=ask.epoch, step=ask.step, stage=ask.stage, chunk=ask.chunk)
            return [Send(peer, chunk, (done.id,)), Drop((done.id,))]
        return []

    def on_failed(self, failed: Failed, now: float) -> list[Command]:
        if failed.id == self.void:
            return self._free()
        if failed.id == self.task:
            self.task, self.download = "", None
            self.whole.clear()
            self.retry_at = now + RETRY_BEATS * self.settings.beat_s
            return [Note("state", f"the stage's state could not be built: {failed.reason}")]
        if self.download is not None and failed.id in self.download.checking:
            chunk, peer = self.download.checking.pop(failed.id)
            self.download.wanted.append(chunk)
            return self._without(peer, failed.reason, now)
        if failed.id == self.exporting:
            self.exporting, self.export = "", None
            asks, self.waiting = self.waiting, {}
            return [Send(peer, _nothing(ask)) for peer, ask in asks.items()]
        if failed.id in self.reading:
            peer, ask = self.reading.pop(failed.id)
            gone = Chunk(epoch=ask.epoch, step=ask.step, stage=ask.stage, chunk=ask.chunk, gone=True)
            return [Send(peer, gone)]
        return []

    def _checked(self, download: Download, task: str, now: float) -> list[Command]:
        assert self.seat is not None
        chunk, _ = download.checking.pop(task)
        download.have.add(chunk)
        chunks = len(download.manifest.sizes)
        if len(download.have) < chunks:
            return self._ask_chunks(now) if download.donors else []
        self.download = None
        self.whole.append(chunks)
        if len(self.whole) < len(self.sources):
            self.shunned.clear()
            return self._ask(now)
        stage = self.seat[1]
        if len(self.sources) == 1:
            return self._build(Import(id=self._id(), stage=stage, step=download.step, chunks=chunks))
        below = next(one.below for one in self.view.rebuilt if one.stage == stage) if self.view is not None else 0.5
        both = self.whole[0], self.whole[1]
        return self._build(Blend(id=self._id(), stage=stage, step=download.step, chunks=both, below=below))

    def _build(self, task: Init | Import | Blend) -> list[Command]:
        """At once, or when what cannot be called off has ended: of all that was wanted meanwhile only the newest is built."""
        self.task, self.task_step, self.retry_at = task.id, task.step, None
        if self.void:
            self.next = task
            return []
        return self._take(task)

    def _free(self) -> list[Command]:
        """The build that nobody wants any more has ended."""
        self.void, task, self.next = "", self.next, None
        return self._take(task) if task is not None else []

    def _take(self, task: Init | Import | Blend) -> list[Command]:
        """With the seat that was mine goes the copy of its state."""
        self.export, self.offered, self.takers = None, None, set()
        return [Do(task)]

    def _seated(self, done: Done, now: float) -> list[Command]:
        assert self.seat is not None
        (epoch, stage), step = self.seat, self.task_step
        self.task = ""
        self._abandon()
        commands: list[Command] = [Note("state", f"holds stage {stage} at step {step}")]
        commands += self.server.load_state(stage, step, epoch, done.result.length, done.result.digest, now)
        return commands + self.review(now)

    def _id(self) -> str:
        self.serial += 1
        return f"y/{self.serial}"


def _sources(view: View, stage: int) -> tuple[int, ...]:
    """Of which stages' states that stage's is made: of its own, or before the first step without it of its two neighbours'."""
    made = not view.started and any(one.stage == stage for one in view.rebuilt)
    return (stage - 1, stage + 1) if made else (stage,)


def _me(view: View, name: Peer) -> Member | None:
    return next((member for member in view.members + view.joining if member.peer == name), None)


def _nothing(ask: StateRequest) -> Offer:
    return Offer(epoch=ask.epoch, step=0, stage=ask.stage, manifest=Manifest(hashes=(), sizes=()))

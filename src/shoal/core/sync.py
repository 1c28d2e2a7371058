"""How a peer comes to hold its stage's state, and how it gives it to others.

Before the first step the state is built from the seed or from the checkpoint the run resumes (Init). Later it is
downloaded from the stage's replicas: one of them offers a manifest (hashes and sizes of chunks of the step now
trained), the chunks come from it one after another, each is compared with its hash, and only a whole, verified state
is taken (Import). When the step is committed meanwhile the download starts again at the new version; the leader holds
a finished step for a while so that this ends. For peer.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.core.messages import (
    AskChunk,
    AskState,
    BlobRef,
    CheckChunk,
    Chunk,
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
    View,
    Wire,
)

if TYPE_CHECKING:
    from random import Random

    from shoal.core.server import Server

CHUNKS_AT_ONCE = 2  # asked for and not yet here: one travels while the other is checked
RETRY_BEATS = 8  # a silent donor is asked again, then another one


class Sync:
    """The download of this peer's stage, and the offers it makes."""

    def __init__(self, name: Peer, settings: Settings, rng: Random, server: Server) -> None:
        self.name, self.settings, self.rng, self.server = name, settings, rng, server
        self.view: View | None = None
        self.member = False  # in the newest view
        self.seat: tuple[int, int, int] | None = None  # (epoch, stage, step) being prepared
        self.serial = 0
        self.task = ""  # the Init or Import under way
        self.donor: Peer | None = None
        self.manifest: Manifest | None = None
        self.wanted: list[int] = []  # chunks not asked for yet
        self.open: dict[int, float] = {}  # chunk -> when it was asked for
        self.checking: dict[str, int] = {}  # task -> chunk
        self.have = 0
        self.retry_at: float | None = None
        self.export: tuple[int, int] | None = None  # (epoch, step) of the copy held for others
        self.offered: Manifest | None = None
        self.exporting = ""
        self.waiting: dict[Peer, AskState] = {}
        self.reading: dict[str, tuple[Peer, AskChunk]] = {}

    @property
    def deadline(self) -> float | None:
        return self.retry_at

    # ------------------------------------------------------------------------------------------------ own state

    def on_view(self, view: View, now: float) -> list[Command]:
        """Prepare the stage the view gives me, unless it stands."""
        self.view = view
        me = _me(view, self.name)
        if me is None:
            return self._abandon()
        server, before = self.server, self.member
        self.member = me in view.members
        if before and not self.member and server.seated:  # demoted: whatever I hold is not trusted
            return self._abandon() + server.unseat() + self.on_view(view, now)
        stands = server.ready and (server.epoch, server.stage) == (view.epoch, me.stage)
        if stands and (server.step == view.step or me in view.members):
            return []  # a member one version behind applies the committed step itself
        if me in view.members and (server.epoch, server.stage) == (view.epoch, me.stage) and server.seated:
            return []  # busy applying
        if self.seat == (view.epoch, me.stage, view.step):
            return []
        commands = self._abandon()
        if server.seated:
            commands += server.unseat()
        self.seat = (view.epoch, me.stage, view.step)
        if not view.started or view.step == self.settings.first_step:
            self.task = self._id()
            return [*commands, Do(Init(id=self.task, stage=me.stage, step=view.step))]
        return commands + self._ask_donor(now)

    def tick(self, now: float) -> list[Command]:
        if self.retry_at is None or now < self.retry_at:
            return []
        self.retry_at = None
        if self.seat is None or self.task:
            return []
        if self.manifest is None:
            return self._ask_donor(now)
        patience = RETRY_BEATS * self.settings.beat_s
        late = [chunk for chunk, at in self.open.items() if now - at >= patience]
        if late and not self.checking:
            return self._restart(now, "the donor does not answer")
        self.retry_at = now + patience
        return []

    def _ask_donor(self, now: float) -> list[Command]:
        assert self.view is not None and self.seat is not None
        epoch, stage, _ = self.seat
        self.retry_at = now + RETRY_BEATS * self.settings.beat_s
        donors = [m.peer for m in self.view.members if m.stage == stage and m.peer not in (self.name, self.donor)]
        donors = donors or [m.peer for m in self.view.members if m.stage == stage and m.peer != self.name]
        if not donors:
            return []  # the stage has no replica; asked again when a view brings one
        self.donor = donors[int(self.rng.random() * len(donors))]
        return [Send(self.donor, AskState(epoch=epoch, stage=stage))]

    def _on_offer(self, peer: Peer, offer: Offer, now: float) -> list[Command]:
        if self.seat != (offer.epoch, offer.stage, offer.step) or peer != self.donor or self.manifest or self.task:
            return []
        sizes, hashes = offer.manifest.sizes, offer.manifest.hashes
        if not sizes or len(sizes) != len(hashes):
            self.retry_at = now + self.settings.beat_s
            return []
        self.manifest = offer.manifest
        self.wanted = list(range(len(sizes)))
        self.have = 0
        return self._ask_chunks(now)

    def _ask_chunks(self, now: float) -> list[Command]:
        assert self.seat is not None and self.donor is not None
        epoch, stage, step = self.seat
        commands: list[Command] = []
        while self.wanted and len(self.open) < CHUNKS_AT_ONCE:
            chunk = self.wanted.pop(0)
            self.open[chunk] = now
            commands.append(Send(self.donor, AskChunk(epoch=epoch, step=step, stage=stage, chunk=chunk)))
        self.retry_at = now + RETRY_BEATS * self.settings.beat_s
        return commands

    def _on_chunk(self, peer: Peer, chunk: Chunk, blobs: tuple[BlobRef, ...], fault: str, now: float) -> list[Command]:
        drop: list[Command] = [Drop(tuple(blob.id for blob in blobs))] if blobs else []
        expected = self.seat == (chunk.epoch, chunk.stage, chunk.step) and peer == self.donor
        if not expected or chunk.chunk not in self.open or self.manifest is None:
            return drop
        if chunk.gone or fault or len(blobs) != 1:
            return drop + self._restart(now, fault or "the donor has moved on")
        task = self._id()
        self.checking[task] = chunk.chunk
        self.open[chunk.chunk] = float("inf")  # here; not late any more
        digest = self.manifest.hashes[chunk.chunk]
        return [Do(CheckChunk(id=task, chunk=chunk.chunk, digest=digest, blob=blobs[0].id)), *drop]

    def _restart(self, now: float, why: str) -> list[Command]:
        """Begin the download again, preferably elsewhere."""
        self.manifest, self.wanted, self.have = None, [], 0
        self.open.clear()
        self.checking.clear()
        self.retry_at = now + self.settings.beat_s
        return [Note("state", f"download from {self.donor} starts again: {why}")]

    def _abandon(self) -> list[Command]:
        self.seat, self.task, self.donor, self.manifest, self.retry_at = None, "", None, None, None
        self.wanted, self.have = [], 0
        self.open.clear()
        self.checking.clear()
        return []

    # --------------------------------------------------------------------------------------------------- giving

    def _on_ask_state(self, peer: Peer, ask: AskState, now: float) -> list[Command]:
        server, view = self.server, self.view
        if view is None or not any((m.peer, m.stage) == (peer, ask.stage) for m in view.joining):
            return []
        if not server.ready or (server.epoch, server.stage) != (ask.epoch, ask.stage) or server.step != view.step:
            return [Send(peer, _nothing(ask))]
        if self.export == (server.epoch, server.step) and self.offered is not None:
            return [Send(peer, self._offer(ask.stage))]
        self.waiting[peer] = ask
        if self.exporting:
            return []
        self.exporting = self._id()
        self.export, self.offered = (server.epoch, server.step), None
        return [Do(Export(id=self.exporting, step=server.step))]

    def _offer(self, stage: int) -> Offer:
        assert self.export is not None and self.offered is not None
        return Offer(epoch=self.export[0], step=self.export[1], stage=stage, manifest=self.offered)

    def _on_ask_chunk(self, peer: Peer, ask: AskChunk) -> list[Command]:
        view, manifest = self.view, self.offered
        asked_for = self.export == (ask.epoch, ask.step) and self.server.stage == ask.stage
        if view is None or not any(m.peer == peer for m in view.joining):
            return []
        if manifest is None or not asked_for or ask.chunk >= len(manifest.sizes):
            gone = Chunk(epoch=ask.epoch, step=ask.step, stage=ask.stage, chunk=ask.chunk, gone=True)
            return [Send(peer, gone)]
        if (peer, ask) in self.reading.values():
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
            case AskState():
                return self._on_ask_state(peer, message, now)
            case AskChunk():
                return self._on_ask_chunk(peer, message)
        return []

    def on_done(self, done: Done, now: float) -> list[Command]:
        if done.id == self.task and self.seat is not None:
            return self._seated(done, now)
        if done.id in self.checking:
            return self._checked(done.id, now)
        if done.id == self.exporting:
            self.exporting, self.offered = "", done.result.manifest
            asks, self.waiting = self.waiting, {}
            return [Send(peer, self._offer(ask.stage)) for peer, ask in asks.items()]
        if done.id in self.reading:
            peer, ask = self.reading.pop(done.id)
            chunk = Chunk(epoch=ask.epoch, step=ask.step, stage=ask.stage, chunk=ask.chunk)
            return [Send(peer, chunk, (done.id,)), Drop((done.id,))]
        return []

    def on_failed(self, failed: Failed, now: float) -> list[Command]:
        if failed.id == self.task:
            self.task, self.manifest = "", None
            self.retry_at = now + RETRY_BEATS * self.settings.beat_s
            return [Note("state", f"the stage's state could not be built: {failed.reason}")]
        if failed.id in self.checking:
            return self._restart(now, failed.reason)
        if failed.id == self.exporting:
            self.exporting, self.export = "", None
            asks, self.waiting = self.waiting, {}
            return [Send(peer, _nothing(ask)) for peer, ask in asks.items()]
        if failed.id in self.reading:
            peer, ask = self.reading.pop(failed.id)
            gone = Chunk(epoch=ask.epoch, step=ask.step, stage=ask.stage, chunk=ask.chunk, gone=True)
            return [Send(peer, gone)]
        return []

    def _checked(self, task: str, now: float) -> list[Command]:
        assert self.manifest is not None and self.seat is not None
        self.open.pop(self.checking.pop(task), None)
        self.have += 1
        if self.have < len(self.manifest.sizes):
            return self._ask_chunks(now)
        self.task, self.retry_at = self._id(), None
        _, stage, step = self.seat
        return [Do(Import(id=self.task, stage=stage, step=step, chunks=self.have))]

    def _seated(self, done: Done, now: float) -> list[Command]:
        assert self.seat is not None
        epoch, stage, step = self.seat
        self._abandon()
        commands: list[Command] = [Note("state", f"holds stage {stage} at step {step}")]
        return commands + self.server.seat(stage, step, epoch, done.result.length, done.result.digest, now)

    def _id(self) -> str:
        self.serial += 1
        return f"y/{self.serial}"


def _me(view: View, name: Peer) -> Member | None:
    return next((member for member in view.members + view.joining if member.peer == name), None)


def _nothing(ask: AskState) -> Offer:
    return Offer(epoch=ask.epoch, step=0, stage=ask.stage, manifest=Manifest(hashes=(), sizes=()))

"""Serving a stage's state: a replica gives a copy of its state to the joiners of its stage, chunk by chunk.

A copy is one version, exported as a whole and offered with its manifest (hashes and sizes of its chunks). It is kept while a peer that
it was offered to may still read it, so that all donors and joiners agree on one version; a newer copy is exported when no peer needs
the older one any more. Only joiners of the stage, and members that rebuild a lost neighbouring stage from this one, receive anything,
and the reads of each are bounded. For transfer.py; the receiving side is download.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.core.messages import (
    Chunk,
    ChunkRequest,
    Command,
    Do,
    Done,
    Drop,
    Export,
    Failed,
    Manifest,
    Offer,
    Peer,
    ReadChunk,
    Send,
    StateRequest,
    View,
    WithdrawState,
)
from shoal.core.server.server import Server
from shoal.core.transfer.given import Given

# So many replicas of my stage, whose lines are so many times as wide as mine, are enough for a joiner. One that has asked ASKS times, a
# beat or more apart, gets nothing from those
WIDE, TIMES_AS_WIDE, ASKS = 2, 2, 8
READS_AT_ONCE = 8  # for one joiner; requests beyond that are not answered


class Donor:
    """The copy of this peer's state, and who reads it."""

    def __init__(self, name: Peer, server: Server, serial: Iterator[int]) -> None:
        self._name, self._server, self._serial = name, server, serial
        self._view: View | None = None
        self._copy: tuple[int, int, int] | None = None  # (epoch, stage, step)
        self._manifest: Manifest | None = None  # of the copy, once it is exported
        self._exporting = ""  # task that makes the copy
        self._takers: set[Peer] = set()  # joiners that the copy was offered to
        self._waiting: dict[Peer, StateRequest] = {}  # for the export to end
        self._sent_on: dict[Peer, int] = {}  # how often joiners were told to ask others, whose lines are wider
        self._reading: dict[str, tuple[Peer, ChunkRequest]] = {}  # by task
        self.given = Given()

    def on_view(self, view: View) -> list[Command]:
        self._view = view
        rebuilding = view.members if view.rebuilt and not view.started else ()
        joining = {member.peer for member in view.joining}
        self._sent_on = {peer: asks for peer, asks in self._sent_on.items() if peer in joining}
        over = self._takers - {member.peer for member in view.joining + rebuilding}
        return [command for peer in sorted(over) for command in self._over(peer)]

    def forget(self) -> None:
        """The state held here is replaced, and its copy with it."""
        self._copy, self._manifest, self._takers, self.given = None, None, set(), Given()

    def on_state_request(self, peer: Peer, request: StateRequest) -> list[Command]:
        """Offer the copy if it is new enough; export a new one if no peer needs the old one any more."""
        server, view = self._server, self._view
        if view is None or not self._may_receive(peer, request.stage, view):
            return []
        if not server.ready or (server.epoch, server.stage) != (request.epoch, request.stage):
            return [Send(peer, _nothing(request))]
        if self._is_narrow(view) and (asks := self._sent_on.get(peer, 0)) < ASKS:
            self._sent_on[peer] = asks + 1
            return [*self._over(peer), Send(peer, _nothing(request))]
        if self._exporting:
            self._waiting[peer] = request
            return []
        if self._suits(request):
            self._takers.add(peer)
            return [Send(peer, self._offer(request.stage))]
        held = self._copy is not None and self._copy[:2] == (view.epoch, server.stage)
        # The copy is too old for it: two such joiners would wait for one another
        commands = self._over(peer)
        in_use = self._takers if held else set()
        if in_use or server.step < request.since:
            return [*commands, Send(peer, _nothing(request))]
        self._waiting[peer] = request
        self.forget()
        self._copy, self._exporting = (server.epoch, server.stage, server.step), self._id()
        return [*commands, Do(Export(id=self._exporting, step=server.step))]

    def on_chunk_request(self, peer: Peer, request: ChunkRequest) -> list[Command]:
        view, manifest = self._view, self._manifest
        held = self._copy == (request.epoch, request.stage, request.step) and self._server.stage == request.stage
        if view is None or not self._may_receive(peer, request.stage, view):
            return []
        if manifest is None or not held or request.chunk >= len(manifest.sizes):
            return [Send(peer, _chunk(request, gone=True))]
        running = [one.chunk for reader, one in self._reading.values() if reader == peer]
        if request.chunk in running or len(running) >= READS_AT_ONCE or self.given.comes(peer, request):
            return []
        task = self._id()
        self._reading[task] = (peer, request)
        read = Do(ReadChunk(id=task, step=request.step, chunk=request.chunk, out=task))
        if not (request.again and self.given.was_sent(peer, request)):
            return [read]
        return [*self._withdraw(peer), read]  # of what still waits for my line, no second copy goes

    def on_done(self, done: Done) -> list[Command]:
        if done.id == self._exporting:
            self._exporting, self._manifest = "", done.result.manifest
            requests, self._waiting = self._waiting, {}
            suited = {peer for peer, request in requests.items() if self._suits(request)}
            self._takers |= suited
            return [
                Send(peer, self._offer(request.stage) if peer in suited else _nothing(request))
                for peer, request in requests.items()
            ]
        if done.id in self._reading:
            peer, request = self._reading.pop(done.id)
            if self._view is None or not self._may_receive(peer, request.stage, self._view):
                return [Drop((done.id,))]
            self.given.send(peer, request)
            return [Send(peer, _chunk(request, urgent=self._server.hurries(peer)), (done.id,)), Drop((done.id,))]
        return []

    def on_failed(self, failed: Failed) -> list[Command]:
        if failed.id == self._exporting:
            self._exporting, self._copy = "", None
            requests, self._waiting = self._waiting, {}
            return [Send(peer, _nothing(request)) for peer, request in requests.items()]
        if failed.id in self._reading:
            peer, request = self._reading.pop(failed.id)
            return [Send(peer, _chunk(request, gone=True))]
        return []

    def _over(self, peer: Peer) -> list[Command]:
        """It reads the copy no more, if it did. What still waits for a narrow line would take its turns from rounds for minutes."""
        if peer not in self._takers:
            return []
        self._takers.discard(peer)
        return self._withdraw(peer)

    def _withdraw(self, peer: Peer) -> list[Command]:
        self.given.on_unreachable(peer)
        return [WithdrawState(peer)]

    def _may_receive(self, peer: Peer, stage: int, view: View) -> bool:
        """`peer` joins the stage, or rebuilds a lost neighbour of it from its state."""
        if any((member.peer, member.stage) == (peer, stage) for member in view.joining):
            return True
        lost = view.rebuilt if not view.started else ()
        beside = {one.stage for one in lost if abs(one.stage - stage) == 1}
        return any(m.peer == peer and m.stage in beside for m in view.members + view.joining)

    def _is_narrow(self, view: View) -> bool:
        """Others of my stage have so much wider lines that my chunks would come last, and the stage's rounds would wait for my line."""
        rates = self._server.line_rates
        own = rates.get(self._name, 0)
        stage = [one.peer for one in view.members if one.stage == self._server.stage]
        return own > 0 and sum(rates.get(peer, 0) >= TIMES_AS_WIDE * own for peer in stage) >= WIDE

    def _suits(self, request: StateRequest) -> bool:
        if self._copy is None or self._manifest is None:
            return False
        epoch, stage, step = self._copy
        return (epoch, stage) == (request.epoch, request.stage) and step >= request.since

    def _offer(self, stage: int) -> Offer:
        assert self._copy is not None and self._manifest is not None
        return Offer(epoch=self._copy[0], step=self._copy[2], stage=stage, manifest=self._manifest)

    def _id(self) -> str:
        return f"y/{next(self._serial)}"


def _nothing(request: StateRequest) -> Offer:
    return Offer(epoch=request.epoch, step=0, stage=request.stage, manifest=Manifest(hashes=(), sizes=()))


def _chunk(request: ChunkRequest, *, gone: bool = False, urgent: bool = False) -> Chunk:
    return Chunk(request.epoch, request.step, request.stage, request.chunk, gone=gone, urgent=urgent)

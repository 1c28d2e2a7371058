"""One peer's whole mind: the machines put together. `handle(event, now)` returns what is to be done; nothing else
changes state.

Every peer serves a stage (server.py), owns microbatches (trainer.py), helps to agree on the view (register.py), keeps
its stage's state in step with the others (transfer.py) and, while it leads, decides for all (leader.py). The driver
(runtime/node.py, sim/, a replay) hands in events and carries out commands; it calls again at `deadline`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.core.consensus.register import Register
from shoal.core.leader.leader import Leader
from shoal.core.messages import (
    Accept,
    Asked,
    Asker,
    Backward,
    Barred,
    BlobRef,
    Booker,
    BooksRequest,
    Boundary,
    Cancel,
    Chunk,
    ChunkRequest,
    Coming,
    Command,
    Complaint,
    Dismissed,
    Done,
    Drop,
    Entry,
    Event,
    Failed,
    Find,
    Finish,
    Forward,
    Found,
    GatherChunk,
    Gone,
    Join,
    Lead,
    Leave,
    Member,
    Note,
    Offer,
    Override,
    Peer,
    Propose,
    Published,
    PublishRequest,
    Pull,
    Pulse,
    Query,
    Recall,
    Received,
    Redirect,
    ReduceChunk,
    Reduced,
    Resend,
    Round,
    RoundFailed,
    Saved,
    SaveRequest,
    Send,
    Settings,
    Standing,
    StandingRequest,
    StateRequest,
    Unreachable,
    View,
    Vote,
    VoteRequest,
    Waits,
    WhoBooked,
    Wire,
    asker_of,
)
from shoal.core.planned import planned_stage
from shoal.core.server.server import Server
from shoal.core.timers import soonest
from shoal.core.trainer.trainer import Trainer
from shoal.core.transfer.transfer import Sync

if TYPE_CHECKING:
    from random import Random

SERVER = (
    Forward,
    Backward,
    Query,
    Recall,
    Cancel,
    BooksRequest,
    Boundary,
    Pull,
    Coming,
    Gone,
    ReduceChunk,
    GatherChunk,
    Resend,
)
FROM_LEADER = (Round, SaveRequest, PublishRequest)
TO_LEADER = (Pulse, Join, Leave, Complaint, Reduced, RoundFailed, Waits, Booker, Saved, Published)
AGREEING = (Lead, Propose, Accept, VoteRequest, Vote)
SYNC = (StateRequest, Offer, ChunkRequest, Chunk)
FIND_BEATS = 4  # between look-ups of the directory while no view names me
SAY_AGAIN_BEATS = 60  # between two times that it is said why nothing is committed
TOLD_A_BEAT = 8  # peers of no view that are given the newest one
PASS_ON_SILENCES = 4  # between two times that an override is told to whoever is in no view of mine


class PeerMachine:
    """`found` is true of the one peer that begins the run."""

    def __init__(self, name: Peer, settings: Settings, rng: Random, found: bool) -> None:
        self.name, self.settings, self.rng, self.founding = name, settings, rng, found
        self.register = Register(name, settings, rng)
        self.server = Server(name, settings)
        self.trainer = Trainer(name, settings, rng)
        self.sync = Sync(name, settings, rng, self.server)
        self.leadership = Leader(name, settings)
        self.view: View | None = None  # newest agreed
        self.present: set[Peer] = set()  # its members and joiners
        self.last_now: float | None = None
        self.pulse_at: float | None = None
        self.find_at: float | None = None  # when to look for the run again
        self.outside = not found  # in no view, as far as I know
        self.known: tuple[Peer, ...] = ()  # peers to ask for admission
        self.led = 0  # the term that `leadership` has begun
        self.leaving = ""
        self.told = 0  # strangers in this beat that were given the newest view
        self.told_until = float("-inf")
        self.finished = False
        self.dismissing = False
        self.linger_at: float | None = None  # when a finished peer stops waiting for its dismissal
        self.heard: dict[Peer, float] = {}  # when each of the view last spoke to me
        self.override: Override | None = None  # the last that took effect here
        self.pass_on_at: float | None = None  # when to look for peers that have not heard of it
        self.alone = False  # told of being without a leader
        self.led_at = float("-inf")  # when I led last
        self.stalled_at: float | None = None  # when it was last said why nothing is committed
        self.barred: tuple[Peer, ...] = ()  # revoked by the run's authority

    # ------------------------------------------------------------------------------------------------- questions

    @property
    def leading(self) -> bool:
        return self.register.leading

    @property
    def leader(self) -> Peer | None:
        return self.register.leader

    @property
    def deadline(self) -> float | None:
        return soonest(
            self.register.deadline,
            self.server.deadline,
            self.trainer.deadline,
            self.sync.deadline,
            self.pulse_at,
            self.find_at,
            self.linger_at,
            self.pass_on_at,
        )

    # --------------------------------------------------------------------------------------------------- driving

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take in one event; the commands are to be carried out in order."""
        if self.finished:
            return []
        commands = self._begin(now)
        self.trainer.leader = self.server.leader = self.register.leader
        commands += self._dispatch(event, now)
        commands += self._tick(now)
        return self._settle(commands, now)

    def _begin(self, now: float) -> list[Command]:
        """First call: found the run or look for it. Later: a gap means that this process stood still."""
        last, self.last_now = self.last_now, now
        if last is None:
            self.find_at = None if self.founding else now
            self.register.await_leader(now)
            if not self.founding:
                return []
            first = self.settings.first_step
            stage, _ = planned_stage(self.settings, self.settings.seat, set()) or (0, "")
            me = Member(peer=self.name, stage=stage, seat=self.settings.seat)
            view = View(number=1, step=first, members=(me,), saved=first)
            return self.register.found(view, now)
        gap = now - last
        if gap > 3 * self.settings.beat_s:
            self.register.forgive(gap, now)
            self.trainer.forgive(gap)
            if self.led:
                self.leadership.forgive(gap, now)
        return []

    def _dispatch(self, event: Event, now: float) -> list[Command]:
        match event:
            case Received():
                return self._received(event, now)
            case Done():
                return self._owner(event.id).on_done(event, now)
            case Failed(lost=True):  # all that I hold of the step is void, as if I had been killed: the others redo it
                return self._finish(False, f"the device is lost: {event.reason}")
            case Failed():
                return self._owner(event.id).on_failed(event, now)
            case Unreachable():
                if self.led:
                    self.leadership.doubt(event.peer, now)
                self.server.on_unreachable(event.peer)
                return self.trainer.on_unreachable(event.peer, now)
            case Found():
                self.known = tuple(peer for peer in event.peers if peer != self.name)
                return self._ask_in(now) + self._pass_on(event.peers)
            case Barred():
                self.barred = event.peers
            case Asked():
                self.leaving = event.reason or "asked to"
        return []

    def _received(self, event: Received, now: float) -> list[Command]:
        peer, message = event.peer, event.message
        self.register.show_life(peer, now)
        if peer in self.present:
            self.heard[peer] = now
        if isinstance(message, AGREEING):
            return self._agreeing(peer, message, now)
        if isinstance(message, SYNC):
            return self.sync.on_message(peer, message, event.blobs, event.fault, now)
        if isinstance(message, TO_LEADER):
            return self._to_leader(peer, message, now)
        if isinstance(message, Dismissed):
            return self._on_dismissed(peer)
        if isinstance(message, StandingRequest):
            return self._stand(peer, now)
        if isinstance(message, Override):
            return self._on_override(message, now)
        if isinstance(message, Redirect):
            asking = self.find_at is not None and message.leader != self.name and peer in self.known
            return [Send(message.leader, self._join)] if asking else []
        drop = _drop(event.blobs)
        if isinstance(message, WhoBooked):
            return self.trainer.on_who_booked(peer, message) if peer == self.register.leader else []
        if isinstance(message, FROM_LEADER):
            if peer != self.register.leader:
                return drop
            return self.server.on_message(peer, message, event.blobs, event.fault, now)
        if not self._belongs(peer):
            return drop
        if isinstance(message, SERVER):
            return self.server.on_message(peer, message, event.blobs, event.fault, now)
        return self.trainer.on_message(peer, message, event.blobs, event.fault, now)

    def _agreeing(self, peer: Peer, message: Wire, now: float) -> list[Command]:
        """Only voters have a say. Anybody may bring the proof of a newer view; whoever asks and is none is given the one I hold."""
        register, view = self.register, self.view
        number = 0 if register.agreed is None else register.agreed.number
        proven = isinstance(message, Propose) and message.proof is not None
        commands: list[Command] = []
        if isinstance(message, Lead) and message.number > number:
            commands.append(Send(peer, self._state()))  # whoever leads repairs those who tell that they are behind
        if proven or register.agreed is None or register.entitled(peer):
            commands = register.on_message(peer, message, now) + commands
            if isinstance(message, Lead) and register.leader == peer and register.term == message.term:
                commands += self._tell_stall(message.stalled, now)
            return commands
        if isinstance(message, VoteRequest) and view is not None and not self._belongs(peer):
            return self._bring_up_to_date(peer, message.last_number, now)
        return commands

    def _bring_up_to_date(self, peer: Peer, number: int, now: float) -> list[Command]:
        """A peer in no view of mine does not know it, or has missed what came after: a few in a beat, since views are large."""
        if now >= self.told_until:
            self.told_until, self.told = now + self.settings.beat_s, 0
        self.told += 1
        return self._newest(peer, number) if self.told <= TOLD_A_BEAT else []

    def _newest(self, peer: Peer, number: int) -> list[Command]:
        """The newest view I hold, for a peer with view `number`, with what proves it: signatures, or the operator's."""
        newest = self.register.views.certified(number)
        if newest:
            return [Send(peer, one) for one in newest]
        return [Send(peer, self.override)] if self.override is not None else []

    def _to_leader(self, peer: Peer, message: Wire, now: float) -> list[Command]:
        if self.register.leading:
            commands = self.leadership.on_message(peer, message, now) if self.led == self.register.term else []
            if isinstance(message, Pulse) and self._belongs(peer):
                repaired = self.register.repair(peer, message.term, message.number)
                behind = self.view is not None and message.number < self.view.number
                commands += repaired or (self._newest(peer, message.number) if behind else [])
            elif isinstance(message, Pulse) and not self.leadership.asks_to_join(peer):
                commands += self._bring_up_to_date(peer, message.number, now)
            return commands
        leader = self.register.leader
        if isinstance(message, Join) and leader is not None and leader != peer:
            return [Send(peer, Redirect(leader=leader))]
        return []

    def _on_dismissed(self, peer: Peer) -> list[Command]:
        """The run is over, as the view that I hold says, and everybody knows."""
        if self.view is not None and self.view.finished and self._belongs(peer):
            return self._finish(True, "the run is finished")
        return []

    def _stand(self, peer: Peer, now: float) -> list[Command]:
        """Tell the operator. Whoever was heard within twice the silence may be alive."""
        if self.view is None:
            return []
        heard = tuple(other for other, at in self.heard.items() if now - at <= 2 * self.settings.silence_s)
        return [Send(peer, Standing(term=self.register.term, view=self.view, heard=heard))]

    def _on_override(self, override: Override, now: float) -> list[Command]:
        """The operator's signature stands for the majority's. Those whom it names then elect a leader as ever. What I hold of an older
        epoch is void, whichever side I was on."""
        view, mine = override.view, self.view
        if mine is None or self.finished or view.epoch <= mine.epoch or view.number <= mine.number or not view.members:
            return []
        self.override = override
        self.pass_on_at = now
        self.register.impose(Entry(term=override.term, view=view, before=()), now)
        others = [member.peer for member in view.members if member.peer != self.name]
        return [Note("override", view.reason), *(Send(peer, override) for peer in others)]

    def _pass_on(self, found: tuple[Peer, ...]) -> list[Command]:
        """Whoever is in no view of mine may have been given up and live."""
        if self.override is None or self.outside:
            return []
        return [Send(peer, self.override) for peer in found if peer != self.name and peer not in self.present]

    def _owner(self, task: str) -> Server | Trainer | Sync:
        parts: dict[Asker, Server | Trainer | Sync] = {
            "trainer": self.trainer,
            "server": self.server,
            "transfer": self.sync,
        }
        return parts[asker_of(task)]

    # -------------------------------------------------------------------------------------------------- settling

    def _tick(self, now: float) -> list[Command]:
        commands = self.register.tick(now) if _due(self.register.deadline, now) else []
        for machine in (self.server, self.trainer, self.sync):
            if _due(machine.deadline, now):
                commands += machine.tick(now)
        if self.find_at is None and self._lost(now):
            self.find_at = now
        if _due(self.find_at, now):
            self.find_at = now + FIND_BEATS * self.settings.beat_s
            commands += [Find(), *self._ask_in(now)]
        if _due(self.pass_on_at, now):
            self.pass_on_at = now + PASS_ON_SILENCES * self.settings.silence_s
            commands.append(Find())
        if _due(self.linger_at, now):
            commands += self._finish(True, "the run is finished")
        return commands

    def _settle(self, commands: list[Command], now: float) -> list[Command]:
        """Let what was agreed take effect, decide, and tell the leader how I am."""
        while True:
            for view in self.register.take():
                commands += self._adopt(view, now)
            if not self.register.leading or self.finished:
                self.led = 0
                break
            self.led_at = now
            commands += self._lead(now)
            if not self.register.views.fresh:
                break
        if self.server.unfit:
            commands += self.sync.review(now)
        if self.server.stale:
            commands += self._tell(Complaint(about=self.name, reason=self.server.stale, kind="stale"), now)
            if self.register.leader is not None:
                self.server.stale = ""
        if self.server.changed or _due(self.pulse_at, now):
            commands += self._pulse(now)
        return commands

    def _lead(self, now: float) -> list[Command]:
        commands: list[Command] = []
        view = self.register.agreed
        assert view is not None
        if self.led != self.register.term:
            self.led = self.register.term
            commands += self.leadership.lead(view, self.register.term, now)
            commands += self._pulse(now)
        self.leadership.bar(self.barred)
        commands += self.leadership.decide(self.register, now)
        self.register.replication.stalled = self.leadership.stall
        commands += self._tell_stall(self.leadership.stall, now)
        if self.leadership.resigns:
            commands.append(Note("leader", f"{self.name} leads no more: it {self.leadership.resigns}"))
            self.register.resign(now)
            return commands
        if self.leadership.dismissed and not self.dismissing:
            self.dismissing = True  # what says so is on its way: a process that ended now would take it along
            self.linger_at = now + 2 * self.settings.beat_s
        return commands

    def _adopt(self, view: View, now: float) -> list[Command]:
        """An agreed view takes effect on every part of this peer."""
        before, self.view = self.view, view
        self.present = {member.peer for member in view.members + view.joining}
        self.heard = {peer: at for peer, at in self.heard.items() if peer in self.present}
        commands: list[Command] = []
        self.trainer.leader = self.server.leader = self.register.leader
        if self.register.leading:
            if self.led == self.register.term:
                self.leadership.on_view(view, now)
            commands += _tell_change(before, view)
        if self.name not in self.present:
            if before is not None and self.leaving:
                return commands + self._finish(True, f"left: {self.leaving}")
            if before is None:
                return commands
            return commands + self._outside_now(f"put out of the run in view {view.number}: {view.reason}", now)
        self.find_at, self.outside = None, False
        if self.pulse_at is None:
            self.pulse_at = now
        commands += self.server.on_view(view, now)
        commands += self.trainer.on_view(view, now)
        commands += self.sync.on_view(view, now)
        if view.finished:
            self.linger_at = now + 4 * self.settings.silence_s
        return commands + self._pulse(now)

    def _outside_now(self, why: str, now: float) -> list[Command]:
        """Everything I hold of the run is void; ask to come back."""
        self.find_at, self.outside = now, True
        self.pulse_at = None
        if self.view is not None:
            self.known = self.known or tuple(m.peer for m in self.view.members if m.peer != self.name)
        gone = View(number=0 if self.view is None else self.view.number, step=0, members=())
        commands: list[Command] = [Note("removed", why)]
        commands += self.trainer.on_view(gone, now) + self.sync.on_view(gone, now)
        if self.server.has_state:
            commands += self.server.drop_state(keep=True)
        return commands

    def _ask_in(self, now: float) -> list[Command]:
        """Ask for admission: the leader where known, else everyone I have heard of. A member that has only lost
        touch asks too: whoever leads now either has it still or takes it in again."""
        if self.find_at is None:
            return []
        leader = self.register.leader
        peers = dict.fromkeys((*((leader,) if leader else ()), *self.known))
        return [Send(peer, self._join) for peer in peers if peer != self.name]

    @property
    def _join(self) -> Join:
        return Join(holds=self.server.holding, seat=self.settings.seat)

    def _lost(self, now: float) -> bool:
        """In a view, but no leader has been heard for long: the run may have gone on without me."""
        inside = self.view is not None and not self.outside and not self.register.leading
        return inside and now - self.register.heard_leader_at > 2 * self.settings.silence_s

    def _pulse(self, now: float) -> list[Command]:
        """Tell the leader how I am; a peer that does not hear its leader keeps silent, so that it is missed."""
        self.server.changed = False
        self.pulse_at = now + self.settings.beat_s
        if self.view is None or self.outside or self.finished:
            return []
        if not self.register.leading and now - self.register.heard_leader_at > self.settings.silence_s:
            return self._tell_alone(now - self.led_at > self.settings.silence_s) + self._doubt(now)
        commands = self._tell_alone(False) + self._tell(self._state(), now)
        if self.leaving:
            commands += self._tell(Leave(reason=self.leaving), now)
        return commands

    def _tell_alone(self, alone: bool) -> list[Command]:
        """Say once that this side of the network waits, and once that it does not any more."""
        if alone == self.alone or not (self.view is not None and self.view.started):
            return []
        self.alone = alone
        if not alone:
            return [Note("stall", "a leader speaks again: going on")]
        words = f"no leader for {self.settings.silence_s:g} s: nothing is committed until a majority of the members is in touch"
        return [Note("stall", words)]

    def _tell_stall(self, why: str, now: float) -> list[Command]:
        """Why nothing is committed, as the leader sees it: on every screen, and again from time to time."""
        if not why:
            said, self.stalled_at = self.stalled_at, None
            return [Note("stall", "steps are committed again")] if said is not None else []
        if self.stalled_at is not None and now - self.stalled_at < SAY_AGAIN_BEATS * self.settings.beat_s:
            return []
        self.stalled_at = now
        return [Note("stall", why)]

    def _lonely(self, now: float) -> bool:
        """No leader speaks to me, and no election has changed that."""
        return not self.register.leading and now - self.register.heard_leader_at > 2 * self.settings.silence_s

    def _doubt(self, now: float) -> list[Command]:
        """I may have been put out without hearing of it. Whoever knows better says so when asked for a vote (_agreeing);
        voters ask all voters when they stand, so here only a joiner asks, and whoever has been alone for long."""
        if self.view is None or (self.register.views.votes_here() and not self._lonely(now)):
            return []
        self.pulse_at = now + FIND_BEATS * self.settings.beat_s
        peers = dict.fromkeys([member.peer for member in self.view.members] + list(self.known))
        ask = VoteRequest(term=self.register.term, last_term=0, last_number=self.view.number, trial=True)
        return [Find(), *(Send(peer, ask) for peer in peers if peer != self.name)]

    def _state(self) -> Pulse:
        server = self.server
        return Pulse(
            term=self.register.term,
            number=0 if self.view is None else self.view.number,
            step=server.step,
            ready=server.ready,
            books=server.books,
            epoch=server.epoch,
            queue_s=server.queue_s,
            rate=server.rate,
            digest=server.digest,
            stage=server.stage,
            work=server.work,
            closed=server.closed,
            loaded=self.sync.loaded,
        )

    def _tell(self, message: Wire, now: float) -> list[Command]:
        """To the leader, who may be this very peer."""
        leader = self.register.leader
        if leader is None:
            return []
        if leader == self.name:
            if self.led != self.register.term:
                return []
            return self.leadership.on_message(self.name, message, now)
        return [Send(leader, message)]  # type: ignore[arg-type]

    def _belongs(self, peer: Peer) -> bool:
        return self.view is None or peer in self.present  # without a view: the one that will tell is on its way

    def _finish(self, ok: bool, reason: str) -> list[Command]:
        self.finished = True
        self.pulse_at = self.find_at = self.linger_at = self.pass_on_at = None
        return [Finish(ok=ok, reason=reason)]


def _due(at: float | None, now: float) -> bool:
    return at is not None and now >= at


def _drop(blobs: tuple[BlobRef, ...]) -> list[Command]:
    return [Drop(tuple(blob.id for blob in blobs))] if blobs else []


def _tell_change(before: View | None, view: View) -> list[Command]:
    """The leader's account of a change, for people."""
    if before is None or not view.reason:
        return []
    if view.finished and not before.finished:
        return [Note("finished", view.reason)]
    if view.epoch > before.epoch:
        return [Note("recovered", view.reason)]
    if view.step > before.step:
        return [Note("commit", view.reason)]
    if view.ahead and not before.ahead:
        return [Note("round", view.reason)]
    left = {m.peer for m in before.members} - {m.peer for m in view.members}
    return [Note("removed" if left else "joined", view.reason)]

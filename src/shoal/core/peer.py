"""One peer's machine, put together from its parts. `handle(event, now)` returns commands; nothing else changes state.

Each peer serves a stage (core/server), owns microbatches (core/trainer), keeps its stage's state equal to that of the other replicas
(core/transfer), agrees with the others on the view (core/consensus), takes part as a member (core/member) and, while it leads, decides
for all (core/leader). Here: which part receives which event, and in which order an agreed view takes effect. The driver
(runtime/node.py, sim/, a replay) passes events in and carries out commands; it calls again at `deadline`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.core.consensus.election import ElectionRole
from shoal.core.consensus.register import Register
from shoal.core.inference.server import InferenceServer
from shoal.core.kinds import ABOUT_RUN, CONSENSUS, FROM_LEADER, SERVER, TO_LEADER, TRANSFER, WORK
from shoal.core.leader.leader import Leader
from shoal.core.member.admission import Admission
from shoal.core.member.departure import Departure
from shoal.core.member.heartbeat import HeartbeatSender
from shoal.core.member.judge import LeaderJudge
from shoal.core.member.leader_role import LeaderRole
from shoal.core.member.notes import change_note
from shoal.core.member.roster import Roster
from shoal.core.member.updates import OverrideRelay, ViewRepair
from shoal.core.messages import (
    Asked,
    Barred,
    BlobRef,
    BookerRequest,
    Command,
    Complaint,
    CopyRequest,
    Dismissed,
    Done,
    Drop,
    Event,
    Failed,
    Found,
    Generate,
    Heartbeat,
    HiddenStates,
    Join,
    JoinRefused,
    Lead,
    LineMeasured,
    Note,
    Objection,
    Override,
    Peer,
    Propose,
    Received,
    Redirect,
    SaveAsked,
    Send,
    Settings,
    StandingRequest,
    Unreachable,
    View,
    VoteRequest,
    Wire,
    asker_of,
)
from shoal.core.server.server import Server
from shoal.core.timers import Called, soonest
from shoal.core.trainer.trainer import Trainer
from shoal.core.transfer.transfer import StateTransfer

if TYPE_CHECKING:
    from random import Random

GAP_BEATS = 3  # without an event: this process did not run
ALIVE_SILENCES = 2  # a peer that sent anything within that time may be alive
NEVER = (None,) * 6  # of all that is waited for in few events


class PeerMachine:
    """`found` is true of the one peer that begins the run."""

    def __init__(self, name: Peer, settings: Settings, rng: Random, found: bool) -> None:
        self.settings = settings
        self.register = Register(name, settings, rng)
        self.server = Server(name, settings)
        self.trainer = Trainer(name, settings, rng)
        self.transfer = StateTransfer(name, settings, rng, self.server)
        self.inference = InferenceServer(name, settings, self.server)
        self.leader_role = LeaderRole(name, settings, self.register, rng.random)
        self.roster = Roster(name, outside=not found)
        self.admission = Admission(settings, self.roster, self.register, self.server, found)
        self.relay = OverrideRelay(settings, self.roster, self.register)
        self.repair = ViewRepair(settings, self.register, self.relay)
        self.heartbeat = HeartbeatSender(
            settings, self.roster, self.register, self.leader_role, self.server, self.transfer
        )
        self.departure = Departure(settings)
        self.judge = LeaderJudge(name, settings, self.register, self.server, self.departure)
        self._called = Called()

    # ------------------------------------------------------------------------------------------------- questions

    @property
    def name(self) -> Peer:
        return self.roster.name

    @property
    def view(self) -> View | None:
        """The newest agreed view that has taken effect here."""
        return self.roster.view

    @property
    def present(self) -> set[Peer]:
        """Members and joiners of the view."""
        return self.roster.present

    @property
    def outside(self) -> bool:
        """In no view, as far as this peer knows."""
        return self.roster.outside

    @property
    def leading(self) -> bool:
        return self.register.leading

    @property
    def leader(self) -> Peer | None:
        return self.register.leader

    @property
    def leadership(self) -> Leader:
        return self.leader_role.leadership

    @property
    def alone(self) -> bool:
        """Training has begun, and no leader was heard for long: nothing is agreed."""
        return self.heartbeat.alone

    def heard(self, now: float) -> tuple[Peer, ...]:
        """Peers of the view that may be alive, as far as this peer can tell: all others were silent towards it."""
        return self.roster.heard(self._alive_s, now)

    @property
    def _alive_s(self) -> float:
        return ALIVE_SILENCES * self.settings.heartbeat_timeout_s

    @property
    def finished(self) -> bool:
        return self.departure.finished

    @property
    def last_now(self) -> float | None:
        """When this machine was last given an event."""
        return self._called.at

    @property
    def deadline(self) -> float | None:
        called = self._called
        if called.deadline is None:
            called.deadline = self._soonest()
        return called.deadline

    def _soonest(self) -> float | None:
        """Asked in every event, hence of the parts what they keep, where they keep it."""
        transfer, inference = self.transfer, self.inference
        rare = (
            transfer.downloader.retry_at,
            transfer.copier.downloader.retry_at,
            inference.deadline if inference.asked else None,
            self.admission.find_at,
            self.departure.linger_at,
            self.relay.look_at,
        )
        first = None if rare == NEVER else soonest(*rare)
        for at in (
            self.register.deadline,
            self.server.deadline,
            self.trainer.timers.deadline,
            self.heartbeat.beat_at,
        ):
            if at is not None and (first is None or at < first):
                first = at
        return first

    # ---------------------------------------------------------------------------------------------------- events

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take in one event; the commands are to be carried out in order."""
        if self.departure.finished:
            return []
        called = self._called
        last, called.at = called.at, now
        gap_s = 0.0 if last is None else now - last
        commands = (
            self._begin(last, gap_s, now) if last is None or gap_s > GAP_BEATS * self.settings.heartbeat_s else []
        )
        if self.register.election.leader != called.leader:
            self._follow()
        if type(event) is Received:
            commands += self._received(event, now)
        else:
            commands += self._dispatch(event, now)
        called.deadline = at = self._soonest()
        if (at is not None and now >= at) or self.admission.lost(now):
            return self._settle(commands + self._tick(now), now)
        if now >= self.judge.look_at or self.judge.objects is not None:
            commands += self.judge.tick(now)
        return commands if self._settled(now) else self._settle(commands, now)

    def _begin(self, last: float | None, gap_s: float, now: float) -> list[Command]:
        """The first call founds the run or begins to look for it. Later a gap means that this process did not run."""
        if last is None:
            return self.admission.begin(now)
        self.register.forgive(gap_s, now)
        self.trainer.forgive(gap_s)
        self.leader_role.forgive(gap_s, now)
        self.judge.forgive(gap_s, now)
        return []

    def _follow(self) -> None:
        """The parts know the register's leader."""
        self._called.leader = self.trainer.leader = self.server.leader = self.register.leader

    def _dispatch(self, event: Event, now: float) -> list[Command]:
        match event:
            case Done():
                owner = self._owner(event.id)
                if owner is not self.inference:
                    self.judge.show_work(now)
                return owner.on_done(event, now)
            case Failed(lost=True):  # what this peer holds of the step is void: others recompute it
                return self._finish(False, event.reason)
            case Failed():
                return self._owner(event.id).on_failed(event, now)
            case Unreachable():
                self.leader_role.doubt(event.peer, now)
                self.server.on_unreachable(event.peer)
                self.transfer.on_unreachable(event.peer)
                return self.trainer.on_unreachable(event.peer, now)
            case Found():
                return self.admission.on_found(event.peers) + self.relay.on_found(event.peers)
            case LineMeasured():
                self.heartbeat.line = event
            case Barred():
                self.leader_role.barred = event.peers
            case SaveAsked():
                self.leadership.request_save()
            case Asked():
                self.departure.leave(event.reason or "asked to", now)
        return []

    def _owner(self, task: str) -> Server | Trainer | StateTransfer | InferenceServer:
        """The part that gave that task: of the same name."""
        owner: Server | Trainer | StateTransfer | InferenceServer = getattr(self, asker_of(task))
        return owner

    # -------------------------------------------------------------------------------------------------- messages

    def _received(self, event: Received, now: float) -> list[Command]:
        peer, message = event.peer, event.message
        if self.register.election.role is ElectionRole.LEADER:
            self.register.replication.show_life(peer, now)
        self.roster.show_life(peer, now)
        kind = type(message)
        if kind in WORK:
            return self._about_work(event, now)
        if kind in CONSENSUS:
            return self._on_consensus(peer, message, now)
        if kind in TO_LEADER:
            return self._to_leader(peer, message, now)
        if kind in TRANSFER:
            return self.transfer.on_message(peer, message, event.blobs, event.fault, now)
        if kind is Generate or (kind is HiddenStates and self.roster.belongs(peer)):
            return self.inference.on_message(peer, message, event.blobs, event.fault, now)
        if isinstance(message, Objection):
            return self.judge.on_message(peer, message, now)
        if kind in ABOUT_RUN:
            return self._about_run(peer, message, now)
        return self._about_work(event, now)

    def _on_consensus(self, peer: Peer, message: Wire, now: float) -> list[Command]:
        """Only voters count. Any peer may send the proof of a newer view; a peer in no view that asks for a vote receives the newest."""
        register, agreed = self.register, self.register.views.view
        proven = isinstance(message, Propose) and message.proof is not None
        commands: list[Command] = []
        if proven or agreed is None or register.views.entitled(peer):
            commands = register.on_message(peer, message, now)
            if isinstance(message, Lead) and register.leader == peer and register.term == message.term:
                commands += self.judge.notes.note(message.stalled, now)
        elif isinstance(message, VoteRequest) and self.view is not None and not self.roster.belongs(peer):
            return self.repair.to_outsider(peer, message.last_number, now)
        agreed = register.views.view
        if isinstance(message, Lead) and message.number > (0 if agreed is None else agreed.number):
            commands.append(Send(peer, self.heartbeat.state(lacks=True)))
        return commands

    def _to_leader(self, peer: Peer, message: Wire, now: float) -> list[Command]:
        if not self.register.leading:
            leader = self.register.leader
            redirected = isinstance(message, Join) and leader is not None and leader != peer
            return [Send(peer, Redirect(leader=leader))] if redirected and leader is not None else []
        commands = self.leader_role.on_message(peer, message, now)
        if not isinstance(message, Heartbeat):
            return commands
        if self.roster.belongs(peer):
            replication, behind = self.register.replication, message.number < self.roster.number
            if message.lacks:
                replication.lost(peer)
            repaired = self.register.repair(peer, message.term, message.number, now)
            if repaired or not behind or replication.on_its_way(peer, message.number, now):
                return commands + repaired
            return commands + self.repair.newest(peer, message.number)
        if not self.leadership.asks_to_join(peer):
            commands += self.repair.to_outsider(peer, message.number, now)
        return commands

    def _about_run(self, peer: Peer, message: Wire, now: float) -> list[Command]:
        match message:
            case Dismissed() if self.view is not None and self.view.finished and self.roster.belongs(peer):
                return self._finish(True, self._run_over)
            case StandingRequest():
                standing = self.roster.standing(self.register.term, self._alive_s, now)
                return [Send(peer, standing)] if standing is not None else []
            case Override():
                return self.relay.take(message, now)
            case Redirect():
                return self.admission.on_redirect(peer, message)
            case JoinRefused():
                return self.admission.on_refused(peer, message, now)
        return []

    def _about_work(self, event: Received, now: float) -> list[Command]:
        """The leader's requests, and messages between members and joiners. What others send is dropped."""
        peer, message = event.peer, event.message
        kind = type(message)
        if kind in FROM_LEADER or kind is BookerRequest:
            if peer != self.register.leader:
                return _drop(event.blobs) if kind is not BookerRequest else []
            if isinstance(message, BookerRequest):
                return self.trainer.on_who_booked(peer, message, now) or self.server.on_who_booked(peer, message)
            if kind is CopyRequest:
                return self.transfer.on_message(peer, message, event.blobs, event.fault, now)
            return self.server.on_message(peer, message, event.blobs, event.fault, now)
        if peer not in self.roster.present and not self.roster.belongs(peer):
            return _drop(event.blobs)
        part = self.server if kind in SERVER else self.trainer
        return part.on_message(peer, message, event.blobs, event.fault, now)

    # -------------------------------------------------------------------------------------------------- settling

    def _tick(self, now: float) -> list[Command]:
        commands = self.register.tick(now) if _due(self.register.deadline, now) else []
        for machine in (self.server, self.trainer, self.transfer, self.inference):
            at = machine.deadline
            if at is not None and now >= at:
                commands += machine.tick(now)
        commands += self.admission.tick(now) + self.judge.tick(now)
        if _due(self.relay.look_at, now):
            commands += self.relay.tick(now)
        return commands + (self._finish(True, self._run_over) if self.departure.due(now) else [])

    def _settled(self, now: float) -> bool:
        """Nothing is due, and there is nothing for `_settle` to do, as after most events."""
        server, register = self.server, self.register
        if server.changed or server.stale or server.unfit or register.views.fresh:
            return False
        if register.election.role is ElectionRole.LEADER:
            if not self.leader_role.waits(now):
                return False
        elif self.leader_role.term:
            return False
        return not (self.transfer.load_failed is not None or (self.inference.asked and self.inference.waits))

    def _settle(self, commands: list[Command], now: float) -> list[Command]:
        """Let agreed views take effect, decide if this peer leads, and report to the leader."""
        self._called.deadline = None
        while True:
            for view in self.register.take():
                commands += self._adopt(view, now)
            if not self.register.leading or self.finished:
                self.leader_role.end()
                break
            if self.server.changed:  # a leader's own books count at once, not with the next message that it receives
                commands += self._beat(now)
            commands += self._lead(now)
            if not self.register.views.fresh:
                break
        if self.server.unfit:
            commands += self.transfer.review(now)
        if self.server.stale:
            complaint = Complaint(about=self.name, reason=self.server.stale, kind="stale")
            commands += self.leader_role.tell(complaint, now)
            if self.register.leader is not None:
                self.server.stale = ""
        if self.transfer.load_failed is not None:
            commands += self.leader_role.tell(self.transfer.load_failed, now)
            self.transfer.load_failed = None  # sent again after the next try
        if self.server.changed or _due(self.heartbeat.beat_at, now):
            commands += self._beat(now)
        return commands + self.inference.go_on(now) if self.inference.asked else commands

    def _lead(self, now: float) -> list[Command]:
        view, leader_role = self.register.agreed, self.leader_role
        assert view is not None
        leader_role.led_at = now
        commands: list[Command] = []
        if not leader_role.current:
            commands += leader_role.begin(view, now) + self._beat(now)
        commands += leader_role.decide(now) + self.judge.notes.note(self.leadership.stall, now)
        if self.leadership.resigns:
            return commands + leader_role.resign(now)
        if self.leadership.dismissed:
            self.departure.on_all_dismissed(now)
        return commands

    def _adopt(self, view: View, now: float) -> list[Command]:
        """An agreed view takes effect on each part of this peer."""
        before = self.view
        self.roster.adopt(view)
        self.judge.on_view(before, view, now)
        self.leadership.followed_s = self.judge.idle_s
        self._follow()
        commands: list[Command] = []
        if self.register.leading:
            self.leader_role.on_view(view, now)
            commands += change_note(before, view)
        if self.name not in self.present:
            return commands + self._on_view_without_me(before, view, now)
        self.admission.enter()
        if self.heartbeat.beat_at is None:
            self.heartbeat.beat_at = now
        for part in (self.server, self.trainer, self.transfer):
            commands += part.on_view(view, now)
        if view.finished:
            self.departure.on_finished_view(now)
        return commands + self._beat(now)

    def _on_view_without_me(self, before: View | None, view: View, now: float) -> list[Command]:
        """What this peer holds of the run is void, unless it has asked to leave; it asks to be admitted again."""
        if before is None:
            return []
        if self.departure.leaving:
            return self._finish(True, f"left: {self.departure.leaving}")
        self.admission.seek(now)
        self.heartbeat.beat_at = None
        empty = View(number=view.number, step=0, members=())
        commands: list[Command] = []
        if any(
            one.peer == self.name for one in before.members + before.joining
        ):  # a newcomer was never in those that it missed
            commands.append(Note("removed", f"removed from the run in view {view.number}: {view.reason}"))
        commands += self.trainer.on_view(empty, now) + self.transfer.on_view(empty, now)
        if self.server.has_state:
            commands += self.server.drop_state(keep=True)
        return commands + self.server.stop_catching_up(empty, now)

    def _beat(self, now: float) -> list[Command]:
        return self.heartbeat.beat(self.departure, self.admission.known, now)

    @property
    def _run_over(self) -> str:
        return (self.view.failed if self.view is not None else "") or "the run is finished"

    def _finish(self, ok: bool, reason: str) -> list[Command]:
        self.heartbeat.beat_at = self.admission.find_at = self.relay.look_at = None
        return self.departure.finish(ok, reason)


def _due(at: float | None, now: float) -> bool:
    return at is not None and now >= at


def _drop(blobs: tuple[BlobRef, ...]) -> list[Command]:
    return [Drop(tuple(blob.id for blob in blobs))] if blobs else []

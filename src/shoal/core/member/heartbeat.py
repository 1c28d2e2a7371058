"""The heartbeat of a member: it reports its state to the leader once a beat, and at once when something has changed.

A peer that does not hear its leader stays silent, so that the leader misses it. It may have been evicted without receiving the view that
says so: a peer that knows a newer view sends it when it is asked for a vote (peer.py). Voters ask each other when they stand for
election, so here only a joiner asks, and a voter that has been without a leader for long. For peer.py.
"""

from __future__ import annotations

from shoal.core.consensus.register import Register
from shoal.core.member.admission import FIND_BEATS
from shoal.core.member.departure import Departure
from shoal.core.member.leader_role import LeaderRole
from shoal.core.member.roster import Roster
from shoal.core.messages import Command, Find, Heartbeat, LineMeasured, Note, Peer, Send, Settings, VoteRequest
from shoal.core.server.server import Server
from shoal.core.timers import beat_s
from shoal.core.transfer.transfer import StateTransfer


class HeartbeatSender:
    """`beat_at` is None until a view lists this peer."""

    def __init__(
        self,
        settings: Settings,
        roster: Roster,
        register: Register,
        leader_role: LeaderRole,
        server: Server,
        transfer: StateTransfer,
    ) -> None:
        self.beat_at: float | None = None
        self._settings, self._roster, self._register, self._leader_role = settings, roster, register, leader_role
        self._server, self._transfer = server, transfer
        self.line = LineMeasured()
        self.alone = False  # no leader for long: nothing is agreed, and people were told

    def beat(self, departure: Departure, known: tuple[Peer, ...], now: float) -> list[Command]:
        """Report to the leader; if none is heard, ask the members and the `known` peers for a newer view."""
        self._server.changed = False
        self.beat_at = now + beat_s(self._settings.heartbeat_s, len(self._roster.present))
        if self._roster.view is None or self._roster.outside or departure.finished:
            return []
        if self._silent(1, now):
            long = now - self._leader_role.led_at > self._settings.heartbeat_timeout_s
            return self._note_alone(long) + self._ask_others(known, now)
        commands = self._note_alone(False) + self._leader_role.tell(self.state(), now)
        if departure.leaving:
            commands += self._leader_role.tell(departure.notice(now), now)
        return commands

    def state(self, lacks: bool = False) -> Heartbeat:
        """What the leader learns of this peer. `lacks`: the view that the leader has just named."""
        server = self._server
        return Heartbeat(
            term=self._register.term,
            number=self._roster.number,
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
            loaded=self._transfer.loaded,
            place=self._settings.place,
            up_kBps=self.line.up_kBps,
            down_kBps=self.line.down_kBps,
            gradient=server.gradient,
            tensor_bytes=server.tensor_bytes,
            lacks=lacks,
        )

    def _silent(self, silences: float, now: float) -> bool:
        """This peer follows a leader that has been silent for that long."""
        silent_s = now - self._register.heard_leader_at
        return not self._register.leading and silent_s > silences * self._settings.heartbeat_timeout_s

    def _note_alone(self, alone: bool) -> list[Command]:
        """Tell people once that this side of the network waits, and once that it goes on."""
        view = self._roster.view
        if alone == self.alone or not (view is not None and view.started):
            return []
        self.alone = alone
        if not alone:
            return [Note("stall", "a leader speaks again: going on")]
        words = f"no leader for {self._settings.heartbeat_timeout_s:g} s: nothing is committed until a majority of the members is in touch"
        return [Note("stall", words)]

    def _ask_others(self, known: tuple[Peer, ...], now: float) -> list[Command]:
        """Ask for a vote in a trial: any peer that knows a newer view answers with it."""
        view = self._roster.view
        if view is None or (self._register.views.votes_here() and not self._silent(2, now)):
            return []
        self.beat_at = now + FIND_BEATS * self._settings.heartbeat_s
        peers = dict.fromkeys([member.peer for member in view.members] + list(known))
        request = VoteRequest(term=self._register.term, last_term=0, last_number=view.number, trial=True)
        return [Find(), *(Send(peer, request) for peer in peers if peer != self._roster.name)]

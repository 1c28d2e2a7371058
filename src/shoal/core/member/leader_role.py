"""This peer as the leader, while it is one: in which term, and how a message reaches whichever peer leads. For peer.py."""

from __future__ import annotations

from shoal.core.consensus.register import Register
from shoal.core.leader.evidence import Chance
from shoal.core.leader.leader import Leader
from shoal.core.messages import Command, Message, Note, Peer, Send, Settings, View, Wire


class LeaderRole:
    """peer.py calls `begin` in each term that this peer leads, then `decide` after each event, and `end` when it leads no longer."""

    def __init__(self, name: Peer, settings: Settings, register: Register, chance: Chance) -> None:
        self.leadership = Leader(name, settings, chance)
        self.led_at = float("-inf")  # when this peer led last
        self.barred: tuple[Peer, ...] = ()  # revoked by the run's authority
        self._name, self._register = name, register
        self.term = 0  # that `leadership` has begun; 0: this peer does not lead

    @property
    def current(self) -> bool:
        """`leadership` has begun the term of the register."""
        return self.term == self._register.election.term  # asked with every message to a leader

    def waits(self, now: float) -> bool:
        """This peer leads, as it did before, and nothing has come up that it could decide."""
        if not self.current or self.barred or not self.leadership.waits(now):
            return False
        self.led_at = now
        return True

    def begin(self, view: View, now: float) -> list[Command]:
        """This peer leads a new term, with `view` agreed."""
        self.term = self._register.term
        return self.leadership.lead(view, self.term, now)

    def end(self) -> None:
        """This peer does not lead."""
        self.term = 0

    def decide(self, now: float) -> list[Command]:
        self.leadership.bar(self.barred)
        commands = self.leadership.decide(self._register, now)
        self._register.replication.stalled = self.leadership.stall
        return commands

    def resign(self, now: float) -> list[Command]:
        """Stop leading if another peer should lead."""
        if not self.leadership.resigns:
            return []
        self._register.resign(now)
        return [Note("leader", f"{self._name} leads no more: it {self.leadership.resigns}")]

    def on_view(self, view: View, now: float) -> None:
        """A view is agreed while this peer leads."""
        if self.current:
            self.leadership.on_view(view, now)

    def on_message(self, peer: Peer, message: Wire, now: float) -> list[Command]:
        return self.leadership.on_message(peer, message, now) if self.current else []

    def doubt(self, peer: Peer, now: float) -> None:
        """The network says that `peer` cannot be reached."""
        if self.term:
            self.leadership.doubt(peer, now)

    def forgive(self, gap_s: float, now: float) -> None:
        """This process was stopped for `gap_s`: nobody's silence in that time counts."""
        if self.term:
            self.leadership.forgive(gap_s, now)

    def tell(self, message: Message, now: float) -> list[Command]:
        """Send a message to the leader, which may be this peer. Nothing while none is known."""
        leader = self._register.leader
        if leader is None:
            return []
        if leader == self._name:
            return self.on_message(self._name, message, now)
        return [Send(leader, message)]

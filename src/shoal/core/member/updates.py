"""Bringing peers up to date that are in no view held here, or behind: with the newest agreed view, or with the operator's override.

`OverrideRelay` takes the operator's override (consensus/override.py), which replaces the majority's signatures, and forwards it to peers
that may not have received it. `ViewRepair` sends the newest view with what proves it. For peer.py.
"""

from __future__ import annotations

from shoal.core.consensus.register import Register
from shoal.core.member.roster import Roster
from shoal.core.messages import Command, Entry, Find, Note, Override, Peer, Send, Settings

VIEWS_A_BEAT = 8  # peers in no view held here that receive the newest one: views are large
LOOK_SILENCES = 4  # between two look-ups of peers that may not have received the override


class OverrideRelay:
    """`newest` is the override that last took effect here."""

    def __init__(self, settings: Settings, roster: Roster, register: Register) -> None:
        self.newest: Override | None = None
        self.look_at: float | None = None  # when to look for peers that have not received it
        self._settings, self._roster, self._register = settings, roster, register

    def take(self, override: Override, now: float) -> list[Command]:
        """Take the override's view for agreed if its epoch is newer. The peers that it names elect a leader as usual; what this peer holds
        of an older epoch is void, whichever side it was on."""
        view, mine = override.view, self._roster.view
        if mine is None or view.epoch <= mine.epoch or view.number <= mine.number or not view.members:
            return []
        self.newest, self.look_at = override, now
        self._register.impose(Entry(term=override.term, view=view, before=()), now)
        others = [member.peer for member in view.members if member.peer != self._roster.name]
        return [Note("override", view.reason), *(Send(peer, override) for peer in others)]

    def tick(self, now: float) -> list[Command]:
        if self.look_at is None or now < self.look_at:
            return []
        self.look_at = now + LOOK_SILENCES * self._settings.heartbeat_timeout_s
        return [Find()]

    def on_found(self, peers: tuple[Peer, ...]) -> list[Command]:
        """The directory lists these peers: those in no view held here may have been given up and yet be alive."""
        member = self._roster
        if self.newest is None or member.outside:
            return []
        return [Send(peer, self.newest) for peer in peers if peer != member.name and peer not in member.present]


class ViewRepair:
    """Sends views to peers that hold older ones. How many outsiders receive one is bounded."""

    def __init__(self, settings: Settings, register: Register, relay: OverrideRelay) -> None:
        self._settings, self._register, self._relay = settings, register, relay
        self._sent = 0  # in this beat, to peers in no view held here
        self._until = float("-inf")  # the end of this beat

    def newest(self, peer: Peer, number: int) -> list[Command]:
        """The newest view for `peer`, which holds view `number`, with the signatures that prove it, or the override."""
        certified = self._register.views.certified(number)
        if certified:
            return [Send(peer, one) for one in certified]
        return [Send(peer, self._relay.newest)] if self._relay.newest is not None else []

    def to_outsider(self, peer: Peer, number: int, now: float) -> list[Command]:
        """The same for a peer in no view held here, for a few of them in a beat: it is new, or has missed the views since."""
        if now >= self._until:
            self._until, self._sent = now + self._settings.heartbeat_s, 0
        self._sent += 1
        return self.newest(peer, number) if self._sent <= VIEWS_A_BEAT else []

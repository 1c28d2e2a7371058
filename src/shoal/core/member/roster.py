"""Which view this peer follows, and which peers that view lists. For peer.py and the other modules of this room."""

from __future__ import annotations

from shoal.core.messages import Peer, Standing, View


class Roster:
    """The newest agreed view that has taken effect here, and when its peers last sent anything."""

    def __init__(self, name: Peer, outside: bool) -> None:
        self.name = name
        self.view: View | None = None  # newest agreed
        self.present: set[Peer] = set()  # its members and joiners
        self.outside = outside  # in no view, as far as this peer knows
        self._heard: dict[Peer, float] = {}  # when each of the view last sent anything

    @property
    def number(self) -> int:
        """Of the view; 0 without one."""
        return self.view.number if self.view is not None else 0

    def adopt(self, view: View) -> None:
        """A newer view is agreed."""
        self.view = view
        self.present = {member.peer for member in view.members + view.joining}
        self._heard = {peer: at for peer, at in self._heard.items() if peer in self.present}

    def others(self) -> tuple[Peer, ...]:
        """The members of the view but this peer."""
        members = self.view.members if self.view is not None else ()
        return tuple(member.peer for member in members if member.peer != self.name)

    def belongs(self, peer: Peer) -> bool:
        """The view lists `peer`. Without a view any peer does: the view that says so is on its way."""
        return self.view is None or peer in self.present

    def show_life(self, peer: Peer, now: float) -> None:
        """A message of that peer arrived."""
        if peer in self.present:
            self._heard[peer] = now

    def standing(self, term: int, within_s: float, now: float) -> Standing | None:
        """What the operator is told: the view, and which of its peers sent anything within that time."""
        if self.view is None:
            return None
        return Standing(term=term, view=self.view, heard=self.heard(within_s, now))

    def heard(self, within_s: float, now: float) -> tuple[Peer, ...]:
        """Peers of the view that sent anything within that time."""
        return tuple(peer for peer, at in self._heard.items() if now - at <= within_s)

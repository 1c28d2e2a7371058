"""What a trainer reports to the leader and the operator of the peers it works with. For trainer.py, which carries it out.

A complaint goes to the leader, who alone removes peers; a note is for people, once per peer where it would repeat itself.
What follows for the routes (a ban, a slow sample) is routing.py's.
"""

from __future__ import annotations

from shoal.core.messages import Command, Complaint, Note, Peer, Send, Stage
from shoal.core.trainer.routing import Routes


class Reports:
    def __init__(self, routes: Routes, out: list[Command]) -> None:
        self.leader: Peer | None = None
        self._routes = routes
        self._out = out
        self._told: set[tuple[str, Peer]] = set()

    def keep(self, members: dict[Peer, Stage]) -> None:
        self._told = {(what, peer) for what, peer in self._told if peer in members}

    def failed(self, peer: Peer, reason: str, now: float) -> None:
        ban_s = self._routes.failed(peer, now)
        if ban_s:
            self._out.append(Note("route", f"{peer} gets no requests for {ban_s:g} s: {reason}"))

    def faulty(self, peer: Peer, what: str, fault: str, now: float) -> None:
        """Its answer cannot be used: banned here, and the leader receives a complaint every time."""
        self._complain(Complaint(peer, f"{what}: {fault}"[:2000]))
        self.failed(peer, f"faulty {what}", now)

    def missed(self, peer: Peer, now: float) -> None:
        silent_s = self._routes.missed(peer, now)
        if silent_s:
            self._complain(Complaint(peer, f"has answered nothing for {silent_s:.1f} s", kind="unreachable"))

    def not_served(self, peer: Peer, maker: str, now: float, late: bool) -> None:
        """Whoever calls everything missing loses its share here at once: what is asked of it costs the others."""
        useless = not late and self._routes.useless(peer)
        since_s = self._routes.not_served(peer, maker, now, late)
        if since_s:
            self._complain(Complaint(peer, f"has served no hop for {since_s:.1f} s", kind="unreachable"))
        if useless:
            self.failed(peer, "does none of the hops that it is asked for", now)

    def not_given(self, peer: Peer, by: Peer, now: float) -> None:
        """It loses its share here, too: what it makes is of no use."""
        useless = self._routes.useless(peer)
        since_s = self._routes.not_given(peer, by, now)
        if since_s:
            self._complain(Complaint(peer, f"has given no tensor that it made for {since_s:.1f} s", kind="unreachable"))
        if useless:
            self.failed(peer, "does not give what it makes", now)

    def note_once(self, kind: str, what: str, peer: Peer, text: str) -> None:
        if (what, peer) not in self._told:
            self._told.add((what, peer))
            self._out.append(Note(kind, text))

    def _complain(self, complaint: Complaint) -> None:
        if self.leader is not None:
            self._out.append(Send(self.leader, complaint))

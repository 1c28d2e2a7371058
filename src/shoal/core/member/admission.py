"""How a peer enters the run: it founds it, or looks for it in the directory and asks for admission.

A peer asks the leader where it knows one, else each peer that the directory lists; a member that is not the leader passes the name of
the leader on (Redirect). A member that has heard no leader for long asks, too: the run may have gone on without it, and whoever leads
still lists it or admits it again. Whom to admit, and to which stage, is the leader's decision (leader/rules/admission.py).
For peer.py.
"""

from __future__ import annotations

from shoal.core.consensus.register import Register
from shoal.core.member.roster import Roster
from shoal.core.messages import Command, Find, Join, JoinRefused, Member, Note, Peer, Redirect, Send, Settings, View
from shoal.core.names import invite_of
from shoal.core.planned import planned_stage
from shoal.core.server.server import Server

FIND_BEATS = 4  # between look-ups of the directory while no view lists this peer


class Admission:
    """Looks for the run while `find_at` is set. peer.py calls `enter` and `seek` when views begin and cease to list this peer."""

    def __init__(self, settings: Settings, roster: Roster, register: Register, server: Server, founding: bool) -> None:
        self.find_at: float | None = None  # when to look for the run again; None: there is no need
        self.known: tuple[Peer, ...] = ()  # peers to ask for admission
        self._settings, self._roster, self._register, self._server = settings, roster, register, server
        self._founding = founding  # this peer begins the run
        self._refused = ""  # why, as last noted

    def begin(self, now: float) -> list[Command]:
        """Found the run with a view that lists this peer alone, or begin to look for it."""
        self._register.await_leader(now)
        if not self._founding:
            self.find_at = now
            return []
        settings, first = self._settings, self._settings.first_step
        stage, _ = planned_stage(settings, settings.seat, set()) or (0, "")
        me = Member(peer=self._roster.name, stage=stage, seat=settings.seat)
        view = View(number=1, step=first, members=(me,), saved=first, founder=invite_of(me.peer))
        return self._register.found(view, now)

    def tick(self, now: float) -> list[Command]:
        if self.lost(now):
            self.find_at = now
        if self.find_at is None or now < self.find_at:
            return []
        self.find_at = now + FIND_BEATS * self._settings.heartbeat_s
        return [Find(), *self._request()]

    def on_found(self, peers: tuple[Peer, ...]) -> list[Command]:
        """The directory lists these peers."""
        self.known = tuple(peer for peer in peers if peer != self._roster.name)
        return self._request()

    def on_redirect(self, peer: Peer, message: Redirect) -> list[Command]:
        """A peer that was asked says who leads."""
        asked = self.find_at is not None and message.leader != self._roster.name and peer in self.known
        return [Send(message.leader, self._join)] if asked else []

    def on_refused(self, peer: Peer, message: JoinRefused, now: float) -> list[Command]:
        """A peer that was asked says why this one may not join. Another leader may say otherwise, and a liar must not end this peer: it
        asks again, after a pause."""
        if self.find_at is None or peer not in (self._register.leader, *self.known):
            return []
        self.find_at = max(self.find_at, now + self._settings.ban_s)
        if message.reason == self._refused:
            return []
        self._refused = message.reason
        return [Note("refused", f"{peer} refuses this peer: {message.reason}")]

    def enter(self) -> None:
        """A view lists this peer."""
        self.find_at, self._roster.outside = None, False

    def seek(self, now: float) -> None:
        """No view lists this peer any more: it asks to be admitted again. If it asks already, it keeps its pause: a newcomer is sent dozens
        of views that it missed, and a run commits several a second."""
        self.find_at, self._roster.outside = now if self.find_at is None else self.find_at, True
        self.known = self.known or self._roster.others()

    def _request(self) -> list[Command]:
        if self.find_at is None:
            return []
        leader = self._register.leader
        peers = dict.fromkeys((*((leader,) if leader else ()), *self.known))
        return [Send(peer, self._join) for peer in peers if peer != self._roster.name]

    @property
    def _join(self) -> Join:
        return Join(self._server.holding, self._settings.seat, self._settings.answers)

    def lost(self, now: float) -> bool:
        """A view lists this peer, but no leader was heard for long, and it does not look for the run yet."""
        silent_s = now - self._register.election.heard_leader_at
        if self.find_at is not None or silent_s <= 2 * self._settings.heartbeat_timeout_s:
            return False
        return self._roster.view is not None and not self._roster.outside and not self._register.leading

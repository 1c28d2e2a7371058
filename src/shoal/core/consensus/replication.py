"""The leader's side of consensus: it sends heartbeats and proposals, and collects acceptances until a proposal is agreed.

At most one proposal is in flight. It is agreed with the acceptances of quorums of the voters before and after it. A new leader
proposes an accepted but unagreed entry again in its own term, since it may have been agreed. A leader that no longer hears a quorum
stops leading. For register.py; elections are election.py's business.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from shoal.core.consensus.agreed import AgreedViews
from shoal.core.consensus.election import Election
from shoal.core.messages import Accept, Command, Entry, Lead, Member, Peer, Proof, Propose, Send, Settings, Signed, View
from shoal.core.timers import beat_s


def peers_of(members: Iterable[Member]) -> tuple[Peer, ...]:
    return tuple(member.peer for member in members)


class Replication:
    """Has no effect unless this peer leads. register.py calls `start` in each term that this peer leads."""

    def __init__(self, name: Peer, settings: Settings, views: AgreedViews, election: Election) -> None:
        self.term = 0  # that `start` was called in
        self.heard: dict[Peer, float] = {}  # when each voter last sent anything
        self.beat_at: float | None = None
        self.stalled = ""  # why nothing has been committed for long, for every heartbeat
        self._name, self._settings, self._views, self._election = name, settings, views, election
        self._elected_by: tuple[Signed, ...] = ()
        self._followers: set[Peer] = set()  # who has shown that it follows this leader in this term
        self._acceptances: dict[Peer, Signed] = {}  # of the proposal in flight
        # By receiver: the newest view that was sent to it, the oldest one that whoever holds needs no more, and when
        self._shown: dict[Peer, tuple[int, int, float]] = {}

    def start(self, now: float) -> list[Command]:
        """Begin to lead the term in which this peer was elected."""
        election, views = self._election, self._views
        assert election.leading and views.accepted is not None
        self.term, self._elected_by, self._followers = election.term, tuple(election.votes.values()), {self._name}
        self.heard = dict.fromkeys(views.others(), now)
        commands = self.beat(now)
        if views.proposing and election.leading:  # only an inherited proposal can follow: it may have been agreed
            views.accepted = Entry(term=self.term, view=views.accepted.view, before=views.accepted.before)
            commands += self._push(now)
        return commands

    def propose(self, view: View, now: float) -> list[Command]:
        """Propose `view` as the successor of the agreed one."""
        views = self._views
        assert self._election.leading and not views.proposing and views.view is not None
        assert view.number == views.view.number + 1
        views.accepted = Entry(term=self._election.term, view=view, before=views.view.voters)
        return self._push(now)

    def show_life(self, peer: Peer, now: float) -> None:
        """A message of that peer arrived."""
        if peer in self.heard:
            self.heard[peer] = now

    def repair(self, peer: Peer, term: int, number: int, now: float) -> list[Command]:
        """`peer` follows `term` and holds view `number`: send the views that it lacks, to a joiner what each of them committed too."""
        view = self._views.view
        if view is None:
            return []
        if term == self._election.term:
            self._followers.add(peer)
        if number >= view.number or self.on_its_way(peer, number, now):
            return []
        joins = any(one.peer == peer for one in view.joining)
        lacking = self._views.certified(number, commits=joins)
        if lacking:
            self._shown[peer] = view.number, 0, now
        return [Send(peer, one) for one in lacking]

    def lost(self, peer: Peer) -> None:
        """Of the newest view it has the proof alone: the proposal has not come."""
        if peer in self._shown and self._shown[peer][1]:
            del self._shown[peer]

    def on_its_way(self, peer: Peer, number: int, now: float) -> bool:
        """`peer` says that it holds view `number`. It was sent the newest within a beat: the two may have crossed."""
        view, (shown, least, at) = self._views.view, self._shown.get(peer, (0, 0, -math.inf))
        return view is not None and least <= number < view.number == shown and now - at < self._settings.heartbeat_s

    def forgive(self, gap_s: float, now: float) -> None:
        """This process was stopped for `gap_s`: nobody's silence in that time counts."""
        self.heard = {peer: min(now, at + gap_s) for peer, at in self.heard.items()}

    def on_accept(self, peer: Peer, message: Accept, now: float) -> list[Command]:
        views = self._views
        if message.by is None:
            if message.term > self._election.term:
                self._election.claimed(peer, message.term, now)
                return []  # this peer may lead no more, and its votes are of the term before
            return self._prove(peer) if message.term == self._election.term else []
        if message.term != self._election.term or message.by.peer != peer:
            return []
        assert views.accepted is not None
        if message.number != views.accepted.view.number or message.digest != views.accepted.view.digest:
            return []
        self._followers.add(peer)
        if views.proposing:
            self._acceptances[peer] = message.by
            return self._count(now)
        views.add_signature(message.by)
        return []

    def beat(self, now: float, agreed: bool = False) -> list[Command]:
        """Send heartbeats, with the proof of the newest view if it was just `agreed`; stop leading unless a quorum is in touch."""
        views, election = self._views, self._election
        self.beat_at = now + beat_s(self._settings.heartbeat_s, len(self._everyone()))
        alive = {peer for peer, at in self.heard.items() if now - at < self._settings.heartbeat_timeout_s} | {
            self._name
        }
        new = {peer for peer in views.others() if peer not in self.heard}
        self.heard.update(dict.fromkeys(new, now))
        if not views.decided_by(alive | new):
            election.step_down(election.term, now)
            return []
        commands = self._leads(self._everyone(), agreed) + (self._again() if views.proposing else [])
        commands += self._dismiss() if agreed else []
        if self._name not in views.voters()[1] and not views.proposing:
            election.step_down(election.term, now)  # the agreed view removes this peer
        return commands

    # --------------------------------------------------------------------------------------------------- private

    def _push(self, now: float) -> list[Command]:
        assert self._views.accepted is not None
        self._acceptances = {self._name: Signed(self._name)}
        self.beat_at = now + self._settings.heartbeat_s
        message = Propose(entry=self._views.accepted, term=self._election.term)
        return [Send(peer, message) for peer in self._views.others()] + self._count(now)

    def _count(self, now: float) -> list[Command]:
        """The proposal is agreed once quorums have accepted it."""
        if not self._views.decided_by(self._acceptances):
            return []
        assert self._views.accepted is not None
        self._views.agree(self._views.accepted, Proof(self._name, tuple(self._acceptances.values())))
        number = self._views.accepted.view.number
        self._shown = dict.fromkeys(self._views.others(), (number, number - 1, now))
        return self.beat(now, agreed=True)

    def _again(self) -> list[Command]:
        """Repeat the proposal in flight, and the view before it: both may have been lost."""
        views, term = self._views, self._election.term
        assert views.accepted is not None
        newest, message = views.certified(0)[-1:], Propose(entry=views.accepted, term=term)
        commands: list[Command] = []
        for peer in views.others():
            if peer not in self._acceptances and views.accepted.term == term:
                if peer not in self._followers:
                    commands += [Send(peer, one) for one in newest]
                commands.append(Send(peer, message))
        return commands

    def _dismiss(self) -> list[Command]:
        """The newest view for those that it removes. They would learn it by their next heartbeats; but the others may go at once, too, and
        then nobody answers those."""
        entry, view = self._views.entry, self._views.view
        assert entry is not None and view is not None
        gone = [peer for peer in entry.before if peer not in view.voters and peer != self._name]
        return [Send(peer, one) for peer in gone for one in self._views.certified(0)[-1:]]

    def _everyone(self) -> tuple[Peer, ...]:
        """All voters and joiners but this peer."""
        assert self._views.view is not None
        joining = (peer for peer in peers_of(self._views.view.joining) if peer != self._name)
        return tuple(dict.fromkeys((*self._views.others(), *joining)))

    def _leads(self, receivers: Iterable[Peer], agreed: bool = False) -> list[Command]:
        """Heartbeats; to those that have not shown that they follow, with the votes that elected this peer."""
        views = self._views
        assert views.entry is not None
        view = views.entry.view
        lead = Lead(
            term=self._election.term,
            number=view.number,
            decided_term=views.entry.term,
            digest=view.digest,
            stalled=self.stalled,
            proof=views.proof if agreed else None,
        )
        elected = msgspec.structs.replace(lead, votes=self._elected_by)
        return [Send(peer, lead if peer in self._followers else elected) for peer in receivers]

    def _prove(self, peer: Peer) -> list[Command]:
        """That peer is in this term and does not follow: the votes that elected this leader were lost on the way."""
        self._followers.discard(peer)
        return self._leads((peer,))

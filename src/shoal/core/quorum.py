"""One replicated value: the members agree on a sequence of Views, and on who leads.

This is Raft (Ongaro and Ousterhout 2014) cut down to a register: every proposal holds the whole next View, so only the
newest one is kept and there is no log. At most one proposal is in flight; it is agreed when majorities of the voters
before *and* after it have accepted (joint consensus in one step), and a candidate that holds an unagreed proposal
needs votes from majorities of both. Two halves of a split network therefore never agree on different successors of one
view, which is all that committing a step needs. Pre-votes keep a lonely peer from disturbing a working leader; a
leader that no longer hears a majority stops leading. Peers keep nothing on disk: a restarted process is a new peer
under a new name.

For peer.py; what the views say is coordinator.py's business.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING

from shoal.core.messages import (
    Accept,
    AskVote,
    Command,
    Entry,
    Lead,
    Member,
    Peer,
    Propose,
    Send,
    Settings,
    View,
    Vote,
    Wire,
)

if TYPE_CHECKING:
    from random import Random


class Role(Enum):
    FOLLOWER = "follower"
    TRIAL = "trial"  # asking whether an election would be won
    CANDIDATE = "candidate"
    LEADER = "leader"


def majority(voters: Iterable[Peer], yes: set[Peer]) -> bool:
    """More than half of `voters` are in `yes`; true of no voters at all."""
    voters = tuple(voters)
    return not voters or 2 * sum(voter in yes for voter in voters) > len(voters)


def peers_of(members: Iterable[Member]) -> tuple[Peer, ...]:
    return tuple(member.peer for member in members)


class Register:
    """The replicated value as one peer holds it. `fresh` collects agreed views until `take` hands them out."""

    def __init__(self, name: Peer, settings: Settings, rng: Random) -> None:
        self.name, self.settings, self.rng = name, settings, rng
        self.term = 0
        self.voted: Peer | None = None
        self.role = Role.FOLLOWER
        self.leader: Peer | None = None
        self.agreed: View | None = None
        self.agreed_entry: Entry | None = None
        self.accepted: Entry | None = None  # newest proposal accepted, agreed or not
        self.yes: set[Peer] = set()  # who accepted my proposal, or voted for me
        self.heard_lead = float("-inf")
        self.heard: dict[Peer, float] = {}  # leader: when each voter last showed life
        self.election_at: float | None = None
        self.beat_at: float | None = None
        self.fresh: list[View] = []

    # ------------------------------------------------------------------------------------------------- questions

    @property
    def leading(self) -> bool:
        return self.role is Role.LEADER

    @property
    def proposing(self) -> bool:
        """A proposal (mine or inherited) is not agreed yet."""
        return self.accepted is not None and self.accepted is not self.agreed_entry

    @property
    def deadline(self) -> float | None:
        return self.beat_at if self.leading else self.election_at

    def votes(self) -> bool:
        """Am I a voter of the newest view I hold?"""
        entry = self.accepted
        return entry is not None and (self.name in entry.before or self.name in entry.view.voters)

    def _voters(self) -> tuple[tuple[Peer, ...], tuple[Peer, ...]]:
        """Those whose majorities decide: of the agreed view, and of a proposal on its way."""
        assert self.accepted is not None
        after = self.accepted.view.voters
        return (self.accepted.before if self.proposing else ()), after

    def _everyone(self) -> tuple[Peer, ...]:
        before, after = self._voters()
        return tuple(dict.fromkeys(peer for peer in before + after if peer != self.name))

    def take(self) -> list[View]:
        fresh, self.fresh = self.fresh, []
        return fresh

    # --------------------------------------------------------------------------------------------------- actions

    def found(self, view: View, now: float) -> list[Command]:
        """Begin a run: this peer alone is the first view's only voter."""
        self.term = 1
        entry = Entry(term=1, view=view, before=())
        self.accepted = entry
        self._agree(entry)
        return self._become_leader(now)

    def propose(self, view: View, now: float) -> list[Command]:
        """Leader: put `view` forward as the successor of the agreed one."""
        assert self.leading and not self.proposing and self.agreed is not None
        assert view.number == self.agreed.number + 1
        self.accepted = Entry(term=self.term, view=view, before=self.agreed.voters)
        return self._push(now)

    def forgive(self, gap_s: float, now: float) -> None:
        """This process was stopped for `gap_s`: nobody's silence in that time counts."""
        self.heard = {peer: min(now, at + gap_s) for peer, at in self.heard.items()}
        self.heard_lead = min(now, self.heard_lead + gap_s)
        if self.election_at is not None:
            self.election_at = max(self.election_at, now + self.settings.beat_s * 2)

    def tick(self, now: float) -> list[Command]:
        if self.leading:
            if self.beat_at is None or now >= self.beat_at:
                return self._beat(now)
            return []
        if self.election_at is None or now < self.election_at:
            return []
        if not self.votes():
            self._rearm(now)
            return []
        return self._stand(now)

    def show_life(self, peer: Peer, now: float) -> None:
        """Leader: a message of that peer came."""
        if self.leading:
            self.heard[peer] = now

    def repair(self, peer: Peer, number: int) -> list[Command]:
        """Leader: that peer holds only view `number`; send what it lacks."""
        if not self.leading or self.agreed_entry is None or self.agreed is None or number >= self.agreed.number:
            return []
        return [Send(peer, Propose(entry=self.agreed_entry, term=self.term, decided=True))]

    def on_message(self, peer: Peer, message: Wire, now: float) -> list[Command]:
        match message:
            case Lead():
                return self._on_lead(peer, message, now)
            case Propose():
                return self._on_propose(peer, message, now)
            case Accept():
                return self._on_accept(peer, message, now)
            case AskVote():
                return self._on_ask(peer, message, now)
            case Vote():
                return self._on_vote(peer, message, now)
        return []

    # --------------------------------------------------------------------------------------------------- private

    def _on_lead(self, peer: Peer, lead: Lead, now: float) -> list[Command]:
        if not self._follow(peer, lead.term, now):
            return []
        held = self.accepted
        if held is not None and held.view.number == lead.number and held.term == lead.decided_term:
            self._agree(held)
        return []

    def _on_propose(self, peer: Peer, message: Propose, now: float) -> list[Command]:
        if message.term < self.term:
            return [Send(peer, Accept(term=self.term, number=0))]  # tells an old leader that it is one
        if not self._follow(peer, message.term, now):
            return []
        entry = message.entry
        if self.accepted is None or _rank(entry) > _rank(self.accepted):
            self.accepted = entry
        if message.decided:
            self._agree(entry)
        return [Send(peer, Accept(term=self.term, number=entry.view.number))]

    def _on_accept(self, peer: Peer, message: Accept, now: float) -> list[Command]:
        if message.term > self.term:
            self._step_down(message.term, now)
            return []
        if not self.leading or message.term != self.term or not self.proposing:
            return []
        assert self.accepted is not None
        if message.number != self.accepted.view.number:
            return []
        self.yes.add(peer)
        return self._count(now)

    def _on_ask(self, peer: Peer, ask: AskVote, now: float) -> list[Command]:
        last = _rank(self.accepted) if self.accepted is not None else (0, 0)
        current = (ask.last_term, ask.last_number) >= last
        if ask.trial:
            contact = self.leading or now - self.heard_lead < self.settings.silence_s * 0.5
            granted = current and not contact and ask.term >= self.term
            return [Send(peer, Vote(term=self.term, granted=granted, trial=True))]
        if ask.term > self.term:
            self._step_down(ask.term, now)
        granted = ask.term == self.term and current and self.voted in (None, peer) and not self.leading
        if granted:
            self.voted = peer
            self._rearm(now)
        return [Send(peer, Vote(term=self.term, granted=granted))]

    def _on_vote(self, peer: Peer, vote: Vote, now: float) -> list[Command]:
        if vote.term > self.term:
            self._step_down(vote.term, now)
            return []
        if (vote.granted and vote.trial and self.role is Role.TRIAL) or (
            vote.granted and not vote.trial and self.role is Role.CANDIDATE and vote.term == self.term
        ):
            self.yes.add(peer)
        else:
            return []
        before, after = self._voters()
        if not (majority(before, self.yes) and majority(after, self.yes)):
            return []
        return self._campaign(now) if self.role is Role.TRIAL else self._become_leader(now)

    def _follow(self, peer: Peer, term: int, now: float) -> bool:
        """Take `peer` for the leader of `term`, unless that term is over."""
        if term < self.term or (term == self.term and self.leading):
            return False
        if term > self.term:
            self._step_down(term, now)
        self.role, self.leader, self.heard_lead = Role.FOLLOWER, peer, now
        self._rearm(now)
        return True

    def _stand(self, now: float) -> list[Command]:
        """Ask whether an election would be won, before disturbing anybody."""
        self.role, self.leader, self.yes = Role.TRIAL, None, {self.name}
        self._rearm(now)
        before, after = self._voters()
        if majority(before, self.yes) and majority(after, self.yes):
            return self._campaign(now)
        return self._ask(trial=True)

    def _campaign(self, now: float) -> list[Command]:
        self.term += 1
        self.role, self.voted, self.yes = Role.CANDIDATE, self.name, {self.name}
        self._rearm(now)
        before, after = self._voters()
        if majority(before, self.yes) and majority(after, self.yes):
            return self._become_leader(now)
        return self._ask(trial=False)

    def _ask(self, trial: bool) -> list[Command]:
        assert self.accepted is not None
        term, number = _rank(self.accepted)
        ask = AskVote(term=self.term, last_term=term, last_number=number, trial=trial)
        return [Send(peer, ask) for peer in self._everyone()]

    def _become_leader(self, now: float) -> list[Command]:
        self.role, self.leader = Role.LEADER, self.name
        self.heard = dict.fromkeys(self._everyone(), now)
        assert self.accepted is not None
        if self.proposing:  # an inherited proposal may have been agreed: only it can follow
            self.accepted = Entry(term=self.term, view=self.accepted.view, before=self.accepted.before)
            return self._push(now)
        return self._beat(now)

    def _push(self, now: float) -> list[Command]:
        assert self.accepted is not None
        self.yes = {self.name}
        self.beat_at = now + self.settings.beat_s
        message = Propose(entry=self.accepted, term=self.term)
        return [Send(peer, message) for peer in self._everyone()] + self._count(now)

    def _count(self, now: float) -> list[Command]:
        before, after = self._voters()
        if not (majority(before, self.yes) and majority(after, self.yes)):
            return []
        assert self.accepted is not None
        self._agree(self.accepted)
        return self._beat(now)

    def _beat(self, now: float) -> list[Command]:
        """Tell everyone that I lead and what is agreed; stop leading when a majority is no longer heard."""
        self.beat_at = now + self.settings.beat_s
        before, after = self._voters()
        alive = {peer for peer, at in self.heard.items() if now - at < self.settings.silence_s} | {self.name}
        new = {peer for peer in self._everyone() if peer not in self.heard}
        self.heard.update(dict.fromkeys(new, now))
        if not (majority(before, alive | new) and majority(after, alive | new)):
            self._step_down(self.term, now)
            return []
        assert self.agreed is not None and self.agreed_entry is not None
        lead = Lead(term=self.term, number=self.agreed.number, decided_term=self.agreed_entry.term)
        joining = peers_of(self.agreed.joining)
        listeners = dict.fromkeys(self._everyone() + tuple(peer for peer in joining if peer != self.name))
        commands: list[Command] = [Send(peer, lead) for peer in listeners]
        if self.proposing:  # proposals may have been lost
            message = Propose(entry=self.accepted, term=self.term) if self.accepted else None
            assert message is not None
            commands += [Send(peer, message) for peer in self._everyone() if peer not in self.yes]
        if self.name not in after and not self.proposing:
            self._step_down(self.term, now)  # agreed to go
        return commands

    def _agree(self, entry: Entry) -> None:
        if self.accepted is None or _rank(self.accepted) < _rank(entry):
            self.accepted = entry
        if self.agreed is not None and entry.view.number < self.agreed.number:
            return
        if self.accepted.view.number == entry.view.number:
            entry = self.accepted  # proposed again by a later leader: the same view under a higher term
        if self.agreed is None or entry.view.number > self.agreed.number:
            self.fresh.append(entry.view)
        self.agreed, self.agreed_entry = entry.view, entry

    def _step_down(self, term: int, now: float) -> None:
        if term > self.term:
            self.term, self.voted = term, None
        self.role, self.leader, self.beat_at = Role.FOLLOWER, None, None
        self._rearm(now)

    def _rearm(self, now: float) -> None:
        silence = self.settings.silence_s
        self.election_at = now + silence * (0.6 + 0.4 * self.rng.random())


def _rank(entry: Entry) -> tuple[int, int]:
    """Which of two proposals is newer: the higher term, then the higher number (Raft section 5.4.1)."""
    return entry.term, entry.view.number

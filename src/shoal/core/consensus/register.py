"""One replicated value: the members agree on a sequence of Views, and on who leads.

This is Raft (Ongaro and Ousterhout 2014) cut down to a register: every proposal holds the whole next View, so only the
newest one is kept and there is no log. At most one proposal is in flight; it is agreed when majorities of the voters
before *and* after it have accepted (joint consensus in one step), and a candidate that holds an unagreed proposal
needs votes from majorities of both. Two halves of a split network therefore never agree on different successors of one
view, which is all that committing a step needs. Pre-votes keep a lonely peer from disturbing a working leader; a
leader that no longer hears a majority stops leading. Peers keep nothing on disk: a restarted process is a new peer
under a new name.

Nobody's word is enough. A view counts as agreed with the signed acceptances of both majorities, a leader leads with the signed votes
of a majority of the newest view that the follower holds; messages of anybody but voters change nothing. A voter's claim of a higher
term raises mine by TERMS a beat at most; two voters must claim it for a leader to stand down, and not again for ever longer. So a peer
whose term ran ahead alone comes back to a proven leader's, if it has not pledged a higher one: by a vote for another, or by accepting.
What a lying elected leader could still do is narrowed by validity.py: no voter accepts a view that cannot follow the one before.

For peer.py; what the views say is leader.py's business.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from shoal.core.consensus.certificates import digest, majority, proves, signers
from shoal.core.consensus.validity import flaw
from shoal.core.messages import (
    Accept,
    Command,
    Entry,
    Lead,
    Member,
    Note,
    Peer,
    Proof,
    Propose,
    Send,
    Settings,
    Signed,
    View,
    Vote,
    VoteRequest,
    Wire,
)
from shoal.core.names import key_of

if TYPE_CHECKING:
    from random import Random

TERMS = (
    16  # by which a claim raises my term in a beat: it cannot be used up, and an honest peer is rarely so far behind
)
TURNS = 16  # changes of the voters that a peer may have missed and still be brought up to date without coming in anew
CLAIMS = 2  # voters that say so, where there are so many, for a leader to stand down
PAUSES = 8  # doublings of the time before claims can make me stand down again


class Role(Enum):
    FOLLOWER = "follower"
    TRIAL = "trial"  # asking whether an election would be won
    CANDIDATE = "candidate"
    LEADER = "leader"


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
        self.agreed_proof: Proof | None = None  # none: the operator's override
        self.accepted: Entry | None = None  # newest proposal accepted, agreed or not
        self.yes: dict[Peer, Signed] = {}  # who accepted my proposal, or voted for me
        self.votes: tuple[Signed, ...] = ()  # leader: those that elected me
        self.followers: set[Peer] = set()  # leader: who has shown that it follows me in this term
        self.proven: tuple[int, Peer] | None = None  # a term and its leader, as signatures have shown
        self.heard_lead = float("-inf")
        self.heard: dict[Peer, float] = {}  # leader: when each voter last showed life
        self.election_at: float | None = None
        self.beat_at: float | None = None
        self.fresh: list[View] = []
        self.stalled = ""  # leader: why nothing has been committed for long, for everybody
        self._raised_at = float("-inf")  # when a claim last raised my term
        self._pledged = (
            0  # the highest term in which I voted for another, or accepted something: never back before that
        )
        self._claims: dict[str, float] = {}  # leader: by key, when it last said that the term is higher
        self._stood_down: tuple[int, float] = (0, float("-inf"))  # because of claims: how often; not again before
        self._turns: list[Propose] = []  # newest agreed views that changed the voters
        self._digests: dict[int, tuple[View, str]] = {}  # of the newest views, by number

    # ------------------------------------------------------------------------------------------------- questions

    @property
    def leading(self) -> bool:
        return self.role is Role.LEADER

    @property
    def proposing(self) -> bool:
        """A proposal (mine or inherited) is not agreed yet."""
        if self.accepted is None:
            return False
        return self.agreed is None or self.accepted.view.number > self.agreed.number

    @property
    def deadline(self) -> float | None:
        return self.beat_at if self.leading else self.election_at

    def votes_here(self) -> bool:
        """Am I a voter of the newest view I hold?"""
        entry = self.accepted
        return entry is not None and (self.name in entry.before or self.name in entry.view.voters)

    def entitled(self, peer: Peer) -> bool:
        """That peer is a voter of the newest view I hold, agreed or accepted: it has a say."""
        views = [self.agreed] if self.agreed is not None else []
        if self.accepted is not None:
            views.append(self.accepted.view)
            if peer in self.accepted.before:
                return True
        return any(peer in view.voters for view in views)

    def certified(self, number: int) -> list[Propose]:
        """For a peer that holds view `number`: the newest agreed view with the signatures that prove it, and before it those that changed
        the voters, so that each is signed by voters whom the peer knows. Nothing if there is none newer, or an override was the last."""
        entry = self.agreed_entry
        if entry is None or self.agreed_proof is None or entry.view.number <= number:
            return []
        between = [one for one in self._turns if number < one.entry.view.number < entry.view.number]
        return [*between, Propose(entry=entry, term=entry.term, proof=self.agreed_proof)]

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
        own = Signed(self.name)
        self._agree(entry, Proof(self.name, (own,)))
        self.yes = {self.name: own}
        return self._become_leader(now)

    def propose(self, view: View, now: float) -> list[Command]:
        """Leader: put `view` forward as the successor of the agreed one."""
        assert self.leading and not self.proposing and self.agreed is not None
        assert view.number == self.agreed.number + 1
        self.accepted = Entry(term=self.term, view=view, before=self.agreed.voters)
        return self._push(now)

    def impose(self, entry: Entry, now: float) -> None:
        """The operator's override stands for every signature: the entry is agreed, and a leader is to be elected."""
        if entry.term < self.term:
            return
        self._step_down(entry.term, now)
        self.heard_lead = now
        self._agree(entry, None)

    def resign(self, now: float) -> None:
        """Leader: let another lead, and do not stand before the others have elected one."""
        self._step_down(self.term, now)
        self.election_at = now + 3 * self.settings.silence_s

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
        if not self.votes_here():
            self._rearm(now)
            return []
        return self._stand(now)

    def show_life(self, peer: Peer, now: float) -> None:
        """Leader: a message of that peer came."""
        if self.leading and peer in self.heard:
            self.heard[peer] = now

    def repair(self, peer: Peer, term: int, number: int) -> list[Command]:
        """Leader: that peer follows `term` and holds view `number`; send what it lacks."""
        if not self.leading or self.agreed is None:
            return []
        if term == self.term:
            self.followers.add(peer)
        return [Send(peer, one) for one in self.certified(number)]

    def on_message(self, peer: Peer, message: Wire, now: float) -> list[Command]:
        """The caller has seen to it that the peer is `entitled`, or that the message proves itself."""
        match message:
            case Lead():
                return self._on_lead(peer, message, now)
            case Propose(proof=None):
                return self._on_propose(peer, message, now)
            case Propose():
                return self._on_proof(peer, message, now)
            case Accept():
                return self._on_accept(peer, message, now)
            case VoteRequest():
                return self._on_ask(peer, message, now)
            case Vote():
                return self._on_vote(peer, message, now)
        return []

    # --------------------------------------------------------------------------------------------------- private

    def _on_lead(self, peer: Peer, lead: Lead, now: float) -> list[Command]:
        if not self._follow(peer, lead.term, lead.votes, now):
            return self._refuse(peer, lead.term)
        held = self.accepted
        if (
            held is not None
            and lead.proof is not None
            and (held.view.number, held.term) == (lead.number, lead.decided_term)
            and self._digest(held.view) == lead.digest
            and proves(held, lead.proof)
        ):
            self._agree(held, lead.proof)
        return []

    def _on_propose(self, peer: Peer, message: Propose, now: float) -> list[Command]:
        if message.entry.term != message.term or not self._follow(peer, message.term, (), now):
            return self._refuse(peer, message.term)
        entry, agreed = message.entry, self.agreed
        if agreed is None:
            return []  # the proof of what it follows is on its way
        view = entry.view
        if view.number == agreed.number:
            if view != agreed:
                return []
        elif view.number != agreed.number + 1 or entry.before != agreed.voters:
            return []  # I have missed one, and say so with my next pulse
        else:
            wrong = flaw(agreed, view, self.settings)
            if wrong:
                return [Note("refused", f"{peer} proposes a view that cannot follow: {wrong}")]
        if self.accepted is None or _rank(entry) > _rank(self.accepted):
            self.accepted = entry
        elif self.accepted != entry:
            return []
        self._pledged = max(self._pledged, self.term)
        return [Send(peer, Accept(self.term, view.number, self._digest(view), Signed(self.name)))]

    def _refuse(self, peer: Peer, term: int) -> list[Command]:
        """Tells an old leader that it is one."""
        return [Send(peer, Accept(term=self.term, number=0))] if term < self.term else []

    def _on_proof(self, peer: Peer, message: Propose, now: float) -> list[Command]:
        """An agreed view that I may have missed. It proves who led then, too."""
        entry, proof = message.entry, message.proof
        assert proof is not None
        if not self._believable(entry, proof, now):
            return []
        if entry.term > self.term:
            self._step_down(entry.term, now)
        self._agree(entry, proof)
        if entry.term == self.term and not self.leading:
            self.proven = entry.term, proof.leader
            if peer == proof.leader:
                self._follow(peer, entry.term, (), now)
        return []

    def _believable(self, entry: Entry, proof: Proof, now: float) -> bool:
        """Signed by both majorities, and those that I know are among them. A peer that belongs to no view, or hears no leader, has
        nobody left to compare with."""
        agreed = self.agreed
        if not proves(entry, proof) or flaw(None, entry.view, self.settings):
            return False
        if agreed is None:
            return True
        if entry.view.number <= agreed.number:
            return False
        if set(entry.before) == set(agreed.voters) or majority(agreed.voters, signers(proof.signed)):
            return True
        outside = all(member.peer != self.name for member in agreed.members + agreed.joining)
        return outside or (not self.leading and now - self.heard_lead > 2 * self.settings.silence_s)

    def _on_accept(self, peer: Peer, message: Accept, now: float) -> list[Command]:
        if message.by is None:
            if message.term > self.term and self.leading:
                self._claimed(peer, message.term, now)
            return []
        if not self.leading or message.term != self.term or message.by.peer != peer:
            return []
        assert self.accepted is not None
        if message.number != self.accepted.view.number or message.digest != self._digest(self.accepted.view):
            return []
        self.followers.add(peer)
        if self.proposing:
            self.yes[peer] = message.by
            return self._count(now)
        proof, entry = self.agreed_proof, self.agreed_entry
        if proof is not None and entry is self.accepted and peer not in signers(proof.signed):
            self.agreed_proof = msgspec.structs.replace(
                proof, signed=(*proof.signed, message.by)
            )  # the fuller the better
        return []

    def _on_ask(self, peer: Peer, ask: VoteRequest, now: float) -> list[Command]:
        last = _rank(self.accepted) if self.accepted is not None else (0, 0)
        current = (ask.last_term, ask.last_number) >= last
        contact = self.leading or now - self.heard_lead < self.settings.silence_s * 0.5
        commands: list[Command] = []
        if self.agreed is not None and ask.last_number < self.agreed.number:
            commands = [Send(peer, one) for one in self.certified(ask.last_number)]
        if ask.trial:
            granted = current and not contact and ask.term >= self.term
            return [*commands, Send(peer, Vote(term=self.term, granted=granted, trial=True))]
        if ask.term > self.term and (self.leading or not contact):
            self._claimed(peer, ask.term, now)
        granted = ask.term == self.term and current and self.voted in (None, peer) and not self.leading
        if granted:
            self.voted, self._pledged = peer, self.term
            self._rearm(now)
        by = Signed(self.name) if granted else None
        return [*commands, Send(peer, Vote(term=self.term, granted=granted, by=by))]

    def _on_vote(self, peer: Peer, vote: Vote, now: float) -> list[Command]:
        if self.role not in (Role.TRIAL, Role.CANDIDATE):
            return []
        if vote.term > self.term:
            self._claimed(peer, vote.term, now)
            return []
        if not vote.granted:
            return []
        if vote.trial and self.role is Role.TRIAL:
            self.yes[peer] = Signed(peer)
        elif self.role is Role.CANDIDATE and vote.term == self.term and vote.by is not None and vote.by.peer == peer:
            self.yes[peer] = vote.by
        else:
            return []
        before, after = self._voters()
        if not (majority(before, self.yes) and majority(after, self.yes)):
            return []
        return self._campaign(now) if self.role is Role.TRIAL else self._become_leader(now)

    def _claimed(self, peer: Peer, term: int, now: float) -> None:
        """A voter says that the term is higher. It may be so, and mine follows, but in small steps."""
        if now < self._raised_at + self.settings.beat_s:
            return
        if self.leading:
            self._claims = {key: at for key, at in self._claims.items() if now - at < self.settings.silence_s}
            self._claims[key_of(peer)] = now
            times, until = self._stood_down
            if len(self._claims) < min(CLAIMS, len(self._everyone())) or now < until:
                return
            self._stood_down = times + 1, now + self.settings.silence_s * 2 ** min(times, PAUSES)
        self._raised_at = now
        self._step_down(min(term, self.term + TERMS), now)

    def _follow(self, peer: Peer, term: int, votes: tuple[Signed, ...], now: float) -> bool:
        """Take `peer` for the leader of `term`, unless that term is over or nothing shows that it was elected."""
        ahead = term < self.term and not self.leading and self._pledged <= term  # alone: nobody relies on it
        if (term < self.term and not ahead) or (term == self.term and self.leading):
            return False
        if self.proven != (term, peer):
            newer = self.proven is not None and self.proven[0] > term
            if newer or self.agreed is None or not majority(self.agreed.voters, signers(votes)):
                return False
            self.proven = term, peer
        if term != self.term:
            self.term, self.voted = term, None
        self.role, self.leader, self.heard_lead, self.beat_at = Role.FOLLOWER, peer, now, None
        self._rearm(now)
        return True

    def _stand(self, now: float) -> list[Command]:
        """Ask whether an election would be won, before disturbing anybody."""
        self.role, self.leader, self.yes = Role.TRIAL, None, {self.name: Signed(self.name)}
        self._rearm(now)
        before, after = self._voters()
        if majority(before, self.yes) and majority(after, self.yes):
            return self._campaign(now)
        return self._ask(trial=True)

    def _campaign(self, now: float) -> list[Command]:
        self.term += 1
        self.role, self.voted, self.yes = Role.CANDIDATE, self.name, {self.name: Signed(self.name)}
        self._rearm(now)
        before, after = self._voters()
        if majority(before, self.yes) and majority(after, self.yes):
            return self._become_leader(now)
        return self._ask(trial=False)

    def _ask(self, trial: bool) -> list[Command]:
        assert self.accepted is not None
        term, number = _rank(self.accepted)
        ask = VoteRequest(term=self.term, last_term=term, last_number=number, trial=trial)
        return [Send(peer, ask) for peer in self._everyone()]

    def _become_leader(self, now: float) -> list[Command]:
        self.role, self.leader = Role.LEADER, self.name
        self.votes, self.proven, self.followers = tuple(self.yes.values()), (self.term, self.name), {self.name}
        self.heard = dict.fromkeys(self._everyone(), now)
        assert self.accepted is not None
        commands = self._beat(now)
        if self.proposing and self.leading:  # an inherited proposal may have been agreed: only it can follow
            self.accepted = Entry(term=self.term, view=self.accepted.view, before=self.accepted.before)
            commands += self._push(now)
        return commands

    def _push(self, now: float) -> list[Command]:
        assert self.accepted is not None
        self.yes = {self.name: Signed(self.name)}
        self.beat_at = now + self.settings.beat_s
        message = Propose(entry=self.accepted, term=self.term)
        return [Send(peer, message) for peer in self._everyone()] + self._count(now)

    def _count(self, now: float) -> list[Command]:
        before, after = self._voters()
        if not (majority(before, self.yes) and majority(after, self.yes)):
            return []
        assert self.accepted is not None
        self._agree(self.accepted, Proof(self.name, tuple(self.yes.values())))
        return self._beat(now, agreed=True)

    def _beat(self, now: float, agreed: bool = False) -> list[Command]:
        """Tell everyone that I lead and what is agreed; stop leading when a majority is no longer heard."""
        self.beat_at = now + self.settings.beat_s
        before, after = self._voters()
        alive = {peer for peer, at in self.heard.items() if now - at < self.settings.silence_s} | {self.name}
        new = {peer for peer in self._everyone() if peer not in self.heard}
        self.heard.update(dict.fromkeys(new, now))
        if not (majority(before, alive | new) and majority(after, alive | new)):
            self._step_down(self.term, now)
            return []
        commands = self._lead(agreed)
        if self.proposing:  # proposals may have been lost, or what they follow
            assert self.accepted is not None
            newest, message = self.certified(0)[-1:], Propose(entry=self.accepted, term=self.term)
            for peer in self._everyone():
                if peer not in self.yes and self.accepted.term == self.term:
                    if peer not in self.followers:
                        commands += [Send(peer, one) for one in newest]
                    commands.append(Send(peer, message))
        if self.name not in after and not self.proposing:
            self._step_down(self.term, now)  # agreed to go
        return commands

    def _lead(self, agreed: bool) -> list[Command]:
        """To all voters and joiners; with the proof of the newest view when it has just been `agreed`."""
        assert self.agreed is not None and self.agreed_entry is not None
        lead = Lead(
            term=self.term,
            number=self.agreed.number,
            decided_term=self.agreed_entry.term,
            digest=self._digest(self.agreed),
            stalled=self.stalled,
            proof=self.agreed_proof if agreed else None,
        )
        elected = msgspec.structs.replace(lead, votes=self.votes)
        joining = peers_of(self.agreed.joining)
        listeners = dict.fromkeys(self._everyone() + tuple(peer for peer in joining if peer != self.name))
        return [Send(peer, lead if peer in self.followers else elected) for peer in listeners]

    def _agree(self, entry: Entry, proof: Proof | None) -> None:
        if self.accepted is None or _rank(self.accepted) < _rank(entry):
            self.accepted = entry
        if self.agreed is not None and entry.view.number < self.agreed.number:
            return
        if self.agreed is None or entry.view.number > self.agreed.number:
            self.fresh.append(entry.view)
            if proof is None:
                self._turns = []
            elif set(entry.before) != set(entry.view.voters):
                self._turns = [*self._turns, Propose(entry=entry, term=entry.term, proof=proof)][-TURNS:]
        self.agreed, self.agreed_entry, self.agreed_proof = entry.view, entry, proof

    def _step_down(self, term: int, now: float) -> None:
        if term > self.term:
            self.term, self.voted = term, None
        self.role, self.leader, self.beat_at = Role.FOLLOWER, None, None
        self._rearm(now)

    def _rearm(self, now: float) -> None:
        silence = self.settings.silence_s
        self.election_at = now + silence * (0.6 + 0.4 * self.rng.random())

    def _digest(self, view: View) -> str:
        """Made once for each of the newest views."""
        known = self._digests.get(view.number)
        if known is None or known[0] is not view:
            self._digests = {number: one for number, one in self._digests.items() if number >= view.number - 1}
            known = self._digests[view.number] = view, digest(view)
        return known[1]


def _rank(entry: Entry) -> tuple[int, int]:
    """Which of two proposals is newer: the higher term, then the higher number (Raft section 5.4.1)."""
    return entry.term, entry.view.number

"""One replicated value: the members agree on a sequence of Views, and on who leads.

This is Raft (Ongaro and Ousterhout 2014) reduced to a register: each proposal holds the whole next View, so that only the newest is
kept and there is no log. A proposal is agreed when quorums of the voters before *and* after it have accepted it (joint consensus in
one step); a candidate that holds an unagreed proposal needs votes of both quorums. Two halves of a split network therefore never
agree on different successors of one view, which is all that committing a step needs. Peers keep nothing on disk: a restarted process
is a new peer with a new name.

No single peer is trusted. A view counts as agreed with the signed acceptances of both quorums (certificates.py); messages of peers
that are not voters change nothing; no voter accepts a view that cannot follow the one before (validity.py), whoever proposes it.

`Register` is what peer.py uses. Behind it: agreed.py stores views and proposals, election.py decides who leads, replication.py is the
leader's side. Here is the follower's side: which proposals it accepts and which proofs it believes. What the views say is decided in
core/leader.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.core.consensus.agreed import AgreedViews, rank
from shoal.core.consensus.certificates import proves, quorum, signers
from shoal.core.consensus.election import Election, ElectionRole
from shoal.core.consensus.replication import Replication
from shoal.core.consensus.validity import flaw
from shoal.core.messages import (
    Accept,
    Command,
    Entry,
    Lead,
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

if TYPE_CHECKING:
    from random import Random


class Register:
    """The replicated value as one peer holds it."""

    def __init__(self, name: Peer, settings: Settings, rng: Random) -> None:
        self.name, self.settings = name, settings
        self.views = AgreedViews(name)
        self.election = Election(name, settings, rng, self.views)
        self.judge: Callable[[Peer, View, View, float], str] = lambda *_: ""  # why I do not accept a leader's next view
        self.replication = Replication(name, settings, self.views, self.election)

    # ------------------------------------------------------------------------------------------------- questions

    @property
    def term(self) -> int:
        return self.election.term

    @property
    def leader(self) -> Peer | None:
        """The peer that is followed; this peer itself while it leads."""
        return self.election.leader

    @property
    def leading(self) -> bool:
        return self.election.role is ElectionRole.LEADER  # asked several times in every event

    @property
    def heard_leader_at(self) -> float:
        return self.election.heard_leader_at

    @property
    def agreed(self) -> View | None:
        return self.views.view

    @property
    def accepted(self) -> Entry | None:
        """The newest proposal accepted, agreed or not."""
        return self.views.accepted

    @property
    def proposing(self) -> bool:
        """A proposal was accepted here that is not agreed yet."""
        return self.views.proposing

    @property
    def deadline(self) -> float | None:
        election = self.election
        return self.replication.beat_at if election.role is ElectionRole.LEADER else election.election_at

    def entitled(self, peer: Peer) -> bool:
        """`peer` is a voter of the newest view held here: its messages count."""
        return self.views.entitled(peer)

    def take(self) -> list[View]:
        """The views agreed since the last call, oldest first."""
        return self.views.take()

    # --------------------------------------------------------------------------------------------------- actions

    def found(self, view: View, now: float) -> list[Command]:
        """Begin a run: this peer is the first view's only voter."""
        entry = Entry(term=1, view=view, before=())
        self.views.agree(entry, Proof(self.name, (Signed(self.name),)))
        self.election.found()
        return self.replication.start(now)

    def propose(self, view: View, now: float) -> list[Command]:
        """Leader: propose `view` as the successor of the agreed one."""
        return self.replication.propose(view, now)

    def impose(self, entry: Entry, now: float) -> None:
        """Take the operator's override: the entry is agreed without signatures, and a leader has to be elected."""
        if entry.term < self.term:
            return
        self.election.step_down(entry.term, now)
        self.election.heard_leader_at = now
        self.views.agree(entry, None)

    def resign(self, now: float) -> None:
        """Leader: let another lead."""
        self.election.resign(now)

    def await_leader(self, now: float) -> None:
        """Count the leader's silence from now on."""
        self.election.heard_leader_at = now

    def forgive(self, gap_s: float, now: float) -> None:
        """This process was stopped for `gap_s`: nobody's silence in that time counts."""
        self.replication.forgive(gap_s, now)
        self.election.forgive(gap_s, now)

    def show_life(self, peer: Peer, now: float) -> None:
        """A message of that peer arrived."""
        if self.leading:
            self.replication.show_life(peer, now)

    def repair(self, peer: Peer, term: int, number: int, now: float) -> list[Command]:
        """Leader: `peer` follows `term` and holds view `number`: send the views that it lacks."""
        return self.replication.repair(peer, term, number, now) if self.leading else []

    def tick(self, now: float) -> list[Command]:
        at = self.deadline
        if self.leading:
            return self.replication.beat(now) if at is None or now >= at else []
        if at is None or now < at:
            return []
        if not self.views.votes_here():
            self.election.rearm(now)
            return []
        commands = self.election.stand(now)
        return commands + self._lead_if_elected(now)

    def on_message(self, peer: Peer, message: Wire, now: float) -> list[Command]:
        """The caller has checked that `peer` is `entitled`, or that the message carries its own proof."""
        match message:
            case Lead():
                return self._on_lead(peer, message, now)
            case Propose(proof=None):
                return self._on_propose(peer, message, now)
            case Propose():
                return self._on_proof(peer, message, now)
            case Accept():
                return self.replication.on_accept(peer, message, now) if self.leading else []
            case VoteRequest():
                return self.election.on_request(peer, message, now)
            case Vote():
                commands = self.election.on_vote(peer, message, now)
                return commands + self._lead_if_elected(now)
        return []

    # --------------------------------------------------------------------------------------------------- private

    def _lead_if_elected(self, now: float) -> list[Command]:
        return self.replication.start(now) if self.leading and self.replication.term != self.term else []

    def _on_lead(self, peer: Peer, lead: Lead, now: float) -> list[Command]:
        if not self.election.follow(peer, lead.term, lead.votes, now):
            return self._refuse(peer, lead.term)
        held, proof = self.accepted, lead.proof
        if held is None or proof is None or (held.view.number, held.term) != (lead.number, lead.decided_term):
            return []
        if held.view.digest == lead.digest and proves(held, proof):
            self.views.agree(held, proof)
        return []

    def _on_propose(self, peer: Peer, message: Propose, now: float) -> list[Command]:
        """Accept the proposal, unless it cannot follow the agreed view or a newer one was accepted."""
        if message.entry.term != message.term or not self.election.follow(peer, message.term, (), now):
            return self._refuse(peer, message.term)
        entry, agreed = message.entry, self.agreed
        if agreed is None:
            return []  # the proof of the view before it is on its way
        view = entry.view
        if view.number == agreed.number:
            if view != agreed:
                return []
        elif view.number != agreed.number + 1 or entry.before != agreed.voters:
            return []  # a view is missing here, as the next heartbeat shows the leader
        else:
            wrong = flaw(agreed, view, self.settings) or self.judge(peer, agreed, view, now)
            if wrong:
                return [Note("refused", f"{peer} proposes a view that cannot follow: {wrong}")]
        if self.accepted is None or rank(entry) > rank(self.accepted):
            self.views.accepted = entry
        elif self.accepted != entry:
            return []
        self.election.pledge()
        return [Send(peer, Accept(self.term, view.number, view.digest, Signed(self.name)))]

    def _refuse(self, peer: Peer, term: int) -> list[Command]:
        """Show a deposed leader that its term is over, and one of this term that its votes are missing here."""
        return [Send(peer, Accept(term=self.term, number=0))] if term <= self.term else []

    def _on_proof(self, peer: Peer, message: Propose, now: float) -> list[Command]:
        """Take an agreed view that was missed here. Its proof also proves who led its term."""
        entry, proof = message.entry, message.proof
        assert proof is not None
        if not self._believable(entry, proof, now):
            return []
        if entry.term > self.term:
            self.election.step_down(entry.term, now)
        self.views.agree(entry, proof)
        if entry.term == self.term and not self.leading:
            self.election.proven = entry.term, proof.leader
            if peer == proof.leader:
                self.election.follow(peer, entry.term, (), now)
        return []

    def _believable(self, entry: Entry, proof: Proof, now: float) -> bool:
        """Both quorums signed it, and a quorum of the voters known here is among them. A peer that is in no view, or that has
        received nothing from a leader for long, knows no voters to compare with."""
        agreed = self.agreed
        if agreed is not None and entry.view.number <= agreed.number:
            return False
        if not proves(entry, proof) or flaw(None, entry.view, self.settings):
            return False
        if agreed is None:
            return True
        if set(entry.before) == set(agreed.voters) and entry.view.founder == agreed.founder:
            return True
        if quorum(agreed.voters, signers(proof.signed), agreed.founder):
            return True
        outside = all(member.peer != self.name for member in agreed.members + agreed.joining)
        return outside or (not self.leading and now - self.heard_leader_at > 2 * self.settings.heartbeat_timeout_s)

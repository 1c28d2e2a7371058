"""The replicated value as one peer holds it: the newest agreed View with its proof, and the newest proposal that it accepted.

Terms and leaders are election.py's business, and whether to accept a proposal is register.py's. Here: what is stored, whose quorums
decide about it, and which proofs bring another peer up to date.
"""

from __future__ import annotations

from collections.abc import Iterable

from shoal.core.consensus.certificates import quorum, signers
from shoal.core.messages import Entry, Peer, Proof, Propose, Signed, View

TURNS = 16  # changes of the voters that a peer may have missed and still be brought up to date without a new admission
COMMITS = 32  # that a joiner may have missed and still catch up with (transfer/catch_up.py): only the view after each describes it


class AgreedViews:
    """`fresh` collects agreed views until `take` returns them."""

    def __init__(self, name: Peer) -> None:
        self.accepted: Entry | None = None  # newest proposal accepted, agreed or not
        self.entry: Entry | None = None  # newest agreed, and its view
        self.view: View | None = None
        self.proof: Proof | None = None  # of `entry`; none: the operator's override
        self.fresh: list[View] = []
        self._name = name
        self._turns: list[Propose] = []  # newest agreed views that changed the voters
        self._commits: list[Propose] = []  # newest agreed views that began a step

    # ------------------------------------------------------------------------------------------------- questions

    @property
    def proposing(self) -> bool:
        """A proposal was accepted here that is not agreed yet."""
        if self.accepted is None:
            return False
        return self.entry is None or self.accepted.view.number > self.entry.view.number

    def votes_here(self) -> bool:
        """This peer is a voter of the newest view that it holds."""
        entry = self.accepted
        return entry is not None and (self._name in entry.view.votes or self._name in entry.before)

    def entitled(self, peer: Peer) -> bool:
        """`peer` is a voter of the newest view held here, agreed or accepted: its messages count."""
        if self.entry is not None and peer in self.entry.view.votes:
            return True
        accepted = self.accepted
        return accepted is not None and (peer in accepted.view.votes or peer in accepted.before)

    def voters(self) -> tuple[tuple[Peer, ...], tuple[Peer, ...]]:
        """The two sets of voters whose quorums decide: before and after a proposal in flight. Without one the first set is empty."""
        assert self.accepted is not None
        after = self.accepted.view.voters
        return (self.accepted.before if self.proposing else ()), after

    def others(self) -> tuple[Peer, ...]:
        """All voters but this peer."""
        before, after = self.voters()
        return tuple(dict.fromkeys(peer for peer in before + after if peer != self._name))

    def decided_by(self, yes: Iterable[Peer]) -> bool:
        """Quorums of both sets of voters are in `yes`."""
        assert self.accepted is not None
        founder = self.accepted.view.founder
        return all(quorum(voters, yes, founder) for voters in self.voters())

    def certified(self, number: int, *, commits: bool = False) -> list[Propose]:
        """What brings a peer with view `number` up to date: the newest agreed view with the signatures that prove it, after the views
        that changed the voters, so that each is signed by voters whom that peer knows, and with `commits` those that began a step.
        Nothing if none is newer, or if the newest is the operator's override."""
        entry = self.entry
        if entry is None or self.proof is None or entry.view.number <= number:
            return []
        kept = {one.entry.view.number: one for one in (*self._turns, *(self._commits if commits else ()))}
        between = [kept[each] for each in sorted(kept) if number < each < entry.view.number]
        return [*between, Propose(entry=entry, term=entry.term, proof=self.proof)]

    # --------------------------------------------------------------------------------------------------- changes

    def agree(self, entry: Entry, proof: Proof | None) -> None:
        """Store an agreed entry. `proof` is None only for the operator's override."""
        if self.accepted is None or rank(self.accepted) < rank(entry):
            self.accepted = entry
        if self.entry is not None and entry.view.number < self.entry.view.number:
            return
        if self.entry is None or entry.view.number > self.entry.view.number:
            self.fresh.append(entry.view)
            self._keep(entry, proof)
        self.entry, self.view, self.proof = entry, entry.view, proof

    def add_signature(self, by: Signed) -> None:
        """A late acceptance of the newest agreed entry completes its proof."""
        proof = self.proof
        if proof is not None and self.entry is self.accepted and by.peer not in signers(proof.signed):
            self.proof = Proof(proof.leader, (*proof.signed, by))

    def take(self) -> list[View]:
        """The views agreed since the last call, oldest first."""
        fresh, self.fresh = self.fresh, []
        return fresh

    def _keep(self, entry: Entry, proof: Proof | None) -> None:
        """That newer agreed view, for peers that miss it."""
        if proof is None:
            self._turns, self._commits = [], []
            return
        certified = Propose(entry=entry, term=entry.term, proof=proof)
        if set(entry.before) != set(entry.view.voters):
            self._turns = [*self._turns, certified][-TURNS:]
        if self.entry is None or entry.view.step != self.entry.view.step:
            self._commits = [*self._commits, certified][-COMMITS:]


def rank(entry: Entry) -> tuple[int, int]:
    """Orders proposals from older to newer: by term, then by number (Raft section 5.4.1)."""
    return entry.term, entry.view.number

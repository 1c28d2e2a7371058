"""Terms, votes, and the leader that this peer follows: Raft's elections, with proofs instead of trust.

A follower that receives nothing from a leader for the election timeout first asks in a trial (Raft's pre-vote) whether it would win,
so that a peer with a bad connection does not disturb a working leader. A candidate needs the votes of quorums of the voters before
and after a proposal in flight. A peer follows a leader only if the signed votes of a quorum of the newest view held here show that
it was elected.

A voter's claim of a higher term raises the term here by TERMS a beat at most. CLAIMS voters must claim it before a leader stands down,
and each time the pause until claims can do so again doubles. A peer whose term advanced while it was alone returns to a proven leader's
lower term, unless it has pledged a higher one: by a vote for another peer, or by accepting a proposal.

For register.py. What the leader then sends is replication.py's business.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from shoal.core.consensus.agreed import AgreedViews, rank
from shoal.core.consensus.certificates import quorum, signers
from shoal.core.messages import Command, Peer, Send, Settings, Signed, Vote, VoteRequest
from shoal.core.names import key_of

if TYPE_CHECKING:
    from random import Random

TERMS = 16  # by which a claim raises the term in a beat: claims cannot use terms up; an honest peer is rarely further behind
CLAIMS = 2  # voters that must claim a higher term, where there are so many, before a leader stands down
DOUBT, GROWS, DOUBTED = (
    8.0,
    4.0,
    3,
)  # heartbeat timeouts for which a leader is doubted, times so much at each further one
PAUSES = 8  # doublings of the time before claims can make a leader stand down again


class ElectionRole(Enum):
    FOLLOWER = "follower"
    TRIAL = "trial"  # asking whether an election would be won
    CANDIDATE = "candidate"
    LEADER = "leader"


class Claims:
    """Claims of voters that the term is higher than here, and which of them count; leaders that this peer doubts."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._raised_at = float("-inf")  # when a claim last raised the term
        self._claimed_at: dict[str, float] = {}  # leader: when the peer of each key last claimed a higher term
        self._doubts: dict[
            str, tuple[int, float]
        ] = {}  # of each leader's key: how often it was doubted, and until when
        # How often claims deposed this leader; not again before
        self._stood_down: tuple[int, float] = 0, float("-inf")

    def doubt(self, peer: Peer, now: float) -> None:
        times = min(self._doubts.get(key_of(peer), (0, now))[0], DOUBTED)
        self._doubts[key_of(peer)] = times + 1, now + DOUBT * self._settings.heartbeat_timeout_s * GROWS**times

    def believe(self, peer: Peer) -> None:
        self._doubts.pop(key_of(peer), None)

    def doubted(self, peer: Peer, now: float) -> bool:
        return bool(self._doubts) and now < self._doubts.get(key_of(peer), (0, now))[1]

    def count(self, peer: Peer, voters: int, leading: bool, now: float) -> bool:
        """Whether the claim of `peer` takes effect now. `voters`: how many others a leader has."""
        if now < self._raised_at + self._settings.heartbeat_s:
            return False
        if leading:
            heartbeat_timeout_s = self._settings.heartbeat_timeout_s
            self._claimed_at = {key: at for key, at in self._claimed_at.items() if now - at < heartbeat_timeout_s}
            self._claimed_at[key_of(peer)] = now
            times, until = self._stood_down
            if len(self._claimed_at) < min(CLAIMS, voters) or now < until:
                return False
            self._stood_down = times + 1, now + heartbeat_timeout_s * 2 ** min(times, PAUSES)
        self._raised_at = now
        return True


class Election:
    """The term and role of this peer. After `stand` and `on_vote` the role may be LEADER."""

    def __init__(self, name: Peer, settings: Settings, rng: Random, views: AgreedViews) -> None:
        self.term = 0
        self.role = ElectionRole.FOLLOWER
        self.leader: Peer | None = None
        self.voted: Peer | None = None  # for whom, in this term
        self.votes: dict[Peer, Signed] = {}  # for this peer
        self.proven: tuple[int, Peer] | None = None  # a term and its leader, as signatures have shown
        self.heard_leader_at = float("-inf")
        self.election_at: float | None = None
        self._name, self._settings, self._rng, self._views = name, settings, rng, views
        self._claims = Claims(settings)
        # Highest term in which this peer voted for another or accepted a proposal: it never returns below
        self._pledged = 0
        # The last vote for another, which stands when the term returns to it
        self._cast: tuple[int, Peer] | None = None

    @property
    def leading(self) -> bool:
        return self.role is ElectionRole.LEADER

    # ---------------------------------------------------------------------------------------------- candidate

    def found(self) -> None:
        """Lead the first term of a new run, whose only voter is this peer."""
        self.term = 1
        self.votes = {self._name: Signed(self._name)}
        self._win()

    def stand(self, now: float) -> list[Command]:
        """Ask in a trial whether an election would be won."""
        self.role, self.leader = ElectionRole.TRIAL, None
        self.votes = {self._name: Signed(self._name)}
        self.rearm(now)
        return self.campaign(now) if self._views.decided_by(self.votes) else self._request_votes(trial=True)

    def campaign(self, now: float) -> list[Command]:
        """Stand for election in the next term."""
        self.term += 1
        self.role, self.voted = ElectionRole.CANDIDATE, self._name
        self.votes = {self._name: Signed(self._name)}
        self.rearm(now)
        if self._views.decided_by(self.votes):
            self._win()
            return []
        return self._request_votes(trial=False)

    def _request_votes(self, trial: bool) -> list[Command]:
        assert self._views.accepted is not None
        term, number = rank(self._views.accepted)
        request = VoteRequest(term=self.term, last_term=term, last_number=number, trial=trial)
        return [Send(peer, request) for peer in self._views.others()]

    def on_vote(self, peer: Peer, vote: Vote, now: float) -> list[Command]:
        if self.role not in (ElectionRole.TRIAL, ElectionRole.CANDIDATE):
            return []
        if vote.term > self.term:
            self.claimed(peer, vote.term, now)
            return []
        if not vote.granted:
            return []
        if vote.trial and self.role is ElectionRole.TRIAL:
            self.votes[peer] = Signed(peer)
        elif (
            self.role is ElectionRole.CANDIDATE
            and vote.term == self.term
            and vote.by is not None
            and vote.by.peer == peer
        ):
            self.votes[peer] = vote.by
        else:
            return []
        if not self._views.decided_by(self.votes):
            return []
        if self.role is ElectionRole.TRIAL:
            return self.campaign(now)
        self._win()
        return []

    def _win(self) -> None:
        self.role, self.leader, self.proven = ElectionRole.LEADER, self._name, (self.term, self._name)

    # -------------------------------------------------------------------------------------------------- voter

    def on_request(self, peer: Peer, request: VoteRequest, now: float) -> list[Command]:
        """Vote for `peer`, or not; a trial changes nothing here. A peer that is behind receives the newest view, too."""
        accepted, commands = self._views.accepted, list[Command]()
        last = rank(accepted) if accepted is not None else (0, 0)
        current = (request.last_term, request.last_number) >= last
        contact = self.leading or now - self.heard_leader_at < self._settings.heartbeat_timeout_s * 0.5
        contact = contact and (self.leader is None or not self.distrusts(self.leader, now))
        current = current and not self.distrusts(peer, now)
        commands += [Send(peer, one) for one in self._views.certified(request.last_number)]
        if request.trial:
            granted = current and not contact and request.term >= self.term
            return [*commands, Send(peer, Vote(term=self.term, granted=granted, trial=True))]
        if request.term > self.term and (self.leading or not contact):
            self.claimed(peer, request.term, now)
        granted = request.term == self.term and current
        return [*commands, Send(peer, self._vote(peer, now) if granted else Vote(term=self.term, granted=False))]

    def _vote(self, peer: Peer, now: float) -> Vote:
        """A peer that does not lead has one vote in a term."""
        if self.leading or self.voted not in (None, peer):
            return Vote(term=self.term, granted=False)
        self.voted, self._pledged, self._cast = peer, self.term, (self.term, peer)
        self.rearm(now)
        return Vote(term=self.term, granted=True, by=Signed(self._name))

    # ----------------------------------------------------------------------------------------------- follower

    def follow(self, peer: Peer, term: int, votes: tuple[Signed, ...], now: float) -> bool:
        """Follow `peer` as the leader of `term`. False if that term is over or nothing proves that it was elected."""
        if (term < self.term and not self._returns(peer, term, now)) or (term == self.term and self.leading):
            return False
        if self.proven != (term, peer):
            newer, agreed = self.proven is not None and self.proven[0] > term, self._views.view
            if newer or agreed is None or not quorum(agreed.voters, signers(votes), agreed.founder):
                return False
            self.proven = term, peer
        if term != self.term:
            self.term, self.voted = term, self._cast[1] if self._cast is not None and self._cast[0] == term else None
        self.role, self.leader, self.heard_leader_at = ElectionRole.FOLLOWER, peer, now
        if not self.distrusts(peer, now):
            self.rearm(now)
        return True

    def _returns(self, peer: Peer, term: int, now: float) -> bool:
        """No peer relies on the term held here, and it was not raised to have another than `peer` elected."""
        replaces = self.role is ElectionRole.CANDIDATE and self.distrusts(peer, now)
        return not self.leading and self._pledged <= term and not replaces

    def distrust(self, peer: Peer, now: float) -> None:
        """Another than that leader should lead (core/member/judge.py): it has not my vote for a while, longer each time."""
        self._claims.doubt(peer, now)
        soon = now + self._settings.heartbeat_timeout_s * 0.1 * self._rng.random()
        self.election_at = min(self.election_at or soon, soon)

    def trust(self, peer: Peer) -> None:
        self._claims.believe(peer)

    def distrusts(self, peer: Peer, now: float) -> bool:
        return self._claims.doubted(peer, now)

    def pledge(self) -> None:
        """A proposal of this term was accepted."""
        self._pledged = max(self._pledged, self.term)

    def claimed(self, peer: Peer, term: int, now: float) -> None:
        """A voter claims a higher term. It may be true: the term here follows, but in small steps."""
        voters = len(self._views.others()) if self.leading else 0
        if self._claims.count(peer, voters, self.leading, now):
            self.step_down(min(term, self.term + TERMS), now)

    def step_down(self, term: int, now: float) -> None:
        """Follow no leader, in `term` or in the current one if that is higher."""
        if term > self.term:
            self.term, self.voted = term, None
        self.role, self.leader = ElectionRole.FOLLOWER, None
        self.rearm(now)

    def resign(self, now: float) -> None:
        """Let another peer lead, and do not stand before the others have elected one."""
        self.step_down(self.term, now)
        self.election_at = now + 3 * self._settings.heartbeat_timeout_s

    def rearm(self, now: float) -> None:
        """Restart the election timeout, which is random as in Raft."""
        self.election_at = now + self._settings.heartbeat_timeout_s * (0.6 + 0.4 * self._rng.random())

    def forgive(self, gap_s: float, now: float) -> None:
        """This process was stopped for `gap_s`: the leader's silence in that time does not count."""
        self.heard_leader_at = min(now, self.heard_leader_at + gap_s)
        if self.election_at is not None:
            self.election_at = max(self.election_at, now + self._settings.heartbeat_s * 2)

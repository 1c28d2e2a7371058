"""When a step's books stop growing: the leader asks the owners of missing microbatches where each hangs, and finds the peer at fault.

Only the owner knows where its microbatch is. Its answer is compared with the books; two owners' answers convict a server. The first remedy
evicts no peer: another member becomes the owner, asks all replicas for their books, and continues. Evicted are only an owner from whom
others had to take over again and again, and a server that two owners wait for. For leader.py.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection
from math import inf

import msgspec

from shoal.core.leader.evictions import Conduct, Verdict
from shoal.core.leader.ledger import Ledger
from shoal.core.leader.membership import most_resting, owners_of
from shoal.core.messages import Booker, BookerRequest, Command, Index, Peer, Send, Settings, Stage, View
from shoal.core.names import key_of
from shoal.core.replica_state import owner_of

QUIET_BEATS = 20.0  # without a booking, before owners are asked; also how long they may wait for one peer,
FLOORS = 2.0  # or of min_request_timeout_s,
HOPS = 8.0  # or so many microbatches of the slowest peer
GAPS = 3.0  # or so many times the longest that this step or the one before has had,
# After so many steps: or sooner, after so many times the longest that any of these has had, but not than FLOORS
KNOWN, SHORT = 4, 10.0
TOO_LONG = 4.0  # times as long is too long for any hop, also where its owner knows nothing of that stage and is told that it runs
FIRST = 4.0  # times as long for the first booking of a step: it has all hops before it
ANSWER_BEATS = 10.0  # for an owner to say where its microbatch is
SLOW = 2  # servers that an owner has given up on with one hop: the owner may be at fault
STRIKES = 3  # times that others had to take over from an owner,
AGE = 64  # in so many steps
# Steps for which an owner gets no microbatches after a takeover, and times as many after each further one
REST, LONGER = 4, 4
ASKED = 16  # microbatches that are asked after at a time


class Case(msgspec.Struct):
    """A microbatch that hangs, and its owner's answer."""

    owner: Peer
    stage: Stage
    asked_at: float
    at_since: float  # when it began to wait
    at: Peer = ""  # for whom, as it says
    answer: Booker | None = None
    blameless: bool = False  # its owner waits for others


class Reassign(msgspec.Struct, frozen=True):
    """Another member is to own the microbatch; `blameless`: its owner waits for others."""

    why: str
    blameless: bool = False


class Unbooked(msgspec.Struct, frozen=True):
    """An owner has the gradient from that replica, whose books lack it."""

    peer: Peer


class Late(msgspec.Struct, frozen=True):
    """An owner waits in vain for the replica that it asked."""


Remedy = Reassign | Unbooked | Late


class Takeovers(msgspec.Struct, frozen=True):
    """Owners after others took over what hangs, with the reasons; owners to evict instead; and what is to be remembered of it."""

    owners: tuple[Index, ...]
    reasons: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    struck: dict[Peer, int]  # owners from whom others took over; 0: it waited for others, as it says
    cases: tuple[Index, ...]
    given: dict[Index, Peer]


class Gaps:
    """How long it took from one booking to the next."""

    def __init__(self) -> None:
        self.now_s = self.before_s = 0.0  # the longest between two bookings of this step, and of the one before
        self.longest_s = 0.0  # of this step, its beginning too
        self.of_steps: deque[float] = deque(maxlen=KNOWN)  # the same of the steps before
        self.most_s = inf  # for an owner to wait for one peer, however patient it is; where others' hops are measured
        self.remedied = False  # since the last booking: what the wait for the next one was is no measure


class Stalls:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._booked = -1
        self._grew_at: float | None = None
        self._cases: dict[Index, Case] = {}
        self._owned_by: dict[Index, set[Peer]] = {}  # who has had it in this step
        self._accusers: dict[Peer, set[str]] = {}  # of a server, keys of the owners that wait for it in vain
        self.gaps = Gaps()
        self._steps = 0
        self._strikes: Counter[Peer] = Counter()
        self._rests: dict[Peer, tuple[int, int]] = {}  # takeovers from an owner, and the step from which it owns again
        self._here_from_the_start = False  # this peer has led since the step began
        self._members: set[Peer] = set()

    def on_step(self, now: float, first: bool) -> None:
        """A step has begun; `first`: since this peer leads, which may have been in its middle."""
        self._booked, self._grew_at = -1, now
        if not first:
            self.gaps.of_steps.append(self.gaps.longest_s)
        self.gaps.longest_s = 0.0
        self.gaps.now_s, self.gaps.before_s = 0.0, self.gaps.now_s
        self._steps += 1
        if self._steps % AGE == 0:
            self._strikes.clear()
        self._cases.clear()
        self._owned_by.clear()
        self._accusers.clear()
        self._here_from_the_start = not first

    def on_view(self, view: View) -> None:
        """Cases are about owners of this view. What the wait for somebody that is evicted was is no measure."""
        members = {member.peer for member in view.members}
        self.gaps.remedied |= not self._members <= members
        self._members = members
        self._cases = {index: case for index, case in self._cases.items() if owner_of(view, index) == case.owner}
        for index in range(len(view.owners)):
            owner = owner_of(view, index)
            if owner is not None:
                self._owned_by.setdefault(index, set()).add(owner)

    def hand_over(self, index: Index, owner: Peer, stage: Stage, at: Peer, now: float) -> bool:
        """Another owner is to take that microbatch over; this one is not to blame, nor is `at` to have it. False: nobody can, as far as
        this leader knows who has had it in this step; then what holds for every microbatch that hangs decides."""
        if not self._here_from_the_start or self._members <= self._owned_by.get(index, {owner}) | {at}:
            return False
        self._cases[index] = Case(owner, stage, now, now, at, blameless=True)
        self.gaps.remedied = True
        return True

    def forgive(self, now: float) -> None:
        """This process was stopped: bookings and answers that arrived meanwhile are still to be read."""
        self._grew_at = now
        self._cases.clear()

    def on_answer(self, peer: Peer, answer: Booker, now: float) -> None:
        case = self._cases.get(answer.index)
        if case is None or case.owner != peer or case.stage != answer.stage:
            return
        case.answer = answer
        if case.at != answer.at:
            case.at, case.at_since = answer.at, now

    def ask(self, view: View, ledger: Ledger, slowest_s: float, most_s: float, now: float) -> list[Command]:
        """Questions to owners, when nothing has been booked for long; `slowest_s`: of the slowest peer for a microbatch. After `most_s` in
        any case, and twice that is too long for any hop: followers would doubt this leader before it acts."""
        if ledger.booked != self._booked or self._grew_at is None:
            if self._grew_at is not None and not self.gaps.remedied:
                self.gaps.longest_s = max(self.gaps.longest_s, now - self._grew_at)
                self.gaps.now_s = max(self.gaps.now_s, now - self._grew_at) if self._booked >= 0 else self.gaps.now_s
            self._booked, self._grew_at, self.gaps.remedied = ledger.booked, now, False
            self._cases.clear()
        usual_s = max(HOPS * slowest_s, GAPS * self.gaps.now_s, GAPS * self.gaps.before_s)
        self.gaps.most_s = min(TOO_LONG * max(self._patience_s, usual_s) if slowest_s else inf, most_s)
        quiet_s = max(self._patience_s, usual_s) * (1.0 if ledger.booked else FIRST)
        known_s = SHORT * max(self.gaps.of_steps, default=0.0) if len(self.gaps.of_steps) == KNOWN else quiet_s
        wait_s = min(quiet_s, max(known_s, usual_s, FLOORS * self._settings.min_request_timeout_s), most_s)
        if now - self._grew_at < wait_s:
            return []
        commands: list[Command] = []
        for index, stage in ledger.open_at(view.members)[:ASKED]:
            owner = owner_of(view, index)
            if owner is None:
                continue
            case = self._cases.get(index)
            if case is None or (case.owner, case.stage) != (owner, stage):
                self._cases[index] = Case(owner, stage, now, now)
            commands.append(Send(owner, BookerRequest(view.epoch, view.work, index, stage)))
        return commands

    def judge(self, view: View, ledger: Ledger, conduct: Conduct, now: float) -> tuple[list[Verdict], dict[Index, str]]:
        """Whom to evict, and which microbatches need another owner, with the reasons."""
        verdicts: list[Verdict | None] = []
        moves: dict[Index, str] = {}
        for index, case in list(self._cases.items()):
            case.blameless = False
            remedy = self._remedy(index, case, view, ledger, now)
            what = f"microbatch {index} of stage {case.stage}"
            if isinstance(remedy, Late):
                verdict, remedy = self._late(case, what, view)
                verdicts.append(verdict)
            if isinstance(remedy, Unbooked):
                said = f"its books lack {what}, whose owner {case.owner} has its gradient"
                verdicts.append(conduct.accuse(case.owner, remedy.peer, said, 1))
            elif isinstance(remedy, Reassign):
                case.blameless = remedy.blameless
                moves[index] = remedy.why
        for index, case in self._cases.items():  # an owner that gets nowhere with one hands over all that hang
            blamed = next(
                (one for one in moves if not self._cases[one].blameless and self._cases[one].owner == case.owner), None
            )
            if blamed is not None and index not in moves:
                moves[index] = moves[blamed]
        self.gaps.remedied |= bool(moves) or any(verdicts)
        return [verdict for verdict in verdicts if verdict is not None], moves

    def _remedy(self, index: Index, case: Case, view: View, ledger: Ledger, now: float) -> Remedy | None:
        """What its owner's answer calls for, if anything yet."""
        answer, what = case.answer, f"microbatch {index} of stage {case.stage}"
        asked_long = now - case.asked_at > ANSWER_BEATS * self._settings.heartbeat_s
        if answer is None:
            return Reassign(f"{case.owner} does not say where {what} is") if asked_long else None
        replicas = {member.peer for member in view.members if member.stage == case.stage}
        if not answer.peer or (answer.peer in replicas and _has(ledger, answer.peer, index)):
            has = _has(ledger, case.at, index)
            waited_s = now - case.at_since
            remedy = _wait(case, answer, has, what, long=waited_s > self._patience_s)
            return remedy or (Late() if case.at and waited_s > self.gaps.most_s else None)
        if not asked_long:
            return None
        case.asked_at = now  # its books may lack it once more
        if answer.peer not in replicas or answer.peer == case.owner:  # nobody could be convicted of that
            return Reassign(f"{case.owner} has {what} from {answer.peer}, which has not booked it")
        return Unbooked(answer.peer)

    def _late(self, case: Case, what: str, view: View) -> tuple[Verdict | None, Reassign | None]:
        """An owner waits in vain for `case.at`: two owners convict it, where there are two."""
        accusers = self._accusers.setdefault(case.at, set())
        accusers.add(key_of(case.owner))
        others = len({key_of(member.peer) for member in view.members} - {key_of(case.at)})
        if len(accusers) >= min(2, others):
            return (case.at, f"keeps {len(accusers)} owners waiting, the last for {what}"), None
        return None, Reassign(f"{case.owner} waits for {what} at {case.at}", blameless=True)

    @property
    def _patience_s(self) -> float:
        return max(QUIET_BEATS * self._settings.heartbeat_s, FLOORS * self._settings.min_request_timeout_s)

    def takeovers(self, view: View, moves: dict[Index, str], leader: Peer) -> Takeovers:
        """Owners after those moves. A microbatch never comes back to a peer that has owned it in this step: what runs for its former
        request would count again. A leader that came in the middle of the step does not know who has."""
        owners, given = list(view.owners), {}
        reasons: list[str] = []
        verdicts: list[Verdict] = []
        at = {member.peer: number for number, member in enumerate(view.members)}
        turn = [view.members[number].peer for number in owners_of(view.members, len(view.members))]
        struck: dict[Peer, int] = {}
        for index, why in moves.items():
            case = self._cases[index]
            struck[case.owner] = max(struck.get(case.owner, 0), not case.blameless)
            strikes = self._strikes[case.owner] + struck[case.owner]
            had = self._owned_by.get(index, {case.owner})
            able = [peer for peer in turn if peer not in had and peer != case.at]
            stuck = not able or not self._here_from_the_start
            if (strikes >= STRIKES or stuck) and case.owner != leader:
                verdicts.append((case.owner, why))
            elif able:
                given[index] = able[index % len(able)]
                owners[index] = at[given[index]]
                reasons.append(f"{given[index]} takes over microbatch {index}: {why}")
        return Takeovers(tuple(owners), tuple(reasons), tuple(verdicts), struck, tuple(moves), given)

    def resting(self, members: Collection[Peer]) -> set[Peer]:
        """Those that get no microbatches in the next step: others had to take over what they had, and the most often."""
        late = [peer for peer in members if self._rests.get(peer, (0, 0))[1] > self._steps]
        return set(sorted(late, key=lambda peer: (self._rests[peer], peer), reverse=True)[: most_resting(len(members))])

    def rest(self, owner: Peer) -> None:
        """It gets no microbatches in the next steps, and longer each time."""
        times = self._rests.get(owner, (0, 0))[0]
        self._rests[owner] = times + 1, self._steps + REST * LONGER**times

    def settle(self, takeovers: Takeovers) -> None:
        """These are decided."""
        for owner, strikes in takeovers.struck.items():
            self._strikes[owner] += strikes
            self.rest(owner)
        for index in takeovers.cases:
            case = self._cases.pop(index)
            had = self._owned_by.setdefault(index, {case.owner})
            if index in takeovers.given:
                had.add(takeovers.given[index])


def _has(ledger: Ledger, peer: Peer, index: Index) -> bool:
    return any(one.index == index for one in ledger.books.get(peer, ()))


def _wait(case: Case, answer: Booker, has: bool, what: str, long: bool) -> Remedy | None:
    """The owner waits for `case.at`, as it says, which may be itself or nobody; `long`: for long by now. `has`: its books have it."""
    if has and long:
        return Late()  # it does not send what it has booked
    if answer.slow >= SLOW:
        return Reassign(f"{case.owner} gets no answer for {what} from {answer.slow} peers")
    if not long:
        return None
    if case.at == case.owner and answer.slow:
        return Reassign(f"{case.owner} gets nowhere with {what}")
    if not case.at:
        return Reassign(f"{case.owner} has asked nobody for {what}", blameless=True)  # no replica may be free
    return Late() if answer.slow else None  # its owner finds it late, too, by the times that it knows

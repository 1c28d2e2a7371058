"""Which replica of a stage receives the next hop, and how long its answer may take. For trainers.

Paper: SWARM parallelism (arXiv 2301.11913), stochastic wiring by interleaved weighted round robin. Claim: when each trainer chooses
the peer of least virtual time and charges it the expected time of the hop, each peer receives work in proportion to its throughput
without coordination. `Routes.choose` is the paper's choose, `Routes.on_view` its add, `Routes.answered` its success, `Routes.failed`
its ban.

What we changed: a timeout is a slow sample and not a ban. A ban is bounded, and ends with one probation request. Busy is back-pressure.
Deadlines follow the median of measured times, since the first answer of a stage may be of a peer that was stopped. The last replicas of
a stage are used even when banned. And the peer that is expected to answer first is chosen, by what this trainer has in progress there: an
answer reports the queue that its request met, and where a link or a stage is full that was long ago, so that all trainers would choose the
same peer and shares would oscillate (docs/design/2026-11-22-least-loaded.md). Virtual time breaks ties. Of peers that answer about as soon
the microbatch's index chooses, so that the trainers' choices together are even, too (docs/design/2026-11-23-turns.md). What is measured for
that choice is a peer's pace, which its queue of this trainer's hops does not change (docs/design/2026-11-24-pace.md).

What to send is microbatch.py's business, attempts are trainer.py's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from heapq import heappop, heappush
from typing import Protocol

import msgspec

from shoal.core.latency import Latency, Usual
from shoal.core.messages import TURNS, Index, Member, Peer, Settings, Stage
from shoal.core.trainer.turns import NOBODY, Turns

FORWARD_SIZE = 1.0
BACKWARD_SIZE = 2.5  # recomputation and two products, relative to a forward: SWARM's figure
COLD_S = 1.0  # used without a plan and without measurements: SWARM's figure
PATIENCE = 4.0  # a hop is slow after so many times its usual duration
EXTENSIONS = 4  # more deadlines for a hop, or a tensor, while others of that sender's tensors come
OTHERS = 4.0  # times as long as any hop has taken is the most that is expected of a stage that nothing is known of
FAR = 4.0  # a peer's own average, timeouts included, lengthens its deadline to at most so many times its stage's
# A planned peer that was too slow is chosen again when it takes at most so many times its stage's usual
CAUGHT_UP = 2.0
LEAST_WAIT_S = 0.02  # after Busy: also if the server says 0
MOST_WAIT_S = 30.0  # after Busy, whatever the server says
TURN = 0.5  # of the time in which the replica whose turn it is would answer: another one is chosen only if it answers within that
LEAST_TURNS = 0.5  # that a replica without any counts as
# Hops that a newcomer has served before it may be called quicker than its stage: it had nobody else's hops when it served the first
SETTLED = 8
BAN_LEVELS = 4  # ban_s, 2x, 4x, 8x
MISSES = 3  # unanswered requests before a peer counts as silent, and hops in a row that it does not serve before it counts as useless


# Size of the hops that one trainer has requested of each peer, or requests next, and that are not answered.
Load = Mapping[Peer, float]
NOTHING: Load = {}


class Chance(Protocol):
    """The random source that machines are given."""

    def random(self) -> float: ...


class Replica(msgspec.Struct, eq=False):
    """What this trainer knows of one peer. Its valid entry in the heaps of its Wiring is the one with its `serial`."""

    peer: Peer
    latency: Latency
    pace: Latency  # seconds that a hop takes per unit of what this trainer has there, itself included
    virtual: float  # seconds of work charged so far
    share: float = 1.0  # of the microbatches of a replica with a usual line, that its line carries
    settles: int = 0  # hops until its pace is that of a replica with its share
    serial: int = 0
    busy_until: float = 0.0
    banned_until: float = 0.0
    level: int = 0  # of the ban; 0: in good standing
    lagging: bool = False  # a request to it timed out, and it has not been as quick as its stage since
    late: float | None = None  # since when a request to it timed out, if it has answered nothing since
    trial: bool = False  # a request was sent to it while banned or on probation
    queue_s: float = 0.0  # its queue as it last reported it, halved with each answer
    asked_at: float | None = None  # the oldest request since its last answer
    misses: int = 0  # requests that timed out since its last answer
    # Since its last result: who had made what the hops needed that it was late with or could not do; '': nobody
    unserved: list[Peer] = []
    unserved_at: float = 0.0  # when the first of those was found
    withheld: list[Peer] = []  # since a tensor that it made was had: who could not get one
    withheld_at: float = 0.0


Entry = tuple[float, float, int, Replica]  # of the ready: virtual time, a draw, serial


class Wiring:
    """The replicas of one stage: those that can be chosen, by virtual time; busy and banned ones, by when they can be chosen again."""

    def __init__(self, prior_s: float, rng: Chance) -> None:
        self.usual = Usual(prior_s)  # of answers only: with timeouts it would follow its own deadlines
        self._pace, self.usual_pace = Latency(), Usual(prior_s)  # of the whole stage, with timeouts and without
        self._rng = rng
        self._serial = 0
        self._clock = 0.0  # virtual time of the last replica chosen: a new one starts here
        self._ready: list[Entry] = []
        self._busy: list[tuple[float, int, Replica]] = []
        self._banned: list[tuple[float, int, Replica]] = []

    def enter(self, peer: Peer, now: float) -> Replica:
        """Add a replica at the current least virtual time, so that it is tried soon and not flooded."""
        replica = Replica(peer, Latency(), Latency(), self._clock, settles=SETTLED * (self._pace.value is not None))
        self.place(replica, now)
        return replica

    def place(self, replica: Replica, now: float) -> None:
        """Put it into the heap for its state. Its older entries become void."""
        self._serial += 1
        replica.serial = self._serial
        if replica.busy_until > now:
            heappush(self._busy, (replica.busy_until, self._serial, replica))
        elif replica.banned_until > now:
            heappush(self._banned, (replica.banned_until, self._serial, replica))
        else:
            replica.virtual = max(replica.virtual, self._clock)
            heappush(self._ready, (replica.virtual, self._rng.random(), self._serial, replica))

    def estimate(self, replica: Replica) -> float:
        """Expected seconds per unit of size."""
        return replica.latency.value or self.usual.value

    def measure(self, replica: Replica, seconds: float, size: float, ahead: float, usual: bool = False) -> None:
        """A hop of that size took so long there, behind so much that this trainer had requested before; `usual`: as its stage does."""
        if usual:
            self.usual.add(seconds / size)
            self.usual_pace.add(seconds / (size + ahead))
        replica.latency.add(seconds / size)
        replica.settles -= replica.settles > 0
        for pace in (replica.pace, self._pace):
            pace.add(seconds / (size + ahead))

    def expected(self, replica: Replica) -> float:
        """The same for deadlines: a peer is not slow only because its whole stage is loaded."""
        return min(max(self.estimate(replica), self.usual.value), FAR * self.usual.value)

    def choose(
        self,
        now: float,
        avoid: str,
        load: Load,
        turn: Replica | None = None,
        barred: frozenset[Peer] = NOBODY,
    ) -> tuple[Replica, str] | None:
        """The replica that is expected to answer first with that `load`, the one of least virtual time among equals; `avoid` only if no
        other is ready, and the `barred` if the others fail: if they are busy, they are waited for. `turn`: ready, and chosen unless
        another is expected to answer much sooner."""
        self._settle(now)
        if barred and self._wait_for_others(barred, avoid):
            return None
        if not self._ready:
            return (self._banned[0][2], "every replica is banned or busy; its ban ends first") if self._banned else None
        candidates = self._candidates(now, {avoid, *barred}, load)
        entry = self._pick(candidates, avoid, load, barred)
        if turn is not None and TURN * self._response_s(turn, load) <= self._response_s(entry[3], load):
            for other in candidates:
                heappush(self._ready, other)
            self.take(turn)
            return turn, "its turn"
        for other in candidates:
            if other is not entry:
                heappush(self._ready, other)
        self._clock = max(self._clock, min(entry[0], self._ready[0][0]) if self._ready else entry[0])
        replica = entry[3]
        return replica, "probation after a ban" if replica.level else "expected to answer first"

    def _wait_for_others(self, barred: frozenset[Peer], avoid: str) -> bool:
        """None but the `barred` is ready, and another one is busy."""
        ready = (one.peer for _, _, at, one in self._ready if one.serial == at)
        if any(peer not in barred and peer != avoid for peer in ready):
            return False
        return any(one.serial == at and one.peer not in barred for _, at, one in self._busy)

    def _candidates(self, now: float, unwanted: set[Peer], load: Load) -> list[Entry]:
        """The ready ones by virtual time, up to the first that has nothing to do for this trainer and is wanted."""
        candidates: list[Entry] = []
        while self._ready:
            candidates.append(heappop(self._ready))
            peer = candidates[-1][3].peer
            if peer not in unwanted and peer not in load:
                break
            self._settle(now)
        return candidates

    def _pick(self, candidates: list[Entry], avoid: str, load: Load, barred: frozenset[Peer]) -> Entry:
        """The one to choose of these entries of the ready."""
        if len(candidates) == 1:
            return candidates[0]
        return min(
            candidates,
            key=lambda each: (each[3].peer == avoid, each[3].peer in barred, self._response_s(each[3], load), each[:3]),
        )

    def _response_s(self, replica: Replica, load: Load) -> float:
        """Seconds until it would have answered one more hop. A newcomer is taken to be as quick as its stage is, and no quicker until it
        has had its share for a while."""
        pace_s = replica.pace.value or self._pace.value or self.usual.value
        if replica.settles:
            pace_s = max(pace_s, self._pace.value or self.usual.value)
        if replica.share < 1.0:  # the others' hops fill its line, too
            pace_s = max(pace_s, (self._pace.value or self.usual.value) / replica.share)
        return (load.get(replica.peer, 0.0) + 1.0) * pace_s

    def take(self, replica: Replica) -> None:
        """It is chosen as planned, out of turn: the replicas that were skipped are not owed the time."""
        self._clock = max(self._clock, replica.virtual)

    def wake(self) -> float | None:
        """When the next busy replica can be chosen again."""
        while self._busy and self._busy[0][2].serial != self._busy[0][1]:
            heappop(self._busy)
        return self._busy[0][0] if self._busy else None

    def _settle(self, now: float) -> None:
        """Move replicas that can be chosen again; afterwards the first entry of each heap is valid."""
        for heap in (self._busy, self._banned):
            while heap and (heap[0][2].serial != heap[0][1] or heap[0][0] <= now):
                _, serial, replica = heappop(heap)
                if replica.serial == serial:
                    self.place(replica, now)
        while self._ready:
            virtual, _, serial, replica = self._ready[0]
            if replica.serial == serial and virtual >= max(replica.virtual, self._clock):
                return
            heappop(self._ready)
            if replica.serial == serial:  # charged, or skipped, while planned peers were chosen
                self.place(replica, now)


class Routes:
    """The wiring of all stages, as one trainer measures it. Calls about peers that are in no stage are ignored."""

    def __init__(self, settings: Settings, rng: Chance) -> None:
        self._settings = settings
        self._rng = rng
        self._planned = {stage: seconds for stage, seconds in enumerate(settings.stage_seconds) if seconds > 0}
        self._wirings = [Wiring(self._planned.get(stage, COLD_S), rng) for stage in range(settings.stages)]
        self._at: dict[Peer, tuple[Stage, Replica]] = {}
        self._answers, self._longest_s = 0, 0.0  # of stages that need a tensor; the longest per unit of size
        self._turns = Turns(settings.stages)

    def on_view(self, members: tuple[Member, ...], now: float, new_keys: Collection[str] = ()) -> None:
        """`new_keys`: those on probation, which get every THIRD microbatch of a stage at most, while another replica does not fail."""
        stage_of = {member.peer: member.stage for member in members}
        self._turns.on_view(members, new_keys)
        for peer in [peer for peer, (stage, _) in self._at.items() if stage_of.get(peer) != stage]:
            self._at.pop(peer)[1].serial = -1
        for _, replica in self._at.values():  # what one lacked of those may have been their fault
            for others in (replica.unserved, replica.withheld):
                if others:
                    others[:] = [peer for peer in others if not peer or peer in stage_of]
        for member in members:
            if member.peer not in self._at:
                self._at[member.peer] = (member.stage, self._wirings[member.stage].enter(member.peer, now))
            self._at[member.peer][1].share = max(member.turns, LEAST_TURNS) / TURNS

    def choose(
        self,
        stage: Stage,
        now: float,
        size: float = FORWARD_SIZE,
        avoid: str = "",
        *,
        home: str = "",
        planned: str = "",
        load: Load = NOTHING,
        index: Index | None = None,
    ) -> tuple[Peer, str] | None:
        """The replica for a hop of that size, which is charged for it, and the reason; None while all are busy (see `wake`), or without
        replicas.

        The one expected to answer first, with this `load`; of about equal ones the one whose turn it is with microbatch `index`.
        `home` is waited for while it is busy, and skipped when it is banned; `planned` is chosen if it is in good standing; `avoid` is
        skipped if another replica is ready."""
        if home in self._at and self._at[home][0] == stage and self._at[home][1].banned_until <= now:
            return (home, "its owner serves that stage") if self._at[home][1].busy_until <= now else None
        wiring = self._wirings[stage]
        barred = self._turns.barred(stage, index)
        why = self._skip_reason(stage, planned, now, avoid, barred) if planned else ""
        if planned and not why:
            replica = self._at[planned][1]
            wiring.take(replica)
            replica.virtual += size * wiring.estimate(replica)
            return planned, "as planned"
        turn = self._turn(stage, index, now, avoid) if index is not None else None
        chosen = wiring.choose(now, avoid, load, turn, barred)
        if chosen is None:
            return None
        replica, reason = chosen
        reason = f"{why}; {reason}" if why else reason
        replica.virtual += size * wiring.estimate(replica)
        if replica.level:  # one request per ban, until one is answered
            replica.trial = True
            replica.banned_until = max(replica.banned_until, now + self._ban_s(replica))
        wiring.place(replica, now)
        return replica.peer, reason

    def _turn(self, stage: Stage, index: Index, now: float, avoid: str) -> Replica | None:
        """Whose turn it is with that microbatch. None: it is not in good standing."""
        peer = self._turns.turn(stage, index)
        if peer is None:
            return None
        replica = self._at[peer][1]
        ready = not replica.level and replica.busy_until <= now and replica.late is None
        return replica if ready and peer != avoid else None

    def _skip_reason(self, stage: Stage, planned: Peer, now: float, avoid: str, barred: frozenset[Peer]) -> str:
        """Why the planned peer does not receive this hop; '' if it does."""
        at, replica = self._at.get(planned, (-1, None))
        if replica is None or at != stage:
            return f"it does not serve stage {stage}"
        if planned in barred:
            return "its key is new"
        if planned == avoid:
            return "it was slow or failed with this hop"
        if replica.level:
            return "it failed and is on probation"
        if replica.busy_until > now:
            return f"its queue is full for {replica.busy_until - now:.1f} s"
        if replica.lagging:
            usual_s, typical_s = self._wirings[stage].estimate(replica), self._wirings[stage].usual.value
            return f"it takes {usual_s:.2f} s a hop, its stage {typical_s:.2f} s"
        return ""

    def claim(self, peer: Peer, stage: Stage, now: float, size: float) -> bool:
        """Charge `peer`, which holds the input, for a hop of that size. False if it does not serve the stage or is not ready."""
        at, replica = self._at.get(peer, (None, None))
        if replica is None or at != stage:
            return False
        if replica.busy_until > now or replica.banned_until > now or replica.level or replica.late is not None:
            return False
        replica.virtual += size * self._wirings[stage].estimate(replica)
        self._wirings[stage].place(replica, now)
        return True

    def wake(self, stage: Stage) -> float | None:
        """When to call `choose` again after it returned None; None if only a new view helps."""
        return self._wirings[stage].wake()

    def patience(self, peer: Peer, size: float, ahead: float = 0.0) -> float:
        """Seconds after which a hop of that size to that peer is slow, behind so much that this trainer had requested there before."""
        return max(self._settings.min_request_timeout_s, self.due(peer, size, ahead))

    def due(self, peer: Peer, size: float, ahead: float = 0.0) -> float:
        """The same by what is measured alone, however short."""
        if peer not in self._at:
            return 0.0
        stage, replica = self._at[peer]
        wiring = self._wirings[stage]
        expected_s = wiring.expected(replica)
        if not self._known(stage) and self._answers >= 2:
            expected_s = min(max(expected_s, self._longest_s), OTHERS * self._longest_s)
        behind_s = (size + ahead) * wiring.usual_pace.value if wiring.usual_pace.known else 0.0
        return PATIENCE * max(size * expected_s, behind_s) + replica.queue_s

    def knows(self, peer: Peer) -> bool:
        """The usual time of its stage is measured or planned, or what other stages take is measured. A guess may be wrong by a factor of a
        hundred."""
        return peer not in self._at or self._answers >= 2 or self._known(self._at[peer][0])

    def _known(self, stage: Stage) -> bool:
        return stage in self._planned or self._wirings[stage].usual.known

    def repeat_s(self, peer: Peer) -> float:
        """Seconds until a slow request is repeated. They follow its stage, since the peer's own average includes its timeouts."""
        if peer not in self._at:
            return self._settings.min_request_timeout_s
        wiring = self._wirings[self._at[peer][0]]
        return max(self._settings.min_request_timeout_s, PATIENCE * wiring.usual.value)

    def answered(
        self, peer: Peer, seconds: float, size: float, now: float, again: bool = False, ahead: float = 0.0
    ) -> None:
        """It answered a hop of that size after `seconds`, network and queue included; this trainer had `ahead` there before. `again`: the
        request was repeated, so that the time says nothing of its stage (Karn's rule)."""
        if peer not in self._at:
            return
        stage, replica = self._at[peer]
        replica.unserved.clear()
        replica.late = None
        self._wirings[stage].measure(replica, seconds, size, ahead, usual=not again)
        if stage and not again:  # a first stage's need no tensor, and tell nothing of the others
            self._answers, self._longest_s = self._answers + 1, max(self._longest_s, seconds / size)
        if replica.lagging:
            replica.lagging = self._wirings[stage].estimate(replica) > CAUGHT_UP * self._wirings[stage].usual.value
        replica.queue_s /= 2
        if replica.trial:
            replica.trial, replica.level, replica.banned_until = False, 0, 0.0
            self._wirings[stage].place(replica, now)

    def slow(self, peer: Peer, seconds: float, size: float, now: float, ahead: float = 0.0) -> None:
        """It did not answer in time: a slow sample; on probation, or where it was asked after it had been late before and has answered
        nothing since, a failure."""
        if peer not in self._at:
            return
        stage, replica = self._at[peer]
        self._wirings[stage].measure(replica, seconds, size, ahead)
        again = replica.late is not None and now - seconds >= replica.late
        replica.lagging, replica.late = True, now if replica.late is None else replica.late
        if replica.trial or again:
            self.failed(peer, now)

    def failed(self, peer: Peer, now: float) -> float:
        """It cannot be reached, refuses, or sends invalid data. Seconds of a new ban; 0.0 if it is banned already."""
        if peer not in self._at:
            return 0.0
        stage, replica = self._at[peer]
        if replica.banned_until > now and not replica.trial:
            return 0.0
        replica.trial = False
        replica.level = min(replica.level + 1, BAN_LEVELS)
        ban_s = self._ban_s(replica)
        replica.banned_until = now + ban_s
        self._wirings[stage].place(replica, now)
        return ban_s

    def busy(self, peer: Peer, wait_s: float, size: float, now: float) -> None:
        """It did not accept a hop of that size: the charge is taken back, and it is not chosen for the wait, with jitter."""
        if peer not in self._at:
            return
        stage, replica = self._at[peer]
        wait_s = max(wait_s, LEAST_WAIT_S) if 0 <= wait_s <= MOST_WAIT_S else MOST_WAIT_S  # NaN lands here too
        replica.queue_s = wait_s
        replica.busy_until = max(replica.busy_until, now + wait_s * (1.0 + 0.25 * self._rng.random()))
        replica.virtual -= size * self._wirings[stage].estimate(replica)
        if replica.trial:  # neither succeeded nor failed: the probation request follows after the wait
            replica.trial, replica.banned_until = False, 0.0
        self._wirings[stage].place(replica, now)

    def asked(self, peer: Peer, now: float) -> None:
        if (at := self._at.get(peer)) is not None and at[1].asked_at is None:
            at[1].asked_at = now

    def missed(self, peer: Peer, now: float) -> float:
        """A request to it timed out. Seconds for which it has sent nothing, if too many, counted anew from now; else 0.0."""
        if peer not in self._at:
            return 0.0
        replica = self._at[peer][1]
        replica.misses += 1
        # Its loop answers a Query and a Cancel while it computes.
        silent_s = now - replica.asked_at if replica.asked_at is not None else 0.0
        if replica.misses < MISSES or silent_s <= self._settings.heartbeat_timeout_s:
            return 0.0
        replica.asked_at = now
        return silent_s

    def not_served(self, peer: Peer, maker: str, now: float, late: bool) -> float:
        """A hop that it was asked for was `late`, or it said that a tensor is missing, which `maker` had made; '': it needs none. Seconds
        without a result, if it has served none for long, counted anew from now; else 0.0: also where the maker may be at fault."""
        if peer not in self._at:
            return 0.0
        replica = self._at[peer][1]
        replica.unserved_at = replica.unserved_at if replica.unserved else now
        replica.unserved.append(maker)
        # A peer that has become slow still has the time of its longest hop.
        hop_s = 2 * BACKWARD_SIZE * self.repeat_s(peer) if late else 0.0
        most_s, since_s = max(self._settings.heartbeat_timeout_s, hop_s), now - replica.unserved_at
        if since_s <= most_s or not self._several(replica.unserved):
            return 0.0
        replica.unserved.clear()
        return since_s

    def not_given(self, peer: Peer, by: Peer, now: float) -> float:
        """What it has made could not be had from it, says `by`. Seconds since a tensor of its was had, as above."""
        if peer not in self._at:
            return 0.0
        replica = self._at[peer][1]
        replica.withheld_at = replica.withheld_at if replica.withheld else now
        replica.withheld.append(by)
        since_s = now - replica.withheld_at
        if since_s <= self._settings.heartbeat_timeout_s or not self._several(replica.withheld):
            return 0.0
        replica.withheld.clear()
        return since_s

    def _several(self, others: list[Peer]) -> bool:
        """Enough failures, and not all with one other peer, where its stage has more."""
        stage = self._at[others[0]][0] if others[0] in self._at else -1
        replicas = sum(at == stage for at, _ in self._at.values())
        return len(others) >= MISSES and ("" in others or len(set(others)) >= min(2, replicas))

    def useless(self, peer: Peer) -> bool:
        """It has called too much missing since its last result, or has given too little of what it made, to be asked for more soon."""
        replica = self._at[peer][1] if peer in self._at else None
        return replica is not None and any(self._several(of) for of in (replica.unserved, replica.withheld) if of)

    def given(self, peers: Iterable[Peer]) -> None:
        """Tensors that these had made were had."""
        for peer in peers:
            if peer in self._at:
                self._at[peer][1].withheld.clear()

    def received(self, peer: Peer) -> None:
        if (at := self._at.get(peer)) is not None:
            at[1].asked_at, at[1].misses = None, 0

    def _ban_s(self, replica: Replica) -> float:
        return float(self._settings.ban_s * 2 ** (replica.level - 1))

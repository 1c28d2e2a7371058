"""The replicas of one stage as one trainer measures them, and which of them receives its next hop. For routing.py, which says from which
paper that is, and what was changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush
from typing import Protocol

import msgspec

from shoal.core.latency import Latency, Usual
from shoal.core.messages import Peer
from shoal.core.trainer.turns import NOBODY

FAR = 4.0  # a peer's own average, timeouts included, lengthens its deadline to at most so many times its stage's
# Of the time in which the replica whose turn it is would answer: another one is chosen only if it answers within that. Where turns follow
# what replicas pass, that is said already, by who knows all hops
TURN, UNEVEN_TURN = 0.5, 0.2
# Hops that a newcomer has served before it may be called quicker than its stage: it had nobody else's hops when it served the first
SETTLED = 8
WAITS = 3  # times that one without room is waited for in its turn, until it has answered

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
    share: float = 1.0  # of the microbatches that a usual replica of its stage passes
    settles: int = 0  # hops until its pace is that of a replica with its share
    serial: int = 0
    busy_until: float = 0.0
    full_until: float = 0.0  # for backwards, too
    declined: int = 0  # times that it had no room since its last answer
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
        self.uneven = False  # turns follow what replicas pass
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
        other is ready, and the `barred` if the others fail: if they are busy, they are waited for. `turn`: it stands
        well, and is chosen unless another is expected to answer much sooner. None: one that has no room is to be waited for."""
        self._settle(now)
        if barred and self._wait_for_others(barred, avoid):
            return None
        if not self._ready:
            return (self._banned[0][2], "every replica is banned or busy; its ban ends first") if self._banned else None
        candidates = self._candidates(now, {avoid, *barred}, load)
        entry = self._pick(candidates, avoid, load, barred)
        if turn is not None and self._keeps_turn(turn, entry[3], load, now):
            for other in candidates:
                heappush(self._ready, other)
            if turn.busy_until > now:
                return None
            self.take(turn)
            return turn, "its turn"
        for other in candidates:
            if other is not entry:
                heappush(self._ready, other)
        self._clock = max(self._clock, min(entry[0], self._ready[0][0]) if self._ready else entry[0])
        replica = entry[3]
        return replica, "probation after a ban" if replica.level else "expected to answer first"

    def _keeps_turn(self, turn: Replica, other: Replica, load: Load, now: float) -> bool:
        """The other one would not answer much sooner. A replica that has no room is waited for where turns follow what replicas pass: it
        has many hops because it passes many, and the step would wait for a slower one that gets them instead."""
        wait_s = max(0.0, turn.busy_until - now)
        if wait_s and (not self.uneven or turn.declined > WAITS):
            return False
        return (UNEVEN_TURN if self.uneven else TURN) * (wait_s + self._response_s(turn, load)) <= self._response_s(
            other, load
        )

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

"""Which replica of a stage gets the next hop, and how long its answer may take. For trainers.

Paper: SWARM parallelism (arXiv 2301.11913), stochastic wiring by interleaved weighted round robin. Claim: when every
trainer picks the peer of least virtual time and charges it the time the hop is expected to take, each peer gets work
in proportion to its throughput without anybody coordinating. `Routes.choose` is the paper's choose, `Routes.on_view`
its add, `Routes.answered` its success, `Routes.failed` its ban.

What we changed: a timeout is a slow sample, not a ban and not nothing; a ban is bounded and ends in one probation
request; Busy is back-pressure; deadlines follow what was measured, by its middle value, since the first answer of a stage may be
of a peer that was stopped for a while; a stage's last replicas are used even when banned. And virtual time only breaks ties: first comes
with whom least is in progress. An answer tells of the queue it met when it was asked for; where a line or a stage is full, that was
long ago, all trainers have gone to the same peer since, and shares swing (docs/design/2026-11-22-least-loaded.md).
Left to others: what to send (microbatch.py) and everything about attempts (trainer.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush
from typing import Protocol

import msgspec

from shoal.core.latency import Latency, Usual
from shoal.core.messages import Member, Peer, Settings, Stage

FORWARD_SIZE = 1.0
BACKWARD_SIZE = 2.5  # recompute and two products, on the scale of a forward: SWARM's figure
COLD_S = 1.0  # guess where neither the plan nor a measurement says better: SWARM's figure
PATIENCE = 4.0  # a hop is slow after this many times its usual wall time
FAR = 4.0  # a peer's own average, fed with its timeouts, lengthens its deadline to at most this many times its stage's
CAUGHT_UP = (
    2.0  # a planned peer that let a hop run out is taken again when it is within this many times its stage's usual
)
LEAST_WAIT_S = 0.02  # after Busy: even a server that says 0 is not asked again in the same instant
MOST_WAIT_S = 30.0  # after Busy: no peer can send itself into retirement
BAN_LEVELS = 4  # ban_s, 2x, 4x, 8x
MISSES = 3  # unanswered requests before a peer counts as silent


Load = Mapping[
    Peer, float
]  # size of the hops that one trainer has asked of a peer, or will ask next, and that are not answered
NOTHING: Load = {}


class Chance(Protocol):
    """The random source that machines are handed."""

    def random(self) -> float: ...


class Replica(msgspec.Struct, eq=False):
    """What this trainer knows of one peer. In exactly one heap of its Wiring, under `serial`."""

    peer: Peer
    latency: Latency
    virtual: float  # seconds of work charged so far
    serial: int = 0
    busy_until: float = 0.0
    banned_until: float = 0.0
    level: int = 0  # of the ban; 0: in good standing
    lagging: bool = False  # it let a request run out, and has not been as quick as its stage since
    trial: bool = False  # a request was sent to it while banned or on probation
    queue_s: float = 0.0  # what it last said of its queue, fading with every answer
    asked_at: float | None = None  # the oldest request since its last answer
    misses: int = 0  # requests that ran out since its last answer


class Wiring:
    """One stage: replicas that can be chosen by virtual time, and the resting ones by when they wake."""

    def __init__(self, prior_s: float, rng: Chance) -> None:
        self.usual = Usual(prior_s)  # of real answers only: fed with timeouts it would chase its own deadlines
        self._rng = rng
        self._serial = 0
        self._clock = 0.0  # virtual time of the last replica chosen: nobody enters below it
        self._ready: list[tuple[float, float, int, Replica]] = []
        self._busy: list[tuple[float, int, Replica]] = []
        self._banned: list[tuple[float, int, Replica]] = []

    def enter(self, peer: Peer, now: float) -> Replica:
        """A new replica, at the current least virtual time: tried soon, not flooded."""
        replica = Replica(peer, Latency(), self._clock)
        self.place(replica, now)
        return replica

    def place(self, replica: Replica, now: float) -> None:
        """Put it into the heap it belongs to by its state; its older entries become void."""
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

    def expected(self, replica: Replica) -> float:
        """The same for deadlines: no peer is slow only because its whole stage is loaded."""
        return min(max(self.estimate(replica), self.usual.value), FAR * self.usual.value)

    def choose(self, now: float, avoid: str, load: Load) -> tuple[Replica, str] | None:
        """Of those at which least of `load` is, the one of least virtual time."""
        self._settle(now)
        if not self._ready:
            return (self._banned[0][2], "every replica is banned or busy; its ban ends first") if self._banned else None
        passed = []
        while self._ready:
            passed.append(heappop(self._ready))
            peer = passed[-1][3].peer
            if peer != avoid and peer not in load:
                break
            self._settle(now)
        entry = min(passed, key=lambda each: (each[3].peer == avoid, load.get(each[3].peer, 0.0), each[:3]))
        for other in passed:
            if other is not entry:
                heappush(self._ready, other)
        self._clock = max(self._clock, min(entry[0], self._ready[0][0]) if self._ready else entry[0])
        replica = entry[3]
        return replica, "probation after a ban" if replica.level else "least virtual time"

    def take(self, replica: Replica) -> None:
        """As planned, out of turn: whoever was passed over is not owed the time."""
        self._clock = max(self._clock, replica.virtual)

    def wake(self) -> float | None:
        """When the next busy replica can be asked again."""
        while self._busy and self._busy[0][2].serial != self._busy[0][1]:
            heappop(self._busy)
        return self._busy[0][0] if self._busy else None

    def _settle(self, now: float) -> None:
        """Move replicas whose rest is over; afterwards every heap's first entry is valid."""
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
            if replica.serial == serial:  # charged, or passed over, while planned peers were taken
                self.place(replica, now)


class Routes:
    """The wiring of all stages, as one trainer measures it. Calls about peers that have left are ignored."""

    def __init__(self, settings: Settings, rng: Chance) -> None:
        self._settings = settings
        self._rng = rng
        self._planned = {stage: seconds for stage, seconds in enumerate(settings.stage_seconds) if seconds > 0}
        self._wirings = [Wiring(self._planned.get(stage, COLD_S), rng) for stage in range(settings.stages)]
        self._at: dict[Peer, tuple[Stage, Replica]] = {}

    def on_view(self, members: tuple[Member, ...], now: float) -> None:
        stage_of = {member.peer: member.stage for member in members}
        for peer in [peer for peer, (stage, _) in self._at.items() if stage_of.get(peer) != stage]:
            self._at.pop(peer)[1].serial = -1
        for peer, stage in stage_of.items():
            if peer not in self._at:
                self._at[peer] = (stage, self._wirings[stage].enter(peer, now))

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
    ) -> tuple[Peer, str] | None:
        """The replica for a hop of that size, charged for it, and why; None while all are busy (see wake), or none is.

        Of equally loaded replicas (`load`) the one of least virtual time. `home` is waited for while it is busy, and
        passed over when banned; `planned` is taken if it is in good standing; `avoid` is passed over if another replica is ready."""
        if home in self._at and self._at[home][0] == stage and self._at[home][1].banned_until <= now:
            return (home, "its owner serves that stage") if self._at[home][1].busy_until <= now else None
        wiring = self._wirings[stage]
        why = self._passed_over(stage, planned, now, avoid) if planned else ""
        if planned and not why:
            replica = self._at[planned][1]
            wiring.take(replica)
            replica.virtual += size * wiring.estimate(replica)
            return planned, "as planned"
        chosen = wiring.choose(now, avoid, load)
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

    def _passed_over(self, stage: Stage, planned: Peer, now: float, avoid: str) -> str:
        """Why the planned peer does not get this hop; '' when it does."""
        at, replica = self._at.get(planned, (-1, None))
        if replica is None or at != stage:
            return f"it does not serve stage {stage}"
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
        """Charge that peer for a hop of that size, because it has the input: if it serves the stage and may be asked now."""
        if peer not in self._at or self._at[peer][0] != stage:
            return False
        replica = self._at[peer][1]
        if replica.busy_until > now or replica.banned_until > now or replica.level:
            return False
        replica.virtual += size * self._wirings[stage].estimate(replica)
        self._wirings[stage].place(replica, now)
        return True

    def wake(self, stage: Stage) -> float | None:
        """When to call choose again after it returned None; None: only a new view helps."""
        return self._wirings[stage].wake()

    def patience(self, peer: Peer, size: float) -> float:
        """Seconds after which a hop of that size to that peer is slow."""
        if peer not in self._at:
            return self._settings.hop_floor_s
        stage, replica = self._at[peer]
        usual_s = PATIENCE * size * self._wirings[stage].expected(replica) + replica.queue_s
        return max(self._settings.hop_floor_s, usual_s)

    def knows(self, peer: Peer) -> bool:
        """Whether its stage's usual time was measured or planned: else it is guessed, and may be a hundred times more."""
        if peer not in self._at:
            return True
        stage = self._at[peer][0]
        return stage in self._planned or self._wirings[stage].usual.known

    def repeat_s(self, peer: Peer) -> float:
        """Seconds until a slow request is repeated: as its stage is, since the peer's own average has its timeouts in it."""
        if peer not in self._at:
            return self._settings.hop_floor_s
        wiring = self._wirings[self._at[peer][0]]
        return max(self._settings.hop_floor_s, PATIENCE * wiring.usual.value)

    def answered(self, peer: Peer, seconds: float, size: float, now: float, again: bool = False) -> None:
        """It did a hop of that size; wall time, with network and queue inside. `again`: the answer is to a repetition, and may have
        been lost before (Karn's rule): no measure of its stage."""
        if peer not in self._at:
            return
        stage, replica = self._at[peer]
        replica.latency.add(seconds / size)
        if not again:
            self._wirings[stage].usual.add(seconds / size)
        if replica.lagging:
            replica.lagging = self._wirings[stage].estimate(replica) > CAUGHT_UP * self._wirings[stage].usual.value
        replica.queue_s /= 2
        if replica.trial:
            replica.trial, replica.level, replica.banned_until = False, 0, 0.0
            self._wirings[stage].place(replica, now)

    def slow(self, peer: Peer, seconds: float, size: float, now: float) -> None:
        """It did not answer in time: a slow sample, and on probation a failure."""
        if peer not in self._at:
            return
        replica = self._at[peer][1]
        replica.latency.add(seconds / size)
        replica.lagging = True
        if replica.trial:
            self.failed(peer, now)

    def failed(self, peer: Peer, now: float) -> float:
        """It cannot be reached, refuses or sends rubbish. Seconds of a new ban; 0.0 if it is banned already."""
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
        """It did not take a hop of that size: the charge is given back and it is left alone for the jittered wait."""
        if peer not in self._at:
            return
        stage, replica = self._at[peer]
        wait_s = max(wait_s, LEAST_WAIT_S) if 0 <= wait_s <= MOST_WAIT_S else MOST_WAIT_S  # NaN lands here too
        replica.queue_s = wait_s
        replica.busy_until = max(replica.busy_until, now + wait_s * (1.0 + 0.25 * self._rng.random()))
        replica.virtual -= size * self._wirings[stage].estimate(replica)
        if replica.trial:  # neither passed nor failed: the probation request comes after the wait
            replica.trial, replica.banned_until = False, 0.0
        self._wirings[stage].place(replica, now)

    def asked(self, peer: Peer, now: float) -> None:
        if peer in self._at and self._at[peer][1].asked_at is None:
            self._at[peer][1].asked_at = now

    def missed(self, peer: Peer, now: float) -> float:
        """A request to it ran out. Seconds for which nothing at all has come from it, if too many; then it starts anew."""
        if peer not in self._at:
            return 0.0
        replica = self._at[peer][1]
        replica.misses += 1
        # A server says nothing while it runs what was sent: a long task is no silence.
        most_s = max(2 * self._settings.silence_s, 2 * BACKWARD_SIZE * self.repeat_s(peer))
        silent_s = now - replica.asked_at if replica.asked_at is not None else 0.0
        if replica.misses < MISSES or silent_s <= most_s:
            return 0.0
        replica.asked_at = now
        return silent_s

    def received(self, peer: Peer) -> None:
        if peer in self._at:
            self._at[peer][1].asked_at, self._at[peer][1].misses = None, 0

    def _ban_s(self, replica: Replica) -> float:
        return float(self._settings.ban_s * 2 ** (replica.level - 1))

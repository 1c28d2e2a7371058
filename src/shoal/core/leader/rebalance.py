"""Which stage a peer should serve: where a joiner goes, and who moves when the pipeline has become uneven.

SWARM (arXiv 2301.11913, section 3.2) moves peers between stages by queue sizes; placing joiners on the thinnest stage
captures most of that gain with no move at all, so it comes first (`place`). `rebalance` is SWARM's rule, from the least to
the most loaded stage, with what it leaves out: several moves at once, hysteresis, jitter, a move's cost against its gain,
the speeds of peers and their lines, the last replica of a stage, and no peer moving to and fro. For the rules (rules/), which ask at step
boundaries and after removals; benchmarks/rebalance.py says what each is worth.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import median
from zlib import crc32

import msgspec

from shoal.core.messages import Member, Peer

# The giving stage must keep more than the thinnest stage has now, by so much of what the mover brings there. With less, five peers
# on three stages of equal work move to and fro with the noise of their measured rates.
MARGIN = 0.5
MOVE_S = 60.0  # what a move takes while nobody knows better: the download of a stage of some GB
# A peer that moved, and the way back between two stages, rest for so many moves' time, and so many steps, up to twice that
REST_MOVES, REST_STEPS = 5.0, 3.0
# Times as much as the thinnest stage passes: what is gained so is no noise of measured rates, and waits for nobody's rest
URGENT = 1.5
AT_ONCE = 4  # one of so many members may be moving: more would make the others serve downloads instead of microbatches
SLOWEST, FASTEST = 0.1, 10.0  # what a measured speed may say of a peer, relative to the usual one


class Move(msgspec.Struct, frozen=True):
    """`peer` leaves stage `source` at `at_s` and downloads the state of `stage`."""

    peer: Peer
    source: int
    stage: int
    at_s: float
    reason: str


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """The input of a decision about moves. `members` serve, in the order of the View: the last is the newest."""

    members: tuple[Member, ...]
    stages: int
    seconds: tuple[float, ...] = ()  # per microbatch at each stage, by a peer of speed 1; () means equal
    speeds: Mapping[Peer, float] = {}  # relative; 1 for whoever is not named
    # Boundary tensors per second that a peer's line carries one way; as many as it computes for whoever is not named
    lines: Mapping[Peer, float] = {}
    loading: tuple[Member, ...] = ()  # joiners and movers, with the stage whose state they download: they count there
    recent: tuple[Move, ...] = ()  # what was decided before; what is too old to matter may be left out
    now: float = 0.0
    move_s: float = MOVE_S  # what loading a stage's state has taken lately
    step_s: float = 0.0  # rates are measured once in a step, and are noisy
    left_s: float = math.inf  # of the run, or of a peer's usual life if that is shorter
    passed: float = 0.0  # part of the step that is booked: what a mover has booked of it is computed again by others


def place(
    members: Iterable[Member],
    stages: int,
    seconds: tuple[float, ...] = (),
    speeds: Mapping[Peer, float] | None = None,
    lines: Mapping[Peer, float] | None = None,
) -> tuple[int, str]:
    """The stage a new peer should serve, and why.

    `seconds[s]` is what one microbatch costs at stage s (planned or measured; equal when empty): the stage that passes the
    fewest, by its replicas' compute and `lines` (as a Fleet's), is the bottleneck. Ties go to the lower stage."""
    members = tuple(members)
    counts = [0] * stages
    for member in members:
        counts[member.stage] += 1
    power = _power(members, _cost(seconds, stages), speeds or {}, lines or {})
    stage = min(range(stages), key=lambda s: (power[s], s))
    others = ", ".join(f"{s}:{n}" for s, n in enumerate(counts))
    return stage, f"stage {stage} has the fewest replicas for its work (replicas {others})"


def rebalance(fleet: Fleet) -> tuple[Move, ...]:
    """Who should move now, and why; () if nobody should.

    Step by step on the way to an even pipeline: the thinnest stage gets the peer that leaves it and its giver best off.
    It need not be the bottleneck's gain: of two stages that are equally thin the first one's move gains nothing by
    itself, and a stage with one replica that waits for its death costs more than the move. In the middle of a step only
    those move whom the bottleneck needs: a death has made it, and its books are redone there, so that the movers' books
    are redone meanwhile (checking that they are cost more than it saved: 98.0 for 98.1 % with 4 stages)."""
    plan = _Plan(fleet)
    moves: list[tuple[Member, int]] = []
    shut: set[int] = set()  # thin stages that nobody can help now
    before = min(plan.power)
    limit = max(1, len(fleet.members) // AT_ONCE) - sum(one.peer in plan.movers for one in fleet.loading)
    while len(moves) < limit and len(shut) < fleet.stages:
        thin = min((s for s in range(fleet.stages) if s not in shut), key=lambda s: (plan.power[s], s))
        who = plan.best(thin)
        if who is None:
            shut.add(thin)
            continue
        plan.carry_out(who, thin)
        moves.append((who, thin))
    after = min(plan.power)
    if fleet.passed:
        moves = [(who, thin) for who, thin in moves if plan.began[thin] < after and before < after]
    gain = f"gain {after / before:.2f}x" if before else "nobody serves it now"
    return tuple(
        Move(
            peer=who.peer,
            source=who.stage,
            stage=thin,
            at_s=fleet.now,
            reason=f"move {who.peer} {who.stage}->{thin}: stage {thin} serves {plan.began[thin]:.2f}, stage {who.stage} "
            f"{plan.began[who.stage]:.2f} microbatches per unit of time; {gain}, cost {fleet.move_s:.0f} s of {who.peer}",
        )
        for who, thin in moves
    )


def measure(
    members: Iterable[Member], rates: Mapping[Peer, float], stages: int, planned: tuple[float, ...] = ()
) -> tuple[tuple[float, ...], dict[Peer, float]]:
    """Seconds per microbatch of each stage and relative speeds, from the members' rates in microbatches per second.

    A rate is a peer's speed over its stage's work, and only a plan can tell the two apart. Without one, what differs
    within a stage is the peers' and what differs between stages is the stages'."""
    rated = [(one, rates[one.peer]) for one in members if 0 < rates.get(one.peer, 0.0) < math.inf]
    if not rated:
        return planned, {}
    if len(planned) == stages:
        usual = median(rate * planned[one.stage] for one, rate in rated)
        seconds = tuple(work / usual for work in planned)
    else:
        found: list[list[float]] = [[] for _ in range(stages)]
        for one, rate in rated:
            found[one.stage].append(1 / rate)
        usual = median(value for group in found for value in group)
        seconds = tuple(median(group) if group else usual for group in found)
    return seconds, {one.peer: min(max(rate * seconds[one.stage], SLOWEST), FASTEST) for one, rate in rated}


class _Plan:
    """The stages' power in microbatches per unit of time, with the moves planned so far carried out."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.cost = _cost(fleet.seconds, fleet.stages)
        self.power = _power((*fleet.members, *fleet.loading), self.cost, fleet.speeds, fleet.lines)
        self.began = tuple(self.power)
        self.groups: list[list[Member]] = [[] for _ in range(fleet.stages)]  # who may be taken from, and who stays
        self.coming = [0] * fleet.stages
        self._unlike: dict[int, tuple[tuple[int, Member], ...]] = {}  # of a group, see `unlike`
        for one in fleet.members:
            self.groups[one.stage].append(one)
        for one in fleet.loading:
            self.coming[one.stage] += 1
        self.movers = {move.peer for move in fleet.recent}
        self.used = {(m.source, m.stage) for m in fleet.recent if fleet.now < m.at_s + fleet.move_s}
        rest_s = max(REST_MOVES * fleet.move_s, REST_STEPS * fleet.step_s)
        young = [m for m in fleet.recent if fleet.now < m.at_s + 2 * rest_s]
        resting = [m for m in young if fleet.now < m.at_s + _jittered(m, rest_s)]
        self.tired = {m.peer for m in resting}
        self.back = {(m.stage, m.source) for m in resting}

    def serves(self, one: Member, stage: int) -> float:
        return _serves(one.peer, stage, self.cost, self.fleet.speeds, self.fleet.lines)

    def best(self, thin: int) -> Member | None:
        """The peer that should move to that stage, from the stage that can best spare one; None if none should."""
        served = len(self.groups[thin])
        empty = not served and not self.coming[thin]
        if self.coming[thin] >= max(1, served):
            return None  # its replicas have downloads enough to serve
        chosen: tuple[tuple[float, float, int, int], Member] | None = None
        for giver in range(self.fleet.stages):
            rests = (giver, thin) in self.back
            for at, one in self.unlike(giver) if self._may_give(giver, thin, empty) else ():
                left, brought = self.power[giver] - self.serves(one, giver), self.serves(one, thin)
                if left < self.power[thin] + MARGIN * brought and not empty:
                    continue
                after = min(left, self.power[thin] + brought)
                if (rests or one.peer in self.tired) and not empty and after < URGENT * self.power[thin]:
                    continue
                worth = (after, left, -giver, at)
                if chosen is None or worth > chosen[0]:
                    chosen = worth, one
        return chosen[1] if chosen else None

    def unlike(self, stage: int) -> tuple[tuple[int, Member], ...]:
        """Of a stage's members that move as well as one another the last, with its place: 10,000 peers of few kinds at hundreds of stages
        would take minutes."""
        if stage not in self._unlike:
            speeds, lines = self.fleet.speeds, self.fleet.lines
            found = {
                (speeds.get(one.peer), lines.get(one.peer), one.peer in self.tired): (at, one)
                for at, one in enumerate(self.groups[stage])
            }
            self._unlike[stage] = tuple(found.values())
        return self._unlike[stage]

    def _may_give(self, giver: int, thin: int, empty: bool) -> bool:
        """That stage can spare a peer, and no move between the two is being made."""
        if self.power[giver] <= self.power[thin] or len(self.groups[giver]) < 2:
            return False
        made = (giver, thin) in self.used or (thin, giver) in self.used
        return (empty or not made) and self._pays(giver, thin)

    def _pays(self, giver: int, thin: int) -> bool:
        """What the mover will do at its new stage outweighs what it leaves undone at the old one while it downloads."""
        move_s = self.fleet.move_s
        return (self.fleet.left_s - move_s) / self.cost[thin] > move_s / self.cost[giver]

    def carry_out(self, who: Member, thin: int) -> None:
        self.groups[who.stage].remove(who)
        self._unlike.pop(who.stage, None)
        self.power[who.stage] -= self.serves(who, who.stage)
        self.power[thin] += self.serves(who, thin)
        self.coming[thin] += 1
        self.used.add((who.stage, thin))
        self.back.add((thin, who.stage))


def _jittered(move: Move, rest_s: float) -> float:
    """Peers that moved together do not all become free at one moment."""
    return rest_s * (1 + crc32(f"{move.peer} {move.at_s}".encode()) / 2**32)


def _cost(seconds: tuple[float, ...], stages: int) -> tuple[float, ...]:
    return seconds if len(seconds) == stages else (1.0,) * stages


def power(
    members: Iterable[Member],
    stages: int,
    seconds: tuple[float, ...],
    speeds: Mapping[Peer, float],
    lines: Mapping[Peer, float],
) -> list[float]:
    """Microbatches per unit of time that each stage serves."""
    return _power(members, _cost(seconds, stages), speeds, lines)


def _power(
    members: Iterable[Member], cost: tuple[float, ...], speeds: Mapping[Peer, float], lines: Mapping[Peer, float]
) -> list[float]:
    power = [0.0] * len(cost)
    for one in members:
        power[one.stage] += _serves(one.peer, one.stage, cost, speeds, lines)
    return power


def _serves(
    peer: Peer, stage: int, cost: tuple[float, ...], speeds: Mapping[Peer, float], lines: Mapping[Peer, float]
) -> float:
    """Microbatches per unit of time that a peer passes at the stage: what it computes, if its line carries as many."""
    computed = speeds.get(peer, 1.0) / cost[stage]
    crossed = boundaries(stage, len(cost))
    return min(computed, lines.get(peer, math.inf) / crossed) if crossed else computed


def boundaries(stage: int, stages: int) -> int:
    """Through so many of a stage's two ends tensors come and go: each way one of every microbatch, there or back."""
    return (stage > 0) + (stage < stages - 1)

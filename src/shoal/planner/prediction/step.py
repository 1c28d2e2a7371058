"""Predicts one optimizer step of this program as it is built, by playing it: which stage each device serves is given.

The cost model in communication.py is the paper's; this is what decides. Each owner drives `inflight` microbatches; what comes next for
one, what its request carries and which replica gets it is asked of core itself (microbatch.py, choice.py, routing.py), by the
plan's routes where there are any, so the wiring that is predicted is the one that runs. Tensors go
straight from server to server, and a hop runs when its request and its tensor are both there. A replica computes one
hop at a time, backwards first; uplinks and downlinks pass one message after the other and links of several pairs are filled
side by side, as in transport/emulated/shaped.py; who sends which chunk to whom when a stage's replicas average is core's too
(layout.py); and agreeing costs the messages of a round and of a view. Not in it: the optimizer, checkpoints, faults, losses
on the wire, full queues and activation stores, and that gradients go first on a line.

Some steps are played to warm the wiring up and as many are timed. A long step is played in two lengths and extended.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import cache
from heapq import heappop, heappush
from itertools import count, pairwise

import msgspec
import numpy as np

from shoal.core.allreduce.layout import SLICES, Place, owned, row_lengths, split
from shoal.core.messages import Member, Settings, View
from shoal.core.planned import Planned
from shoal.core.trainer.choice import Choice
from shoal.core.trainer.microbatch import Hop, Kind, Microbatch, Owned, new_microbatch, plan
from shoal.core.trainer.reports import Reports
from shoal.core.trainer.routing import Routes
from shoal.planner.costs.communication import Floats
from shoal.planner.inputs.cluster import Cluster
from shoal.slots import Inflow

LONGEST = 192  # microbatches that are played; a longer step is extended from this many and half of them
ROUNDS_MOST = 8  # steps that are played to warm up, and again to be timed: a short step depends on chance
PAIRS_MOST = 20_000  # pairs of replicas up to which averaging is played message by message
VALUES = 1 << 20  # of a round that is played, for each replica: a power of two, so that even shares have no rounding
Routing = tuple[tuple[tuple[int, ...], ...], ...]  # by owner's device and stage: devices, in turn
WEIGHTED_GAIN = 1.05  # so much longer must a round of even owners take, or they stay even
WIDEST_Bps = 1e12  # what a line without a stated width is taken for
BUSY = 0.85  # of the time: from here on a resource is called the bottleneck
TOKENS, OUTPUT, GRADIENT, EMPTY = "tokens", "output", "gradient", ""  # what a message carries
_VIEW = View(number=0, step=0, members=())


class Seats(msgspec.Struct, frozen=True):
    """Who serves what, and what that takes. Tuples by device unless they say stage."""

    stage_of: tuple[int, ...]
    forward_s: tuple[float, ...]  # one forward of the device's own stage
    backward_s: tuple[float, ...]
    gradient_bytes: tuple[float, ...]  # by stage
    boundary_bytes: float
    tokens_bytes: float
    microbatches: int
    inflight: int
    routes: Routing = ()  # empty: stochastic wiring
    returned_bytes: float | None = None  # of a boundary tensor's gradient; None: as the tensor itself
    averaging_codec_s: float = 0.0  # encoding and decoding in a round, at the stage where it takes longest
    staleness: int = 0  # 1: averaged while the next step's microbatches are computed
    widths: tuple[int, ...] = ()  # of the devices' lines, kB/s, if who owns what of a round follows them; empty: even

    @property
    def stages(self) -> int:
        return len(self.gradient_bytes)

    @property
    def back_bytes(self) -> float:
        return self.boundary_bytes if self.returned_bytes is None else self.returned_bytes

    @property
    def members(self) -> list[int]:
        return [device for device, stage in enumerate(self.stage_of) if stage >= 0]

    @property
    def seated(self) -> list[int]:
        """Members in the order of a plan's seats: by stage."""
        return sorted(self.members, key=lambda device: (self.stage_of[device], device))

    def replicas(self, stage: int) -> list[int]:
        return [device for device, own in enumerate(self.stage_of) if own == stage]


class Step(msgspec.Struct, frozen=True):
    """A predicted step. The three parts follow one another; `busy` says how full each resource is in the first."""

    step_s: float
    microbatches_s: float
    averaging_s: float  # with delayed updates only what is not hidden behind the next step's microbatches
    agreeing_s: float
    compute_busy: tuple[float, ...]  # by device, share of microbatches_s
    up_busy: tuple[float, ...]
    down_busy: tuple[float, ...]
    sent_bytes: tuple[float, ...]  # by device, over the step
    bottleneck: str


def predict(seats: Seats, cluster: Cluster, rng: np.random.Generator) -> Step:
    """Seconds of a step, where they go, and what limits it."""
    microbatches_s, play = _microbatches(seats, cluster, rng)
    averaging_s, averaged_bytes = _averaging(seats, cluster)
    averaging_s += seats.averaging_codec_s
    delay_s = cluster.delay_s[np.ix_(seats.members, seats.members)]
    agreeing_s = _agreeing(delay_s)
    if seats.staleness:
        beside_s = max(averaging_s + _behind(delay_s), _shared_s(cluster, play, averaged_bytes))
        averaging_s, agreeing_s = max(beside_s - microbatches_s, 0.0), _closing(delay_s)
    busy = [tuple(float(share) for share in used / max(microbatches_s, 1e-12)) for used in play]
    compute, up, down, sent = busy[0], busy[1], busy[2], play[3] + averaged_bytes
    total_s = microbatches_s + averaging_s + agreeing_s
    bottleneck = _bottleneck(seats, cluster, (compute, up, down), (microbatches_s, averaging_s, agreeing_s))
    sent_bytes = tuple(float(value) for value in sent)
    return Step(total_s, microbatches_s, averaging_s, agreeing_s, compute, up, down, sent_bytes, bottleneck)


def rough_s(seats: Seats, cluster: Cluster) -> float:
    """The same quickly, for searches: compute of the slowest stage, the busiest line at even shares, or the trips that an
    owner's microbatches make one after the other, whichever is longest; then averaging and agreeing."""
    work_s = []
    for stage in range(seats.stages):
        work_s.append(seats.microbatches / sum(1 / hop_s(seats, device) for device in seats.replicas(stage)))
    longest_s = max(max(work_s), _lines_s(seats, cluster), _trips_s(seats, cluster))
    delay_s, averaging_s = cluster.delay_s[np.ix_(seats.members, seats.members)], _rough_averaging_s(seats, cluster)
    if seats.staleness:
        return max(longest_s, averaging_s + _behind(delay_s)) + _closing(delay_s)
    return longest_s + averaging_s + _agreeing(delay_s)


def weighted(seats: Seats, cluster: Cluster) -> Seats:
    """The same with owners weighted by their lines, if a round is sooner over by that."""
    other = msgspec.structs.replace(seats, widths=_widths(cluster))
    if not any(owned(_of(other.widths, seats.replicas(stage))) for stage in range(seats.stages)):
        return seats
    return other if _averaging(other, cluster)[0] * WEIGHTED_GAIN < _averaging(seats, cluster)[0] else seats


def _widths(cluster: Cluster) -> tuple[int, ...]:
    lines_Bps = [min(device.up_Bps or math.inf, device.down_Bps or math.inf) for device in cluster.devices]
    return tuple(max(1, round(min(line_Bps, WIDEST_Bps) / 1000)) for line_Bps in lines_Bps)


def _of(widths: tuple[int, ...], group: list[int]) -> tuple[int, ...]:
    return tuple(widths[device] for device in group) if widths else ()


def request_bytes(seats: Seats) -> list[float]:
    """Tokens that an owner sends for one microbatch, by stage, over forward and backward. What it receives are receipts."""
    last = seats.stages - 1
    return [seats.tokens_bytes * ((stage == 0 < last) + (stage in (0, last))) for stage in range(seats.stages)]


def handed_bytes(seats: Seats) -> tuple[list[float], list[float]]:
    """What a replica sends to other replicas and receives from them for one microbatch that passes it, by stage."""
    last, body, back = seats.stages - 1, seats.boundary_bytes, seats.back_bytes
    sent = [body * (stage < last) + back * (stage > 0) for stage in range(last + 1)]
    return sent, [body * (stage > 0) + back * (stage < last) for stage in range(last + 1)]


# ------------------------------------------------------------------------------------------------------ microbatches


class _Lines:
    """Uplinks, downlinks and pairs: when what is sent now has arrived."""

    def __init__(self, cluster: Cluster) -> None:
        devices = len(cluster.devices)
        self._delay = cluster.delay_s.tolist()
        self._pair = cluster.bandwidth_Bps.tolist()
        self._up = [device.up_Bps or math.inf for device in cluster.devices]
        self._down = [device.down_Bps or math.inf for device in cluster.devices]
        self._up_free = [0.0] * devices
        self._inflow = [Inflow() for _ in cluster.devices]
        self._pair_free: dict[tuple[int, int], float] = {}
        self.up_used, self.down_used, self.sent = np.zeros(devices), np.zeros(devices), np.zeros(devices)

    def free(self, source: int) -> float:
        """When all that was sent so far has left."""
        return self._up_free[source]

    def leave(self, source: int, target: int, nbytes: float, now: float) -> float:
        """When its last byte reaches the target's line."""
        if source == target:
            return now
        up, pair = self._up[source], self._pair[source][target]
        start = max(now, self._up_free[source])
        self._up_free[source] = left = start + nbytes / up
        # The pair's link takes bytes as they leave the uplink, and holds nobody else up.
        through = max(max(start, self._pair_free.get((source, target), 0.0)) + nbytes / pair, left)
        self._pair_free[source, target] = through
        self.up_used[source] += nbytes / (pair if up == math.inf else up)
        self.sent[source] += nbytes
        return float(through + self._delay[source][target])

    def told(self, source: int, target: int, now: float) -> float:
        """When a control message is there: it waits behind no tensor."""
        return now if source == target else float(now + self._delay[source][target])

    def arrive(self, source: int, target: int, nbytes: float, now: float) -> float:
        """When it has passed the target's line; a message alone and no faster than the line is not held."""
        seconds = nbytes / self._down[target]
        self.down_used[target] += seconds
        return self._inflow[target].through(source, seconds, now)


class Bar(msgspec.Struct, frozen=True):
    """One hop's compute at a device, in seconds since the play began."""

    device: int
    stage: int
    microbatch: int
    forward: bool
    start_s: float
    end_s: float


class _Play:
    """One run of the microbatches of several steps."""

    def __init__(self, seats: Seats, cluster: Cluster, rng: np.random.Generator) -> None:
        self._seats = seats
        self._rng = rng
        self._members = seats.seated
        self._settings = Settings(
            stages=seats.stages,
            microbatches=seats.microbatches,
            steps=1,
            seats=tuple(seats.stage_of[device] for device in self._members),
            routes=self._seat_routes(),
            home=seats.stages == 1 and not seats.routes,
        )
        self.lines = _Lines(cluster)
        self.computed = np.zeros(len(cluster.devices))
        self.bars: list[Bar] = []
        self._nbytes = {
            TOKENS: seats.tokens_bytes,
            OUTPUT: seats.boundary_bytes,
            GRADIENT: seats.back_bytes,
            EMPTY: 0.0,
        }
        self._routes: dict[int, Routes] = {}
        self._choices: dict[int, Choice] = {}
        self._owned: dict[int, Owned] = {}
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._serial = count()
        self._lacks: list[int] = []  # by microbatch: how much of request and tensor its next hop waits for
        self._queue: dict[int, list[tuple[bool, int, int, Microbatch]]] = {device: [] for device in self._members}
        self._computes: set[int] = set()
        self._left = 0

    def run(self, microbatches: int, start: float) -> float:
        """All microbatches once; when the last is booked."""
        if not self._routes:
            members = tuple(
                Member(str(device), self._seats.stage_of[device], seat=seat)
                for seat, device in enumerate(self._members)
            )
            for device in self._members:
                routes, planned = Routes(self._settings, self._rng), Planned(str(device), self._settings)
                routes.on_view(members, start)
                planned.on_view(members)
                self._routes[device] = routes
                self._choices[device] = Choice(str(device), self._settings, routes, planned, Reports(routes, []))
        self._owned = {device: Owned() for device in self._members}
        self._left, self._lacks = microbatches, [1] * microbatches
        for index in range(microbatches):
            m = new_microbatch(index, [""] * self._seats.stages, _VIEW)
            m.x[0] = (TOKENS,)
            self._owned[self._members[index % len(self._members)]].wait(m)
        for device in self._members:
            self._begin(device, start)
        now = start
        while self._left:
            now, _, act = heappop(self._events)
            act(now)
        return now

    def _seat_routes(self) -> Routing:
        """By seats instead of devices."""
        seat_of = {device: seat for seat, device in enumerate(self._members)}
        if not self._seats.routes:
            return ()
        return tuple(
            tuple(tuple(seat_of[device] for device in turns) for turns in self._seats.routes[owner])
            for owner in self._members
        )

    def _at(self, when: float, act: Callable[[float], None]) -> None:
        heappush(self._events, (when, next(self._serial), act))

    def _send(
        self, source: int, target: int, tensors: tuple[str, ...], now: float, act: Callable[[float], None]
    ) -> None:
        """`act` when all of it has come. Without tensors it is a control message."""
        if source == target or not tensors:
            self._at(self.lines.told(source, target, now), act)
            return
        nbytes = sum(self._nbytes[tensor] for tensor in tensors)
        left = self.lines.leave(source, target, nbytes, now)
        self._at(left, lambda then: self._at(self.lines.arrive(source, target, nbytes, then), act))

    def _begin(self, owner: int, now: float) -> None:
        while (m := self._owned[owner].start(self._seats.inflight)) is not None:
            self._advance(owner, m, now)

    def _advance(self, owner: int, m: Microbatch, now: float) -> None:
        """What comes next for it, as trainer.py has it."""
        want = plan(m)
        if want.kind is Kind.FINISHED:
            self._left -= 1
            self._owned[owner].finish(m)
            self._begin(owner, now)
            return
        choice, active = self._choices[owner], self._owned[owner].active.values()
        peer = choice.peer(m, want, active, now)
        assert peer, "nobody is ever busy or banned here"
        m.next = ""
        m.hop = Hop(want.kind, want.stage, peer, now)
        m.hop.to = choice.after(m, want, active, now)
        self._send(owner, int(peer), m.inputs(), now, lambda then: self._came(owner, m, then))

    def _came(self, owner: int, m: Microbatch, now: float) -> None:
        """The request of its next hop, or the tensor that it speaks of."""
        self._lacks[m.index] -= 1
        if self._lacks[m.index] == 0:
            assert m.hop is not None
            peer = int(m.hop.peer)
            heappush(self._queue[peer], (m.hop.kind is Kind.FORWARD, m.index, owner, m))
            self._compute(peer, now)

    def _compute(self, peer: int, now: float) -> None:
        if peer in self._computes or not self._queue[peer]:
            return
        forward, index, owner, m = heappop(self._queue[peer])
        hop = m.hop
        assert hop is not None
        self._computes.add(peer)
        seconds = self._seats.forward_s[peer] if forward else self._seats.backward_s[peer]
        self.computed[peer] += seconds
        self.bars.append(Bar(peer, hop.stage, index, forward, now, now + seconds))
        self._at(now + seconds, lambda then: self._computed(owner, m, hop, then))

    def _computed(self, owner: int, m: Microbatch, hop: Hop, now: float) -> None:
        """What was made goes straight to whoever goes on with it, a receipt to the owner."""
        peer = int(hop.peer)
        self._computes.discard(peer)
        self._lacks[m.index] = 2 if hop.to else 1
        made = OUTPUT if hop.kind is Kind.FORWARD else GRADIENT if hop.stage > 0 else EMPTY
        if hop.to:
            self._send(peer, int(hop.to), (made,), now, lambda then: self._came(owner, m, then))
        self._send(peer, owner, (), now, lambda then: self._answered(owner, m, hop, made, then))
        self._compute(peer, now)

    def _answered(self, owner: int, m: Microbatch, hop: Hop, made: str, now: float) -> None:
        self._routes[owner].answered(hop.peer, now - hop.sent, hop.kind.size, now)
        if hop.kind is Kind.BACKWARD:
            m.booked[hop.stage] = hop.peer
        if made:
            m.made(hop, hop.kind is Kind.BACKWARD)
        m.progressed()
        m.next = hop.to
        self._advance(owner, m, now)


def _microbatches(
    seats: Seats, cluster: Cluster, rng: np.random.Generator
) -> tuple[float, tuple[Floats, Floats, Floats, Floats]]:
    """Seconds, and what each device spent computing, sending and receiving, and sent."""
    if seats.microbatches <= LONGEST:
        return _played(seats, cluster, rng, seats.microbatches)
    whole_s, used = _played(seats, cluster, rng, LONGEST)
    half_s, _ = _played(seats, cluster, rng, LONGEST // 2)
    more = (seats.microbatches - LONGEST) / (LONGEST - LONGEST // 2)
    scale = seats.microbatches / LONGEST
    compute, up, down, sent = (values * scale for values in used)
    return whole_s + more * (whole_s - half_s), (compute, up, down, sent)


def _played(
    seats: Seats, cluster: Cluster, rng: np.random.Generator, microbatches: int
) -> tuple[float, tuple[Floats, Floats, Floats, Floats]]:
    play, start = _Play(seats, cluster, rng), 0.0
    rounds = max(1, min(ROUNDS_MOST, LONGEST // microbatches))
    for _ in range(rounds):
        start = play.run(microbatches, start)
    before = [play.computed.copy(), play.lines.up_used.copy(), play.lines.down_used.copy(), play.lines.sent.copy()]
    end = start
    for _ in range(rounds):
        end = play.run(microbatches, end)
    after = (play.computed, play.lines.up_used, play.lines.down_used, play.lines.sent)
    compute, up, down, sent = ((late - early) / rounds for late, early in zip(after, before, strict=True))
    return (end - start) / rounds, (compute, up, down, sent)


def timeline(seats: Seats, cluster: Cluster, rng: np.random.Generator) -> tuple[Bar, ...]:
    """Who computes what when, in the microbatches of one step after another has warmed the wiring up; at most LONGEST of them."""
    play, microbatches = _Play(seats, cluster, rng), min(seats.microbatches, LONGEST)
    start = play.run(microbatches, 0.0)
    play.bars.clear()
    play.run(microbatches, start)
    return tuple(
        msgspec.structs.replace(bar, start_s=bar.start_s - start, end_s=bar.end_s - start) for bar in play.bars
    )


# --------------------------------------------------------------------------------------------- averaging and agreeing


def _averaging(seats: Seats, cluster: Cluster) -> tuple[float, Floats]:
    """The slowest stage's, and what every device sends."""
    lines, end_s = _Lines(cluster), 0.0
    if sum(len(seats.replicas(stage)) ** 2 for stage in range(seats.stages)) > PAIRS_MOST:
        sent = np.zeros(len(cluster.devices))
        for stage, nbytes in enumerate(seats.gradient_bytes):
            group = seats.replicas(stage)
            sent[group] = [2 * nbytes * (1 - 1 / len(group))] * len(group)
            if shares := owned(_of(seats.widths, group)):
                sent[group] = [nbytes * (1 + (len(group) - 2) * share / sum(shares)) for share in shares]
        return _rough_averaging_s(seats, cluster), sent
    for stage in range(seats.stages):
        group = seats.replicas(stage)
        end_s = max(end_s, _round_s(lines, group, seats.gradient_bytes[stage], _of(seats.widths, group)))
    return end_s, lines.sent


def _round_s(lines: _Lines, group: list[int], gradient_bytes: float, widths: tuple[int, ...] = ()) -> float:
    """One stage's, as core/allreduce/layout.py lays it out: parts to those who add them, of rows' sums too, and sums to
    those who lack them."""
    places, share, end_s, serial = _places(len(group), widths), gradient_bytes / (len(group) * VALUES), 0.0, count()
    missing = [{number: len(peers) for number, peers in place.adds.items()} for place, _ in places]
    waiting = [
        (deque[tuple[int, int, bool]](), deque[tuple[int, int, bool]]()) for _ in group
    ]  # to, chunk, is a sum: the first before the others
    sliced = bool(owned(widths))  # then sums go before parts
    # When, serial, from (-1: all of it is here), to (-1: the line is free), chunk, is a sum.
    events: list[tuple[float, int, int, int, int, bool]] = []

    def send(source: int, target: int, number: int, now: float, is_sum: bool) -> None:
        waiting[source][not (is_sum and sliced)].append((target, number, is_sum))
        if lines.free(group[source]) <= now:
            go_on(source, now)

    def go_on(source: int, now: float) -> None:
        if not any(waiting[source]):
            return
        target, number, is_sum = waiting[source][not waiting[source][0]].popleft()
        at = lines.leave(group[source], group[target], share * places[source][1][number], now)
        heappush(events, (at, next(serial), source, target, number, is_sum))
        heappush(events, (lines.free(group[source]), next(serial), source, -1, 0, False))

    def brought(adds: dict[int, str], at: int, now: float) -> None:
        for number, peer in adds.items():
            if int(peer) != at:
                send(at, int(peer), number, now, False)
        for number, peer in adds.items():
            if int(peer) == at:
                came(at, number, now)

    def came(at: int, number: int, now: float) -> None:
        missing[at][number] -= 1
        if not missing[at][number]:
            place = places[at][0]
            if number in place.hears:
                told(at, number, now)
            else:
                brought(place.passes, at, now)

    def told(at: int, number: int, now: float) -> None:
        for peer in places[at][0].tells.get(number, ()):
            send(at, int(peer), number, now, True)

    for at, (place, _) in enumerate(places):
        brought(place.brings, at, 0.0)
    while events:
        now, _, source, target, number, is_sum = heappop(events)
        if target < 0:
            go_on(source, now)
        elif source < 0:
            end_s = now
            (told if is_sum else came)(target, number, now)
        else:
            done_s = lines.arrive(group[source], group[target], share * places[source][1][number], now)
            heappush(events, (done_s, next(serial), -1, target, number, is_sum))
    return end_s


@cache
def _places(replicas: int, widths: tuple[int, ...] = ()) -> tuple[tuple[Place, dict[int, int]], ...]:
    """Of every replica, by number; and the values of each chunk that it sends, of VALUES for each replica."""
    names = tuple(map(str, range(replicas)))
    layout = split(replicas * VALUES, names, widths=widths)
    whole = {n: high - low for n, (low, high) in zip(layout.numbers, pairwise(layout.bounds), strict=True)}
    found = []
    for place in map(layout.place, names):
        cut = [high - low for low, high in pairwise(place.cuts)]
        found.append((place, whole | dict(zip(sorted(place.brings), cut, strict=True))))
    return tuple(found)


def _rough_averaging_s(seats: Seats, cluster: Cluster) -> float:
    """The same for lines that are full from the first byte to the last, and pairs side by side."""
    worst = 0.0
    for stage, nbytes in enumerate(seats.gradient_bytes):
        group = seats.replicas(stage)
        if len(group) < 2:
            continue
        machines = [cluster.devices[device] for device in group]
        line_Bps = min(min(machine.up_Bps or math.inf, machine.down_Bps or math.inf) for machine in machines)
        at = np.ix_(group, group)
        off = ~np.eye(len(group), dtype=bool)
        pair_Bps, delay_s = float(cluster.bandwidth_Bps[at][off].min()), float(cluster.delay_s[at][off].max())
        rows = row_lengths(len(group))
        held, exchanges = nbytes, (rows[0], len(rows)) if len(rows) > 1 else rows  # among so many, there and back
        there_s = 0.0
        for among in exchanges:
            there_s += max(held / among / pair_Bps, held * (1 - 1 / among) / line_Bps) + delay_s
            held /= among
        widths = _of(_widths(cluster), group)
        if shares := owned(widths):
            most = zip(shares, widths, strict=True)
            busy_s = max(nbytes * (1 + (len(group) - 2) * own / sum(shares)) / (1000 * width) for own, width in most)
            pair_s = nbytes * max(shares) / sum(shares) / pair_Bps
            there_s = min(there_s, max(busy_s * (1 + 1 / SLICES) / 2, pair_s) + delay_s)
        worst = max(worst, 2 * there_s)
    return worst


def _trips_s(seats: Seats, cluster: Cluster) -> float:
    """An owner drives `inflight` microbatches at once, each through all hops: on average devices and links."""
    members = seats.members
    at = np.ix_(members, members)
    delay_s = float(np.mean(cluster.delay_s[at]))
    line_s = float(np.mean([1 / (cluster.devices[device].up_Bps or math.inf) for device in members]))
    pair_s = (
        float(np.mean(1 / cluster.bandwidth_Bps[at][~np.eye(len(members), dtype=bool)])) if len(members) > 1 else 0.0
    )
    moved_s = sum(request_bytes(seats)) * (1 - 1 / len(members)) * max(line_s, pair_s)
    delays_s = 2 * (2 * seats.stages - 1) * delay_s
    # While a tensor is on its way, so are a receipt and the next request.
    handed_s = [nbytes * max(line_s, pair_s) for nbytes in (seats.boundary_bytes, seats.back_bytes)]
    moved_s += (seats.stages - 1) * sum(max(seconds - delay_s, 0.0) for seconds in handed_s)
    compute_s = sum(
        float(np.mean([hop_s(seats, device) for device in seats.replicas(stage)])) for stage in range(seats.stages)
    )
    trips = math.ceil(math.ceil(seats.microbatches / len(members)) / seats.inflight)
    return trips * (compute_s + delays_s + moved_s)


def _agreeing(delay_s: Floats) -> float:
    """Pulse, round, reduced and the new view reach or come from everybody; propose and accept a majority. Any peer may lead."""
    return _ways(delay_s, 4)


def _closing(delay_s: Floats) -> float:
    """With delayed updates, between two steps: the last pulse, and the view that opens the next step."""
    return _ways(delay_s, 2)


def _behind(delay_s: Floats) -> float:
    """Then beside the averaging: round, reduced, and the view that commits."""
    return _ways(delay_s, 3)


def _ways(delay_s: Floats, everybody: int) -> float:
    """So many messages to or from everybody, and two of a majority."""
    if len(delay_s) == 1:
        return 0.0
    both = np.maximum(delay_s, delay_s.T)
    np.fill_diagonal(both, 0.0)
    farthest, typical = both.max(axis=1).mean(), np.median(both, axis=1).mean()
    return float(everybody * farthest + 2 * typical)


def _shared_s(cluster: Cluster, play: tuple[Floats, Floats, Floats, Floats], averaged_bytes: Floats) -> float:
    """The busiest own line, when it carries a step's microbatches and another's averaging. What is averaged comes as it goes."""
    _, up_s, down_s, _ = play
    lines = zip(cluster.devices, up_s, down_s, averaged_bytes, strict=True)
    return max(
        float(max(up + nbytes / (device.up_Bps or math.inf), down + nbytes / (device.down_Bps or math.inf)))
        for device, up, down, nbytes in lines
    )


def hop_s(seats: Seats, device: int) -> float:
    """Compute of one microbatch at a device; the last stage runs no forward of its own."""
    last = seats.stage_of[device] == seats.stages - 1
    return max(seats.backward_s[device] + (0.0 if last else seats.forward_s[device]), 1e-12)


def _lines_s(seats: Seats, cluster: Cluster) -> float:
    """The busiest own line, if every owner and replica takes an even share."""
    members = seats.members
    asked, (handed_on, handed) = request_bytes(seats), handed_bytes(seats)
    owned = seats.microbatches / len(members)
    worst = 0.0
    for device in members:
        stage = seats.stage_of[device]
        served = seats.microbatches / len(seats.replicas(stage))
        foreign = 1 - 1 / len(members)
        sent = owned * (sum(asked) - asked[stage] / len(seats.replicas(stage)))
        sent += served * handed_on[stage]
        received = served * (foreign * asked[stage] + handed[stage])
        machine = cluster.devices[device]
        worst = max(worst, sent / (machine.up_Bps or math.inf), received / (machine.down_Bps or math.inf))
    return worst


def _bottleneck(
    seats: Seats,
    cluster: Cluster,
    busy: tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]],
    parts_s: tuple[float, float, float],
) -> str:
    """What would have to be faster, in words."""
    total_s = sum(parts_s)
    if parts_s[1] > parts_s[0]:
        return f"averaging gradients takes {parts_s[1] / total_s:.0%} of the step"
    if parts_s[2] > parts_s[0]:
        return f"agreeing takes {parts_s[2] / total_s:.0%} of the step: delay; a larger batch would hide it"
    share, kind, device = max(
        (share, kind, device)
        for kind, shares in zip(("compute", "uplink", "downlink"), busy, strict=True)
        for device, share in enumerate(shares)
    )
    name = cluster.devices[device].name
    share = min(share, 1.0)
    if share < BUSY and seats.microbatches <= seats.inflight * len(seats.members):
        return (
            f"few microbatches: all of a step's are on their way at once, yet nothing is busy for more than {share:.0%} of"
            f" the time ({kind} of {name}); try a smaller train.microbatch"
        )
    if share < BUSY:
        return f"latency: nothing is busy for more than {share:.0%} of the time ({kind} of {name}); try a larger run.inflight"
    if kind == "compute":
        return f"compute of stage {seats.stage_of[device]} ({name} is busy {share:.0%} of the time)"
    return f"{kind} of {name}, busy {share:.0%} of the time"

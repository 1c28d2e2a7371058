"""Every simulated peer's own line, and what travels over it at its size: for scenarios with `lines`, and for network.py.

Without it a sender's uplink alone takes time, and all tensors of a kind are alike. With it a boundary tensor, a chunk of a gradient and
a chunk of a state take their own bytes' time from the sender's uplink and from the receiver's downlink, as a modelled link does on
real processes (transport/emulated/shaped.py, whose slots.py this is), and encoding and decoding take compute. What a
case has of all that is
drawn from a stream of its own, so that histories without lines are what they were.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from random import Random

import msgspec

from shoal.codec import Travel, bytes_per_value, decode_s, encode_s
from shoal.core import messages as m
from shoal.sim.kernel import Kernel
from shoal.sim.tasks.storage import CHUNKS, Blob
from shoal.slots import Inflow, shares_of

FP32 = 4  # bytes of a value as it is computed
STATE = 3  # parameters and two moments
TOKENS = 4096  # bytes of a microbatch's token ids
LEFT_S = 1e-9  # of a blob whose time has passed: rounding


class LineRates(msgspec.Struct, frozen=True):
    """0: as wide as can be."""

    up_Bps: float = 0.0
    down_Bps: float = 0.0


class Ranges(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a scenario draws lines and sizes from. Sizes are drawn as the time that they take on the middle one of the uplinks."""

    up_Bps: tuple[float, float] = (2e6, 5e7)
    wider: tuple[float, float] = (1.0, 8.0)  # a downlink over its uplink
    boundary: tuple[float, float] = (0.05, 1.0)  # of a boundary tensor, over a forward's
    gradient_s: tuple[float, float] = (0.05, 3.0)  # of a stage's gradient


class Wire(msgspec.Struct, frozen=True, kw_only=True):
    """Of one case. `lines[i]` is peer i's."""

    lines: tuple[LineRates, ...]
    boundary_values: int
    gradient_values: int  # of one stage
    travel: Travel = Travel()

    def line(self, peer: m.Peer) -> LineRates:
        """`p7.2` is the third process of peer 7."""
        return self.lines[int(peer[1 : peer.index(".")]) % len(self.lines)]

    def measured(self, known: m.LineMeasured, peer: m.Peer, *, up: bool) -> m.LineMeasured:
        """What that peer knows of its line once bulk has passed it in that direction."""
        line = self.line(peer)
        rate = round((line.up_Bps if up else line.down_Bps) / 1e3)
        return msgspec.structs.replace(known, **{"up_kBps" if up else "down_kBps": rate})

    def link(self, source: m.Peer, target: m.Peer) -> tuple[float, float] | None:
        """Delay, s, and bandwidth, bytes/s, from one peer to another; None: as the scenario has them."""
        return None

    def nbytes(self, blob: tuple[object, ...], chunks: int) -> int:
        """Of what sim/tasks/task_runner.py makes of a tensor, a state being cut into `chunks`. One that is no tensor at all
        takes a boundary's."""
        match blob:
            case ("x", _, _, 0, _):
                return TOKENS
            case ("part", _, int(low), int(high), _):
                return int((high - low) * bytes_per_value(self.travel.averaging, FP32))
            case ("state", *_):
                return STATE * FP32 * self.gradient_values // chunks
            case ("g", *_):
                return int(self.boundary_values * bytes_per_value(self.travel.gradients, FP32))
        return int(self.boundary_values * bytes_per_value(self.travel.activations, FP32))

    def codec_s(self, task: m.Task, stages: int, inputs: Sequence[tuple[object, ...]] = ()) -> float:
        """Seconds that a peer of usual speed encodes and decodes for that task. `inputs`: what it adds or gathers."""
        travel, boundary = self.travel, self.boundary_values
        match task:
            case m.RunForward():
                x = decode_s(travel.activations, boundary) if task.stage > 0 else 0.0
                return x + (encode_s(travel.activations, boundary) if task.stage < stages - 1 else 0.0)
            case m.RunBackward():
                x = decode_s(travel.activations, boundary) + encode_s(travel.gradients, boundary) if task.stage else 0.0
                return x + (decode_s(travel.gradients, boundary) if task.stage < stages - 1 else 0.0)
            case m.Cut():
                return encode_s(travel.averaging, task.bounds[-1] - task.bounds[0])
            case m.AddRow() | m.Add():  # parts as long as their sum
                received = sum(map(part_values, inputs))
                return decode_s(travel.averaging, received) + encode_s(travel.averaging, received / len(inputs))
            case m.Gather():
                return decode_s(travel.averaging, sum(map(part_values, inputs[: len(task.sums)])))
        return 0.0


def part_values(blob: tuple[object, ...]) -> int:
    """Of a round's part or sum; 0 of what was found bad."""
    match blob:
        case ("part", _, int(low), int(high), *_):
            return high - low
    return 0


class QueuedBlobs(msgspec.Struct, frozen=True):
    """A message with blobs, of which each knows its bytes, that goes over its sender's line and takes it for so many seconds."""

    source: m.Peer
    target: m.Peer
    message: m.Message
    values: tuple[Blob, ...]
    nbytes: int
    rank: int
    seconds: float


class SimulatedUplink:
    """A sender's line, as transport/streams/send_queue.py fills it where pieces are small: of what waits the highest rank goes, and lower
    ones have a turn each after so many of its turns (PASSED). `leave` is called at the time at which the last byte has left, so whatever
    is put in the meantime and goes first holds up what waits."""

    def __init__(self, bandwidth_Bps: float, kernel: Kernel, leave: Callable[[QueuedBlobs], None]) -> None:
        self.bandwidth_Bps = bandwidth_Bps  # 0: as wide as can be
        self._kernel = kernel
        self._leave = leave
        self._queues: tuple[deque[QueuedBlobs], ...] = tuple(deque() for _ in range(m.RANKS))
        self._rest_s = [0.0] * m.RANKS  # of the line, that the first of each queue still takes
        self._ranks: list[int] = []  # of which something waits, in order
        self._then_s = 0.0  # until when the line has been followed
        self._due_s = math.inf  # of the event that is scheduled

    def put(self, queued: QueuedBlobs) -> None:
        self._advance()
        rank = queued.rank
        queue = self._queues[rank]
        if not queue:
            insort(self._ranks, rank)
            self._rest_s[rank] = queued.seconds
        queue.append(queued)
        self._schedule()

    def withdraw(self, is_void: Callable[[QueuedBlobs], bool]) -> None:
        """Such blobs do not go, if nothing of them has left."""
        if not any(is_void(queued) for rank in self._ranks for queued in self._queues[rank]):
            return
        self._advance()
        for rank in tuple(self._ranks):
            queue = self._queues[rank]
            begun = self._rest_s[rank] < queue[0].seconds - LEFT_S
            kept = [queued for place, queued in enumerate(queue) if (begun and not place) or not is_void(queued)]
            if not begun or not kept:
                self._first(rank, kept)
            queue.clear()
            queue.extend(kept)
        self._schedule()

    def _first(self, rank: int, queue: Sequence[QueuedBlobs]) -> None:
        """Another one is the first of that rank now, or none is."""
        if queue:
            self._rest_s[rank] = queue[0].seconds
        else:
            self._ranks.remove(rank)

    def _advance(self) -> None:
        """What waits is what waits now. Nothing has wholly left since then: there would have been an event."""
        passed_s, self._then_s = self._kernel.now - self._then_s, self._kernel.now
        if not passed_s or not self._ranks:
            return
        if len(self._ranks) == 1:  # as mostly
            self._rest_s[self._ranks[0]] -= passed_s
            return
        for rank, share in zip(self._ranks, shares_of(tuple(self._ranks)), strict=True):
            self._rest_s[rank] -= share * passed_s

    def _schedule(self) -> None:
        """An event when the next blob has left, if none comes before."""
        ranks, rest_s = self._ranks, self._rest_s
        if not ranks:
            return
        if len(ranks) == 1:
            after_s = rest_s[ranks[0]]
        else:
            after_s = min([rest_s[rank] / share for rank, share in zip(ranks, shares_of(tuple(ranks)), strict=True)])
        due_s = self._kernel.now + after_s
        if due_s < self._due_s:
            self._due_s = due_s
            self._kernel.at(due_s, self._due, due_s)

    def _due(self, due_s: float) -> None:
        if due_s != self._due_s:  # one that was due before has taken its place
            return
        self._due_s = math.inf
        self._advance()
        left = [rank for rank in self._ranks if self._rest_s[rank] <= LEFT_S]
        passed = [self._queues[rank].popleft() for rank in left]
        for rank in left:
            self._first(rank, self._queues[rank])
        self._schedule()
        for queued in passed:
            self._leave(queued)


class Uplinks:
    """Every sender's line. `leave` gets what has left one."""

    def __init__(self, wire: Wire, kernel: Kernel, leave: Callable[[QueuedBlobs], None]) -> None:
        self._wire = wire
        self._kernel = kernel
        self._leave = leave
        self._uplinks: dict[m.Peer, SimulatedUplink] = {}

    def put(self, source: m.Peer, target: m.Peer, message: m.Message, values: tuple[Blob, ...]) -> None:
        uplink = self._uplinks.get(source)
        if uplink is None:
            up_Bps = self._wire.line(source).up_Bps
            uplink = self._uplinks[source] = SimulatedUplink(up_Bps, self._kernel, self._leave)
        nbytes = sum([self._wire.nbytes(value, CHUNKS) for value in values])
        seconds = nbytes / uplink.bandwidth_Bps if uplink.bandwidth_Bps else 0.0
        uplink.put(QueuedBlobs(source, target, message, values, nbytes, m.rank(message), seconds))

    def withdraw(self, source: m.Peer, is_void: Callable[[m.Peer, m.Message], bool]) -> None:
        """Such messages, of which nothing has left, do not go."""
        if (uplink := self._uplinks.get(source)) is not None:
            uplink.withdraw(lambda queued: is_void(queued.target, queued.message))

    def forget(self, target: m.Peer) -> None:
        """It is dead: connections to it carry nothing more."""
        for uplink in self._uplinks.values():
            uplink.withdraw(lambda queued: queued.target == target)


class Downlinks:
    """When what has come to a peer's line is through it."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._inflow: dict[m.Peer, tuple[float, Inflow]] = {}  # with the line's width
        self._last: dict[tuple[m.Peer, m.Peer, int], float] = {}

    def through(self, source: m.Peer, target: m.Peer, nbytes: int, rank: int, now: float) -> float:
        """The last byte of a tensor of that rank is at the target's line `now`. In order from each sender, within a rank."""
        known = self._inflow.get(target)
        if known is None:
            known = self._inflow[target] = self._wire.line(target).down_Bps, Inflow()
        (width, inflow), key = known, (source, target, rank)
        at = max(inflow.through(source, nbytes / width if width else 0.0, now, rank), self._last.get(key, 0.0))
        self._last[key] = at
        return at


def draw(ranges: Ranges, peers: int, forward_s: float, rng: Random) -> Wire:
    ups = [_between(ranges.up_Bps, rng) for _ in range(peers)]
    middle_Bps = sorted(ups)[peers // 2]
    return Wire(
        lines=tuple(LineRates(up, up * _between(ranges.wider, rng)) for up in ups),
        boundary_values=max(1, int(middle_Bps * forward_s * _between(ranges.boundary, rng) / FP32)),
        gradient_values=max(1, int(middle_Bps * _between(ranges.gradient_s, rng) / FP32)),
        travel=Travel(
            activations=rng.choice(("none", "bf16", "int8", "int4")),
            gradients=rng.choice(("none", "bf16", "int8")),
            averaging=rng.choice(("none", "bf16", "int8")),
        ),
    )


def _between(bounds: tuple[float, float], rng: Random) -> float:
    low, high = bounds
    return float(low * (high / low) ** rng.random())

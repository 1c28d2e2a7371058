"""Every simulated peer's own line, and what travels over it at its size: for scenarios with `lines`, and for network.py.

Without it a sender's uplink alone takes time, and all tensors of a kind are alike. With it a boundary tensor, a chunk of a gradient and
a chunk of a state take their own bytes' time from the sender's uplink and from the receiver's downlink, as a modelled link does on
real processes (transport/emulated/shaped.py, whose slots.py this is), and encoding and decoding take compute. What a
case has of all that is
drawn from a stream of its own, so that histories without lines are what they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import msgspec

from shoal.codec import Travel, bytes_per_value, decode_s, encode_s
from shoal.core import messages as m
from shoal.slots import Inflow

FP32 = 4  # bytes of a value as it is computed
STATE = 3  # parameters and two moments
TOKENS = 4096  # bytes of a microbatch's token ids


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

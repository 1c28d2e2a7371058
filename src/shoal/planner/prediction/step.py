"""Predicts one optimizer step of this program as it is built: which stage each device serves is given.

The cost model in communication.py is the paper's; this is what decides. The microbatches are played (play.py), then the averaging
(averaging.py), on lines that pass one message after the other and links of pairs that are filled side by side, as in
transport/emulated/shaped.py; agreeing costs the messages of a round and of a view. The optimizer's seconds are added to the averaging where
machines say their rate. Not in it: checkpoints, faults, losses on the wire, full activation stores, and, where delays do not
spread, full queues and what goes first on a line.

Some steps are played to warm the wiring up and as many are timed. A long step is played in two lengths and extended.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from shoal.core.allreduce.layout import owned
from shoal.core.leader.rules.lines import believed
from shoal.planner.costs.arrays import Floats
from shoal.planner.inputs.cluster import Cluster
from shoal.planner.prediction.averaging import averaging, rough_averaging_s
from shoal.planner.prediction.seats import Seats, handed_bytes, hop_s, line_rates, of_group, paced, request_bytes
from shoal.planner.prediction.timed import SETTLED, Used, played

WEIGHTED_GAIN = 1.05  # so much longer must a round of even owners take, or they stay even
BUSY = 0.85  # of the time: from here on a resource is called the bottleneck


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


def predict(
    seats: Seats, cluster: Cluster, rng: np.random.Generator, spread: float = 0.0, settled: int = SETTLED
) -> Step:
    """Seconds of a step, where they go, and what limits it. `spread`: by which share of a link's delay its messages' differ (lines.py).
    `settled`: steps that warm a long one up (play.py)."""
    if not (seats.turns or seats.routes):
        seats = paced(seats, believed(line_rates(cluster)))
    microbatches_s, used = played(seats, cluster, rng, spread, settled)
    averaging_s, averaged_bytes = averaging(seats, cluster)
    averaging_s += seats.round_work_s
    delay_s = cluster.delay_s[np.ix_(seats.members, seats.members)]
    agreeing_s = _agreeing(delay_s)
    if seats.staleness:
        beside_s = max(averaging_s + _behind(delay_s), _shared_s(cluster, used, averaged_bytes))
        averaging_s, agreeing_s = max(beside_s - microbatches_s, 0.0), _closing(delay_s)
    seconds = (used.compute_s, used.up_s, used.down_s)
    compute, up, down = (tuple(float(share) for share in each / max(microbatches_s, 1e-12)) for each in seconds)
    total_s = microbatches_s + averaging_s + agreeing_s
    bottleneck = _bottleneck(seats, cluster, (compute, up, down), (microbatches_s, averaging_s, agreeing_s))
    sent_bytes = tuple(float(value) for value in used.sent_bytes + averaged_bytes)
    return Step(total_s, microbatches_s, averaging_s, agreeing_s, compute, up, down, sent_bytes, bottleneck)


def rough_s(seats: Seats, cluster: Cluster) -> float:
    """The same quickly, for searches: compute of the slowest stage, the busiest line at even shares, or the trips that an
    owner's microbatches make one after the other, whichever is longest; then averaging and agreeing."""
    work_s = []
    for stage in range(seats.stages):
        work_s.append(seats.microbatches / sum(1 / hop_s(seats, device) for device in seats.replicas(stage)))
    longest_s = max(max(work_s), _lines_s(seats, cluster), _trips_s(seats, cluster))
    delay_s, averaging_s = cluster.delay_s[np.ix_(seats.members, seats.members)], rough_averaging_s(seats, cluster)
    if seats.staleness:
        return max(longest_s, averaging_s + _behind(delay_s)) + _closing(delay_s)
    return longest_s + averaging_s + _agreeing(delay_s)


def weighted(seats: Seats, cluster: Cluster) -> Seats:
    """The same with owners weighted by their lines, if a round is sooner over by that."""
    other = msgspec.structs.replace(seats, line_rates=line_rates(cluster))
    if not any(owned(of_group(other.line_rates, seats.replicas(stage))) for stage in range(seats.stages)):
        return seats
    return other if averaging(other, cluster)[0] * WEIGHTED_GAIN < averaging(seats, cluster)[0] else seats


# ------------------------------------------------------------------------------------------------- rough parts of a step


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
    # A receipt and the next request travel beside a tensor.
    handed_s = [nbytes * max(line_s, pair_s) for nbytes in (seats.boundary_bytes, seats.back_bytes)]
    moved_s += (seats.stages - 1) * sum(max(seconds - delay_s, 0.0) for seconds in handed_s)
    compute_s = sum(
        float(np.mean([hop_s(seats, device) for device in seats.replicas(stage)])) for stage in range(seats.stages)
    )
    trips = math.ceil(math.ceil(seats.microbatches / len(members)) / seats.most_inflight)
    return trips * (compute_s + delays_s + moved_s)


# ----------------------------------------------------------------------------------------------------------- agreeing


def _agreeing(delay_s: Floats) -> float:
    """Heartbeat, round, reduced and the new view reach or come from everybody; propose and accept a majority. Any peer may lead."""
    return _messages_s(delay_s, 4)


def _closing(delay_s: Floats) -> float:
    """With delayed updates, between two steps: the last heartbeat, and the view that opens the next step."""
    return _messages_s(delay_s, 2)


def _behind(delay_s: Floats) -> float:
    """Then beside the averaging: round, reduced, and the view that commits."""
    return _messages_s(delay_s, 3)


def _messages_s(delay_s: Floats, everybody: int) -> float:
    """So many messages to or from everybody, and two of a majority."""
    if len(delay_s) == 1:
        return 0.0
    both = np.maximum(delay_s, delay_s.T)
    np.fill_diagonal(both, 0.0)
    farthest, typical = both.max(axis=1).mean(), np.median(both, axis=1).mean()
    return float(everybody * farthest + 2 * typical)


def _shared_s(cluster: Cluster, used: Used, averaged_bytes: Floats) -> float:
    """Seconds of the busiest own line, with the microbatches of one step and the averaging of another on it."""
    lines = zip(cluster.devices, used.up_s, used.down_s, averaged_bytes, strict=True)
    return max(
        float(max(up + nbytes / (device.up_Bps or math.inf), down + nbytes / (device.down_Bps or math.inf)))
        for device, up, down, nbytes in lines
    )


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
    if share < BUSY and seats.microbatches <= seats.most_inflight * len(seats.members):
        return (
            f"few microbatches: all of a step's are on their way at once, yet nothing is busy for more than {share:.0%} of"
            f" the time ({kind} of {name}); try a smaller train.microbatch"
        )
    if share < BUSY:
        return f"latency: nothing is busy for more than {share:.0%} of the time ({kind} of {name}); try a larger run.inflight"
    if kind == "compute":
        return f"compute of stage {seats.stage_of[device]} ({name} is busy {share:.0%} of the time)"
    return f"{kind} of {name}, busy {share:.0%} of the time"

"""Seconds of a step's microbatches: some steps are played to warm the wiring up, and as many are timed.

A long step is played in two lengths and extended; of a large fleet a part of the machines plays it.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from shoal.planner.costs.arrays import Floats
from shoal.planner.inputs.cluster import Cluster
from shoal.planner.prediction.detours import PlayWithDetours, may_be_full
from shoal.planner.prediction.play import Bar, Play
from shoal.planner.prediction.seats import Seats, handed_bytes, hop_s, part_of, thinned

LONGEST = 192  # microbatches that are played; a longer step is extended from this many and half of them
# A longer step is played with this many windows of every owner in the half, up to MOST_PLAYED microbatches. Of 16 owners with 12 and 6
# microbatches each, steps of 512 came out up to 20 % off, either way: nothing shows there what a window does
WINDOWS, WIDEST, MOST_PLAYED = 2, 16, 1024
# Of a fleet that is too large for this, so many machines at a stage play it, or more if each of them still plays that many microbatches
LEAST_AT_STAGE = 4
# Steps that warm up such a one, and as many that are timed, of so many machines at most; of more, one. A comparison does with one
SETTLED, SETTLED_MOST = 3, 32
ROUNDS_MOST = 8  # steps that are played to warm up, and again to be timed: a short step depends on chance
# At least so many with delays that differ: the second and third step are up to 40 % longer than those of a settled run
ROUNDS_LEAST = 4


class Used(msgspec.Struct, frozen=True):
    """What a step's microbatches take of each device: seconds of compute, uplink and downlink, and bytes sent."""

    compute_s: Floats
    up_s: Floats
    down_s: Floats
    sent_bytes: Floats


def played(
    seats: Seats, cluster: Cluster, rng: np.random.Generator, spread: float = 0.0, settled: int = SETTLED
) -> tuple[float, Used]:
    """Seconds of a step's microbatches, and what they take of each device. `spread`: of delays (lines.py). `settled`: steps that warm a
    long one up, and as many that are timed."""
    if len(few := shown_by(seats)) < len(seats.members):
        return _of_a_part(seats, few, cluster, rng, spread, settled)
    return _of_all(seats, cluster, rng, spread, settled)


def _of_all(
    seats: Seats, cluster: Cluster, rng: np.random.Generator, spread: float, settled: int
) -> tuple[float, Used]:
    if seats.microbatches <= LONGEST:
        return _timed(_play(seats, cluster, rng, spread), seats.microbatches, ROUNDS_LEAST if spread else 1)
    most = longest(seats)
    least = settled if len(seats.members) <= SETTLED_MOST else 1
    if seats.microbatches <= most:
        return _timed(_play(seats, cluster, rng, spread), seats.microbatches, least)
    whole_s, used = _timed(_play(seats, cluster, rng, spread), most, least)
    half_s, _ = _timed(_play(seats, cluster, rng, spread), most // 2, least)
    more = (seats.microbatches - most) / (most - most // 2)
    scale = seats.microbatches / most
    extended = Used(used.compute_s * scale, used.up_s * scale, used.down_s * scale, used.sent_bytes * scale)
    return whole_s + more * (whole_s - half_s), extended


def _of_a_part(
    seats: Seats, few: list[int], cluster: Cluster, rng: np.random.Generator, spread: float, settled: int
) -> tuple[float, Used]:
    """By what these machines take. Stages have not exactly the same share of them, and their slowest may be left out: so much longer as
    the whole is by arithmetic. A machine that is left out takes what the one before it at its stage does."""
    part, their_cluster = part_of(seats, few), cluster.chosen(few)
    seconds, used = _of_all(part, their_cluster, rng, spread, settled)
    at, factors = np.full(len(seats.stage_of), -1), np.zeros(len(seats.stage_of))
    for stage in range(seats.stages):
        group, kept = seats.replicas(stage), [place for place, own in enumerate(part.stage_of) if own == stage]
        of_each, of_kept = seats.microbatches / len(group), part.microbatches / len(kept)
        for number, device in enumerate(group):
            at[device], factors[device] = kept[number * len(kept) // len(group)], of_each / of_kept
    longer = _passed_s(seats, cluster) / _passed_s(part, their_cluster)
    spread_out = (each[at] * factors for each in (used.compute_s, used.up_s, used.down_s, used.sent_bytes))
    return seconds * longer, Used(*spread_out)


def _passed_s(seats: Seats, cluster: Cluster) -> float:
    """What the microbatches take where nothing waits, by arithmetic: between what the slowest stage takes with all its replicas busy, and
    what the replica takes that has most to do in its turns. Others take a part of that one's."""
    sent, received = handed_bytes(seats)
    turns = seats.turns or (1,) * len(seats.stage_of)
    of_a_stage_s = of_a_replica_s = 0.0
    for stage in range(seats.stages):
        group, seconds = seats.replicas(stage), list[float]()
        for device in group:
            machine = cluster.devices[device]
            line_s = max(sent[stage] / (machine.up_Bps or math.inf), received[stage] / (machine.down_Bps or math.inf))
            seconds.append(max(hop_s(seats, device), line_s))
        longest_s = max(turns[device] * own_s for device, own_s in zip(group, seconds, strict=True))
        of_a_replica_s = max(of_a_replica_s, longest_s / max(1, sum(turns[device] for device in group)))
        of_a_stage_s = max(of_a_stage_s, 1 / sum(1 / own_s for own_s in seconds))
    return seats.microbatches * math.sqrt(of_a_stage_s * of_a_replica_s)


def shown_by(seats: Seats) -> list[int]:
    """The machines that play a step: a part of them where that shows what a window does, and all do not."""
    if seats.routes or seats.microbatches <= longest(seats):
        return seats.members
    return thinned(seats.stage_of, seats.stages, most_machines(seats, seats.microbatches / len(seats.members)))


def most_machines(seats: Seats, of_each: float) -> int:
    """That play a step together: so many that each plays all of its `of_each` microbatches, or as many as show a window."""
    return max(LEAST_AT_STAGE * seats.stages, int(MOST_PLAYED / min(of_each, each_shown(seats))))


def longest(seats: Seats) -> int:
    """Microbatches of a step that are played at most."""
    return max(LONGEST, min(each_shown(seats) * len(seats.members), MOST_PLAYED))


def each_shown(seats: Seats) -> int:
    """Microbatches of each machine that are to be played, for half of them to show what a window does."""
    return 2 * WINDOWS * min(seats.inflight or WIDEST, WIDEST)


def _play(seats: Seats, cluster: Cluster, rng: np.random.Generator, spread: float) -> Play:
    """Where delays do not spread no queue is full, as nothing goes first on a line."""
    detours = spread and may_be_full(seats)
    return (PlayWithDetours if detours else Play)(seats, cluster, rng, spread)


def _timed(play: Play, microbatches: int, least: int = 1) -> tuple[float, Used]:
    """A step of so many microbatches, after as many steps that warm the wiring up, `least` of them."""
    start = 0.0
    rounds = max(least, min(ROUNDS_MOST, LONGEST // microbatches))
    for _ in range(rounds):
        start = play.run(microbatches, start)
    before = [play.computed.copy(), play.lines.up_used.copy(), play.lines.down_used.copy(), play.lines.sent.copy()]
    end = start
    for _ in range(rounds):
        end = play.run(microbatches, end)
    after = (play.computed, play.lines.up_used, play.lines.down_used, play.lines.sent)
    compute, up, down, sent = ((late - early) / rounds for late, early in zip(after, before, strict=True))
    return (end - start) / rounds - play.view_s, Used(compute, up, down, sent)


def timeline(seats: Seats, cluster: Cluster, rng: np.random.Generator) -> tuple[Bar, ...]:
    """Who computes what when, in the microbatches of one step after another has warmed the wiring up; at most LONGEST of them."""
    play, microbatches = Play(seats, cluster, rng), min(seats.microbatches, LONGEST)
    start = play.run(microbatches, 0.0)
    play.run(microbatches, start)
    return tuple(
        msgspec.structs.replace(bar, start_s=bar.start_s - start, end_s=bar.end_s - start) for bar in play.bars
    )

"""Predicts the averaging of a step: who sends which chunk to whom is core's (layout.py), the lines are lines.py's.

`averaging` plays it message by message where groups are small enough; `rough_averaging_s` is a formula, for searches.
"""

from __future__ import annotations

import math
from collections import deque
from functools import cache
from heapq import heappop, heappush
from itertools import count, pairwise

import numpy as np

from shoal.core.allreduce.layout import SLICE_VALUES, SLICES, Role, owned, row_lengths, split
from shoal.planner.costs.arrays import Floats
from shoal.planner.inputs.cluster import Cluster
from shoal.planner.prediction.lines import Lines
from shoal.planner.prediction.seats import Seats, line_rates, of_group

PAIRS_MOST = 20_000  # pairs of replicas up to which averaging is played message by message
BEGINS = -1  # no chunk's number
JOINER = -2  # no replica's
MOST_VALUES = SLICES * SLICE_VALUES  # of a round that is played, for each replica: more make no difference


def averaging(seats: Seats, cluster: Cluster) -> tuple[float, Floats]:
    """The slowest stage's, and what every device sends."""
    ends_s, sent = averaging_ends(seats, cluster)
    return max(ends_s), sent


def averaging_ends(seats: Seats, cluster: Cluster, joiners: tuple[int, ...] = ()) -> tuple[list[float], Floats]:
    """When each member, by stage, has all its sums; and what every device sends. `joiners`: so many of each stage get the sums, too. Where
    the seats say who leads, its word to the others and theirs to it take what they take, less what the farthest of them do, which is no
    part of a round (step.py)."""
    lines = Lines(cluster)
    if sum(len(seats.replicas(stage)) ** 2 for stage in range(seats.stages)) > PAIRS_MOST:
        sent = np.zeros(len(cluster.devices))
        for stage, nbytes in enumerate(seats.gradient_bytes):
            group = seats.replicas(stage)
            sent[group] = [2 * nbytes * (1 - 1 / len(group))] * len(group)
            if shares := owned(of_group(seats.line_rates, group)):
                sent[group] = [nbytes * (1 + (len(group) - 2) * share / sum(shares)) for share in shares]
        return [rough_averaging_s(seats, cluster)] * len(seats.members), sent
    ends_s: list[float] = []
    for stage in range(seats.stages):
        group = seats.replicas(stage)
        values = _played_values(seats.gradient_bytes[stage] / seats.value_bytes, len(group))
        away_s = [0.0 if seats.leader is None else lines.delay_s(seats.leader, device) for device in group]
        rates = of_group(seats.line_rates, group)
        also = joiners[stage] if joiners else 0
        played_s = _Round(lines, group, seats.gradient_bytes[stage], values, rates, also).play(away_s)
        ends_s += [end_s + own_s for end_s, own_s in zip(played_s, away_s, strict=True)]
    unseen_s = 0.0 if seats.leader is None else 2 * lines.farthest(seats.leader, seats.members)
    return [max(0.0, end_s - unseen_s) for end_s in ends_s], lines.sent


class _Round:
    """One stage's round: each replica's chunks go to their owners, through rows where the group is large, and sums go back.

    `lines` carries the chunks; what other stages have sent on them counts."""

    def __init__(
        self,
        lines: Lines,
        group: list[int],
        gradient_bytes: float,
        values: int,
        line_rates: tuple[int, ...],
        joiners: int = 0,
    ) -> None:
        """`values`: that are played for each replica. `joiners`: get the sums, too; in a group of several rows that is left out."""
        self._lines = lines
        self._group = group
        self._roles = _roles(len(group), values, line_rates)
        self._value_bytes = gradient_bytes / (len(group) * values)
        self._missing = [{number: len(peers) for number, peers in role.adds.items()} for role, _ in self._roles]
        # By replica, the first queue before the second; (to, chunk, is a sum).
        self._waiting = [(deque[tuple[int, int, bool]](), deque[tuple[int, int, bool]]()) for _ in group]
        self._joiners = joiners if len(row_lengths(len(group))) == 1 else 0
        self._sums_first = bool(owned(line_rates))
        # When, serial, from (-1: all of it has arrived), to (-1: the line is free), chunk, is a sum.
        self._events: list[tuple[float, int, int, int, int, bool]] = []
        self._serial = count()

    def play(self, begins_s: list[float]) -> list[float]:
        """Seconds until each replica has every sum."""
        ends_s = begins_s.copy()
        for at, begins in enumerate(begins_s):
            heappush(self._events, (begins, next(self._serial), -1, at, BEGINS, False))
        while self._events:
            now, _, source, target, number, is_sum = heappop(self._events)
            if number == BEGINS:
                self._send_chunks(self._roles[target][0].sends, target, now)
            elif target < 0:
                self._send_next(source, now)
            elif source < 0:
                ends_s[target] = now
                (self._on_sum if is_sum else self._on_chunk)(target, number, now)
            else:
                nbytes = self._value_bytes * self._roles[source][1][number]
                done_s = self._lines.arrive(self._group[source], self._group[target], nbytes, now)
                heappush(self._events, (done_s, next(self._serial), -1, target, number, is_sum))
        return ends_s

    def _send_chunks(self, owners: dict[int, str], at: int, now: float) -> None:
        """To their owners, the own ones last."""
        for number, peer in owners.items():
            if int(peer) != at:
                self._send(at, int(peer), number, now, False)
        for number, peer in owners.items():
            if int(peer) == at:
                self._on_chunk(at, number, now)

    def _on_chunk(self, at: int, number: int, now: float) -> None:
        """A replica adds a chunk; once it has all of them it sends the sum on."""
        self._missing[at][number] -= 1
        if not self._missing[at][number]:
            role = self._roles[at][0]
            if number in role.receives:
                self._on_sum(at, number, now)
            else:
                self._send_chunks(role.forwards, at, now)

    def _on_sum(self, at: int, number: int, now: float) -> None:
        for peer in self._roles[at][0].broadcasts.get(number, ()):
            self._send(at, int(peer), number, now, True)
        if number in self._roles[at][0].broadcasts:
            for _ in range(self._joiners):
                self._send(at, JOINER, number, now, True)

    def _send(self, source: int, target: int, number: int, now: float, is_sum: bool) -> None:
        first = is_sum and self._sums_first and target != JOINER
        self._waiting[source][not first].append((target, number, is_sum))
        if self._lines.free(self._group[source]) <= now:
            self._send_next(source, now)

    def _send_next(self, source: int, now: float) -> None:
        first, second = self._waiting[source]
        if not first and not second:
            return
        target, number, is_sum = (first or second).popleft()
        nbytes = self._value_bytes * self._roles[source][1][number]
        towards = target if target != JOINER else (source + 1) % len(self._group)
        at = self._lines.leave(self._group[source], self._group[towards], nbytes, now)
        if target != JOINER:
            heappush(self._events, (at, next(self._serial), source, target, number, is_sum))
        free_s = self._lines.free(self._group[source])
        heappush(self._events, (free_s, next(self._serial), source, -1, 0, False))


def _played_values(values: float, replicas: int) -> int:
    """For each replica, as many as give as many slices as those of the gradient: a power of two, so that even shares have no rounding."""
    values = int(values / replicas)
    return min(MOST_VALUES, max(SLICE_VALUES, 1 << values.bit_length() >> 1))


@cache
def _roles(replicas: int, values: int, line_rates: tuple[int, ...] = ()) -> tuple[tuple[Role, dict[int, int]], ...]:
    """Of every replica, by number; and the values of each chunk that it sends, of so many for each replica."""
    names = tuple(map(str, range(replicas)))
    layout = split(replicas * values, names, line_rates=line_rates)
    whole = {n: high - low for n, (low, high) in zip(layout.numbers, pairwise(layout.bounds), strict=True)}
    roles = []
    for role in map(layout.role, names):
        cut = [high - low for low, high in pairwise(role.cuts)]
        roles.append((role, whole | dict(zip(sorted(role.sends), cut, strict=True))))
    return tuple(roles)


def rough_averaging_s(seats: Seats, cluster: Cluster) -> float:
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
        group_rates = of_group(line_rates(cluster), group)
        if shares := owned(group_rates):
            most = zip(shares, group_rates, strict=True)
            busy_s = max(nbytes * (1 + (len(group) - 2) * own / sum(shares)) / (1000 * width) for own, width in most)
            pair_s = nbytes * max(shares) / sum(shares) / pair_Bps
            there_s = min(there_s, max(busy_s * (1 + 1 / SLICES) / 2, pair_s) + delay_s)
        # The parts of the last slice are on their way while sums of others leave: their delay is not seen
        unseen_s = delay_s if len(rows) == 1 and nbytes / seats.value_bytes >= 2 * len(group) * SLICE_VALUES else 0.0
        worst = max(worst, 2 * there_s - unseen_s)
    return worst

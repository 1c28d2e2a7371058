"""When machines come and go in a forecast: replayed from a record of spot instances, or drawn by mean life, by region and by daily tide.

A machine is absent from its slot whenever any of these says so. Each slot draws from a stream of its own, so that another machine in the
cluster moves no other's times.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import msgspec

from shoal import units
from shoal.escaping import UNDECODABLE
from shoal.forecasting.machines import Machines
from shoal.sim.faults.preemption import Change, most, read, some

DAY_S = 86400.0
Absences = list[tuple[float, float]]


class Churn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What takes machines away. With neither record nor `life_s`, each has the mean life of its `losses_per_h` in the cluster file."""

    record: str = ""  # of spot instances; as many copies as the cluster needs, each from a moment of its own
    life_s: float = 0.0  # mean
    shape: float = 1.0  # of a Weibull distribution of lives; 1: exponential, below: the young go first
    away_s: float = 600.0  # until another machine takes the place of one that went, on average
    start_s: float = 60.0  # from being there to asking to join
    region_failures_per_h: float = 0.0  # of each region: all its machines at once
    region_away_s: float = 1800.0
    tide: float = 0.0  # share of the machines that are away when fewest are there, once a day
    tide_peak_s: float = 72000.0  # after the run's beginning, most are there


class Presence(msgspec.Struct, frozen=True):
    """A slot's machine comes or goes."""

    at_s: float
    slot: int
    joins: bool


def load(path: str) -> Churn:
    """A TOML file of a Churn's fields, or a record itself. ValueError says where, what was found and what would do."""
    file = Path(path)
    if file.suffix != ".toml":
        read(file)  # refuses what is no record
        return Churn(record=path)
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
        values = {key: _value(key, value) for key, value in tree.items()}
        churn = msgspec.convert(values, Churn)
    except (ValueError, *UNDECODABLE) as error:
        raise ValueError(f"{path}: {error}") from None
    for problem in _problems(churn):
        raise ValueError(f"{path}: {problem}")
    if churn.record:
        beside = file.parent / churn.record
        churn = msgspec.structs.replace(churn, record=str(beside if beside.is_file() else churn.record))
        read(churn.record)
    return churn


def _value(key: str, value: object) -> object:
    return units.parse(value, "_s") if isinstance(value, str) and key.endswith("_s") else value


def _problems(churn: Churn) -> Iterator[str]:
    for key in churn.__struct_fields__:
        value = getattr(churn, key)
        if isinstance(value, float) and not (math.isfinite(value) and value >= 0):
            yield f"{key} = {value} must be a number from 0 up"
    if not 0.1 <= churn.shape <= 10:
        yield f"shape = {churn.shape} must be from 0.1 to 10; 1 is exponential"
    if churn.tide > 1:
        yield f"tide = {churn.tide} is a share of the machines; it must be from 0 to 1"


def presences(churn: Churn, machines: Machines, horizon_s: float, seed: int) -> tuple[Presence, ...]:
    """All that come and go until the horizon, in order of time. Who is there at the beginning comes at 0."""
    absences: list[Absences] = [[] for _ in machines.kind_of]
    if churn.record:
        _replay(read(churn.record), absences, horizon_s, seed)
    else:
        for slot, kind in enumerate(machines.kind_of):
            rate = machines.kinds[kind].losses_per_h
            life_s = churn.life_s or (3600 / rate if rate else math.inf)
            absences[slot] += _lives(life_s, churn, horizon_s, Random(f"{seed}/life/{slot}"))
    _regions(churn, machines, absences, horizon_s, seed)
    if churn.tide:
        for slot, own in enumerate(absences):
            own += _tides(churn, horizon_s, Random(f"{seed}/tide/{slot}").random())
    changes = [change for slot, own in enumerate(absences) for change in _changes(slot, own, horizon_s)]
    return tuple(sorted(changes, key=lambda change: (change.at_s, change.slot, change.joins)))


def _changes(slot: int, absences: Absences, horizon_s: float) -> Iterator[Presence]:
    """A slot's machines, where none of the absences holds."""
    free_s = 0.0  # absent until then
    for start_s, end_s in sorted(absences):
        if start_s > free_s:
            yield Presence(free_s, slot, True)
            yield Presence(start_s, slot, False)
        free_s = max(free_s, end_s)
    if free_s < horizon_s:
        yield Presence(free_s, slot, True)


def _lives(life_s: float, churn: Churn, horizon_s: float, rng: Random) -> Absences:
    scale_s = life_s / math.gamma(1 + 1 / churn.shape)
    absences: Absences = []
    now = 0.0
    while math.isfinite(life_s):
        now += rng.weibullvariate(scale_s, churn.shape)
        if now >= horizon_s:
            break
        back_s = now + rng.expovariate(1 / churn.away_s) if churn.away_s else now
        absences.append((now, back_s))
        now = back_s
    return absences


def _regions(churn: Churn, machines: Machines, absences: list[Absences], horizon_s: float, seed: int) -> None:
    if not churn.region_failures_per_h:
        return
    for region in sorted({device.region for device in machines.kinds}):
        rng, now = Random(f"{seed}/region/{region}"), 0.0
        while (now := now + rng.expovariate(churn.region_failures_per_h / 3600)) < horizon_s:
            end_s = now + churn.region_away_s
            for slot, kind in enumerate(machines.kind_of):
                if machines.kinds[kind].region == region:
                    absences[slot].append((now, end_s))
            now = end_s


def _tides(churn: Churn, horizon_s: float, rank: float) -> Absences:
    """`rank`, 0 to 1: the lower, the sooner a machine leaves as the tide falls."""
    if rank >= churn.tide:
        return []
    phase = math.acos(1 - 2 * rank / churn.tide) / (2 * math.pi)  # of a day after the peak
    first_s = churn.tide_peak_s % DAY_S - DAY_S
    days = range(math.ceil((horizon_s - first_s) / DAY_S))
    spans = [(first_s + (day + phase) * DAY_S, first_s + (day + 1 - phase) * DAY_S) for day in days]
    return [(max(start_s, 0.0), end_s) for start_s, end_s in spans if end_s > 0 and start_s < horizon_s]


# -------------------------------------------------------------------------------------------------------------- records


def _replay(changes: tuple[Change, ...], absences: list[Absences], horizon_s: float, seed: int) -> None:
    """Copies of the record side by side, each on as many slots as it has nodes at most; a larger record is thinned. A copy's slots lie
    apart, so that what a record takes at once is not one stage of a plan."""
    slots = len(absences)
    if most(changes) > slots:
        changes = some(changes, math.ceil(most(changes) / slots)) or changes
    copies = math.ceil(slots / max(1, most(changes)))
    for copy in range(copies):
        lane = _Lane(changes, range(copy, slots, copies), Random(f"{seed}/record/{copy}"))
        lane.play(horizon_s)
        for slot, at_s, end_s in lane.absences:
            absences[slot].append((at_s, end_s))


class _Lane:
    """One copy from a moment that is drawn, again and again: its end joins a moment at which as many nodes were there as usual."""

    def __init__(self, changes: tuple[Change, ...], slots: Sequence[int], rng: Random) -> None:
        self._changes, self._nodes_at = changes, _nodes_after_each(changes)
        usual = sum(map(len, self._nodes_at)) / len(changes)
        self._settled = next(number for number, nodes in enumerate(self._nodes_at) if len(nodes) >= usual)
        self._number = rng.randrange(self._settled, len(changes))
        self._free = list(slots)
        self._slot_of: dict[str, int] = {}
        self._away = dict.fromkeys(slots, 0.0)  # since when
        self.absences: list[tuple[int, float, float]] = []
        self._take_part(self._nodes_at[self._number], 0.0)

    def play(self, horizon_s: float) -> None:
        now, changes = 0.0, self._changes
        while now < horizon_s:
            before_s, self._number = changes[self._number].at_s, self._number + 1
            if self._number == len(changes):
                self._number, now = self._settled, now + max(_usual_gap_s(changes), 1.0)
                self._take_part(self._nodes_at[self._settled], now)
                continue
            change = changes[self._number]
            now += change.at_s - before_s
            if change.joins:
                self._come(change.node, now)
            else:
                self._go(change.node, now)
        self.absences += [(slot, at_s, math.inf) for slot, at_s in self._away.items()]

    def _take_part(self, nodes: tuple[str, ...], now: float) -> None:
        """These nodes are there now, on the slots that are taken as far as those go."""
        before = list(self._slot_of)
        for node in before[len(nodes) :]:
            self._go(node, now)
        self._slot_of = dict(zip(nodes, list(self._slot_of.values()), strict=False))
        for node in nodes[len(before) :]:
            self._come(node, now)

    def _come(self, node: str, now: float) -> None:
        if self._free:
            self._slot_of[node] = slot = self._free.pop(0)
            self.absences.append((slot, self._away.pop(slot), now))

    def _go(self, node: str, now: float) -> None:
        slot = self._slot_of.pop(node, -1)
        if slot >= 0:
            self._free.append(slot)
            self._away[slot] = now


def _nodes_after_each(changes: tuple[Change, ...]) -> list[tuple[str, ...]]:
    present: dict[str, None] = {}
    result = []
    for change in changes:
        if change.joins:
            present[change.node] = None
        else:
            present.pop(change.node, None)
        result.append(tuple(present))
    return result


def _usual_gap_s(changes: tuple[Change, ...]) -> float:
    """Mean time between two changes of a record."""
    return (changes[-1].at_s - changes[0].at_s) / max(1, len(changes) - 1)

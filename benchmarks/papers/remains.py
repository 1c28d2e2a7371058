"""What remains of the internet tax: where a run's time goes, with settings that exist today, and the least that its lines would allow.

`parts` of a tax are the parts of the swarm's time (forecasting/forecaster.py), each over the time of the data centre for the same work,
so that they add up to the tax. The data centre's 1 is nearly all compute; compute above 1 is that of less even stages and machines.

The bound is arithmetic, for any schedule of hops. Stages and machines are all alike and compute as fast as the data centre's plan.
A stage's gradient is sent once as parts and once as sums, after the last microbatch; hops are hidden behind compute, and with updates
one step late so is averaging:

    exact: max(compute, hops) + averaging     late: max(compute, hops + averaging)     over compute
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
import tax

from shoal import codec
from shoal.forecasting.forecaster import Parts
from shoal.planner.inputs.cluster import Cluster
from shoal.planner.strategy.problem import GRADIENT_BYTES, Problem

# Of exact and of late updates: the least tax among those of tax.py, 4 stages of 1.3B and 6 of 8B
CUTS: dict[str, tuple[tax.Cut, tax.Cut]] = {"1.3B": ((3, 1), (2, 1)), "8B": ((8, 1), (6, 1)), "70B": ((8, 4), (8, 4))}
LATE_SWAPS = (
    "8B",
    "70B",
)  # where a late stage of those does not fit its cards, so that it may swap; exact ones may anyway
# Of the data centre: all of tax.py, or those that were the best there
CENTRE: dict[str, tuple[tax.Cut, ...]] = {"8B": ((8, 1),)}
# Microbatches of each machine that are on their way at once in the data centre, the best of which counts. Of the larger shapes one number,
# as one search takes a minute
INFLIGHTS: dict[str, tuple[int, ...]] = {"1.3B": (8, 16, 32), "8B": (tax.INFLIGHT,), "70B": (tax.INFLIGHT,)}
FEW_WAYS = ("70B",)  # shapes whose searches take minutes: no larger batch


class Way(NamedTuple):
    """Settings, and what they cost."""

    name: str
    price: str
    changes: dict[str, Any] = {}  # of the problem
    batch: int = 1
    inflight: int = tax.INFLIGHT  # 0: as the planner chooses


LATE: dict[str, Any] = {"staleness": 1}
LATE_8BIT = LATE | {"moments": "8bit"}
WAYS = (
    Way("as chosen above", "none"),
    Way("8 microbatches of each machine on their way", "none", inflight=8),
    Way("as many on their way as the planner chooses", "none", inflight=0),
    Way("twice the batch", "batch", batch=2),
    Way("one step late", "46 % of loss", LATE),
    Way("one step late with Muon, its own time not counted", "about 3 % of loss at worst", LATE | {"muon": True}),
    Way("one step late, 8-bit moments", "46 % of loss", LATE_8BIT),
    Way("one step late, 8-bit moments, 8 on their way", "46 % of loss", LATE_8BIT, inflight=8),
    Way("one step late, 8-bit moments, as many as the planner chooses", "46 % of loss", LATE_8BIT, inflight=0),
    Way("one step late, 8-bit moments, twice the batch", "46 % of loss, batch", LATE_8BIT, batch=2),
)


class Centre:
    """The best of the references with each number of microbatches on their way."""

    def __init__(self, shape: str) -> None:
        tried = CENTRE.get(shape, ())
        settings = [tax.setting_of(shape, f"run.inflight={count}") for count in INFLIGHTS[shape]]
        self._each = [tax.References(setting, shape, tried) for setting in settings]

    def rate(self, moments: str, batch: int) -> float:
        return max(references.rate(moments, batch) for references in self._each)


class Remainder(msgspec.Struct, frozen=True):
    """Of one shape and way. `tax` 0: `plan` says why there is none."""

    way: str
    price: str
    tokens: int  # of a step
    tax: float
    full: float
    plan: str
    parts: dict[str, float] = {}


class Bound(msgspec.Struct, frozen=True):
    """The least tax that lines allow with so many machines there: of the best number of stages for each kind of update, and of the
    stages that are planned, with what would make 1.15 possible there with exact updates."""

    machines: int
    compute_s: float
    exact: float
    exact_stages: int
    exact_hops_s: float
    exact_averaging_s: float
    late: float
    late_stages: int
    planned: float  # with exact updates
    planned_stages: int
    planned_needs_line: float  # times as wide as they are
    planned_needs_batch: float  # times the configured one; 0: no batch would do


class Remains(msgspec.Struct, frozen=True):
    bounds: list[Bound]
    ways: list[Remainder]


def outcome(shape: str) -> Remains:
    centre, problem = Centre(shape), tax.setting_of(shape).problem
    centre_s = problem.work.step_tokens / centre.rate("float32", 1) / tax.flops(problem.cluster)
    there = len(problem.cluster.devices)
    stages = CUTS[shape][0][0]
    bounds = [bound(problem, there, centre_s, stages), bound(problem, there // 2, 2 * centre_s, stages)]
    ways = [way for way in WAYS if shape not in FEW_WAYS or way.batch == 1]
    return Remains(bounds, [remainder(shape, centre, way) for way in ways])


# ------------------------------------------------------------------------------------------------------------ the bound


class Seconds(NamedTuple):
    """Of a step with so many stages: compute, the hops and the averaging of one machine's line."""

    stages: int
    compute: float
    hops: float
    averaging: float

    @property
    def exact(self) -> float:
        return (max(self.compute, self.hops) + self.averaging) / self.compute

    @property
    def late(self) -> float:
        return max(self.compute, self.hops + self.averaging) / self.compute

    @property
    def needs_line(self) -> float:
        """So many times as wide must lines be for exact updates to meet the aim."""
        return max(
            (self.hops + self.averaging) / (tax.AIM * self.compute), self.averaging / ((tax.AIM - 1) * self.compute)
        )

    @property
    def needs_batch(self) -> float:
        """So many times as large must a step be, with hops and compute that grow with it."""
        spare = tax.AIM * self.compute - self.hops
        if spare <= 0:
            return float("inf")
        return max(self.averaging / spare, self.averaging / ((tax.AIM - 1) * self.compute))


def bound(problem: Problem, machines: int, compute_s: float, planned: int) -> Bound:
    """With so many of the problem's machines, which compute a step in `compute_s`."""
    tried = [seconds(problem, machines, compute_s, stages) for stages in stage_counts(problem, machines)]
    exact, late = min(tried, key=lambda one: one.exact), min(tried, key=lambda one: one.late)
    own = seconds(problem, machines, compute_s, planned)
    return Bound(
        machines,
        compute_s,
        exact.exact,
        exact.stages,
        exact.hops,
        exact.averaging,
        late.late,
        late.stages,
        own.exact,
        own.stages,
        own.needs_line,
        0.0 if own.needs_batch == float("inf") else own.needs_batch,
    )


def stage_counts(problem: Problem, machines: int) -> Iterable[int]:
    """Every stage has two replicas or more, as a run needs that outlives a death; 1 is the whole model at each."""
    return range(1, min(problem.profile.blocks, machines // 2) + 1)


def seconds(problem: Problem, machines: int, compute_s: float, stages: int) -> Seconds:
    profile, work, line_Bps = problem.profile, problem.work, mean_line_Bps(problem.cluster)
    boundary_bytes = work.microbatches * (profile.boundary_bytes + problem.returned_bytes) * (stages - 1)
    gradient_bytes = profile.parameters * codec.bytes_per_value(problem.travel.averaging, GRADIENT_BYTES) / stages
    others = 1 - stages / machines
    return Seconds(stages, compute_s, boundary_bytes / machines / line_Bps, 2 * others * gradient_bytes / line_Bps)


def mean_line_Bps(machines: Cluster) -> float:
    return fmean(min(device.up_Bps, device.down_Bps) for device in machines.devices)


# ---------------------------------------------------------------------------------------------------- parts of the tax


def remainder(shape: str, centre: Centre, way: Way) -> Remainder:
    setting = tax.setting_of(shape, f"run.inflight={way.inflight or 'auto'}")
    swapping = "staleness" not in way.changes or shape in LATE_SWAPS
    changed = msgspec.structs.replace(setting.problem, swapping=swapping, **way.changes)
    problem = tax.batched(changed, way.batch)
    try:
        found = _played(setting, problem, CUTS[shape][problem.staleness], centre.rate(problem.moments, way.batch), way)
    except ValueError as refusal:
        why = str(refusal).split(";")[0]
        found = Remainder(way.name, way.price, problem.work.step_tokens, 0.0, 0.0, why)
    print(f"  {shape}, {way.name}: {found.tax} ({found.full} with all there), {found.plan}; {found.parts}", flush=True)
    return found


def _played(setting: tax.Setting, problem: Problem, cut: tax.Cut, centre: float, way: Way) -> Remainder:
    plan = tax.decided(problem, cut)
    job, model = tax.modelled(setting, problem, plan)
    played = tax.plays(setting, problem.cluster, job, model)
    value = tax.over(centre, fmean(rate for rate, _ in played))
    shares = {
        name: fmean(getattr(history.parts, name) / history.seconds for _, history in played)
        for name in Parts.__struct_fields__
    }
    parts = {name: round(value * float(share), 3) for name, share in shares.items()}
    full = tax.over(centre, tax.steady(job, model, problem.cluster))
    return Remainder(way.name, way.price, problem.work.step_tokens, value, full, tax.described(plan), parts)

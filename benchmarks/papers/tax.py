"""The internet tax: time for the same work on eight regions, mixed GPUs and replayed spot churn, over that in one data centre.

For each shape of configs/internet the planner plans every variant with some numbers of stages and sizes of microbatches on the machines as
they are, the forecaster plays each plan with the spot record, and the best is taken. The data centre has the same machines, or half of
them, all the time, on lines of 100 Gbit/s and 50 us. Its rate is that of the best plan that the same search finds there with the moments
and the batch that the variant has, or with fp32 moments or the configured batch. Both sides' steps are the forecaster's. A spot machine is
away half of the time, so what counts is the FLOP/s that were there, of machines that a plan leaves out too:

    tax = tokens that the data centre makes with the FLOP-hours that were there / tokens that the swarm makes

`full` is the same with every machine there all the time. It can be the larger one: more machines share a batch of the same size, and
averaging takes as long. A tax below 1 would mean that the search missed the data centre's best plan: it is refused. "Two pipelines" is not
built: each half of the regions trains the same model, and both average every 50 steps beside their work; its rate is the mean of the
halves'.

What would meet the aim is searched among LEVERS, one after another: each time the one that lowers the tax most, planned and played like a
variant. A batch is larger within what published runs of that size took, which says nothing of this project's own losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
import numpy as np

from shoal import config
from shoal.codec import Travel
from shoal.forecasting.churn import Churn, Presence, presences
from shoal.forecasting.forecaster import History, forecast
from shoal.forecasting.job import Job, job_of
from shoal.forecasting.models.choice import corrected
from shoal.forecasting.models.step_time import StepModel
from shoal.launcher.planning.problem import problem_of
from shoal.planner.inputs.cluster import Cluster
from shoal.planner.strategy import strategy
from shoal.planner.strategy.choices import chosen
from shoal.planner.strategy.plan import Plan
from shoal.planner.strategy.problem import Problem

CONFIGS = Path(__file__).parents[2] / "configs"
RECORD = CONFIGS / "traces" / "aws-g4dn-spot.csv"
Cut = tuple[int, int]  # numbers of stages, and of sequences in a microbatch
# What is tried: a microbatch that is swapped through a stage loads all of it, so that larger ones pay there
SWAPPING: dict[str, tuple[Cut, ...]] = {"1.3B": ((2, 1), (3, 1)), "8B": ((8, 1), (4, 2)), "70B": ((16, 2), (8, 4))}
RESIDENT: dict[str, tuple[Cut, ...]] = {"1.3B": ((2, 1), (3, 1)), "8B": ((8, 1), (10, 1)), "70B": ((32, 1),)}
CENTRE: dict[str, tuple[Cut, ...]] = {
    "1.3B": ((1, 1), (2, 1), (2, 2), (3, 1)),
    "8B": ((4, 1), (4, 2), (8, 1)),
    "70B": ((8, 4), (20, 1), (32, 1)),
}
AIM = 1.15
NOISE = 0.05  # of plays: so far may a tax fall below 1
LOSS_MOST = 0.5  # per cent that a choice may cost
HOURS, SEEDS, BUDGET = 24.0, 2, 10
CENTRE_Bps, CENTRE_DELAY_S = 100e9 / 8, 50e-6
INFLIGHT = 16
PLAYED = 8  # compositions of a plan, which its sums are corrected by
LOCAL_STEPS = 20
NEAR = ("Oregon", "Virginia", "Ohio", "Tokyo")  # the regions of the first of two pipelines
# So many times the configured batch has a published run: 4 M tokens (Pythia, first release, this shape of 1.3B, trained again with 2 M:
# no difference in benchmarks), 18.9 M (DeepSeek-V2-Lite, 15.7B, constant: 4,608 sequences of 4,096)
LARGER_BATCH = {"1.3B": 4, "8B": 2, "70B": 2}

INT8, INT4 = Travel("int8", "int8", "int8"), Travel("int4", "int8", "int8")
EXACT, CODED, EIGHT_BITS, FOUR_BITS, LATE, LOCAL = (
    (0.0, "exact"),
    (-0.04, "-0.04 %, measured"),
    (1.0, "within 1 % after ten steps, measured"),
    (1.4, "1.4 %, measured"),
    (46.0, "46 % after 1,000 steps, measured"),
    (1.9, "1.9 %, measured"),
)


class Variant(NamedTuple):
    name: str
    loss: tuple[float, str]  # per cent above none, and how that is known
    changes: dict[str, Any]  # of the problem
    halves: bool = False
    batch: int = 1


VARIANTS = (
    Variant("no codecs", EXACT, {"travel": Travel()}),
    Variant("int8 everywhere", CODED, {}),
    Variant("larger stages by swapping", CODED, {"swapping": True}),
    Variant("8-bit moments", EIGHT_BITS, {"swapping": True, "moments": "8bit"}),
    Variant("int4 activations", FOUR_BITS, {"swapping": True, "travel": INT4}),
    Variant("delayed updates", LATE, {"swapping": True, "staleness": 1}),
    Variant("delayed updates, 8-bit moments", LATE, {"swapping": True, "staleness": 1, "moments": "8bit"}),
    Variant(f"{LOCAL_STEPS} local steps of whole models", LOCAL, {"swapping": True, "local_steps": LOCAL_STEPS}),
    Variant("two pipelines (not built)", LOCAL, {"swapping": True}, halves=True),
    Variant("twice the batch", (0.0, "not measured"), {"swapping": True}, batch=2),
)


class Tax(msgspec.Struct, frozen=True):
    """Of one shape and variant. `tax` 0: it does not fit these machines, or makes no progress; `plan` says why."""

    variant: str
    loss: str
    loss_percent: float
    tax: float
    worst: float  # of the seeds
    full: float
    plan: str
    step_s: float
    averaging_s: float


class Figures(NamedTuple):
    """Of one plan: tokens per FLOP that was there, with the record (mean and least over the seeds) and with all machines there."""

    churned: float
    least: float
    full: float
    plan: str
    step_s: float
    averaging_s: float


class Setting(NamedTuple):
    """One shape's problem, the rate of its data centre, and who was asked."""

    tree: config.Config
    problem: Problem
    churn: Churn


def centred(problem: Problem) -> Problem:
    """In one data centre."""
    machines = problem.cluster.with_lines(bandwidth_Bps=CENTRE_Bps, delay_s=CENTRE_DELAY_S)
    return msgspec.structs.replace(problem, cluster=machines)


@cache  # counting a model takes seconds
def setting_of(shape: str, *settings: str) -> Setting:
    folder = CONFIGS / "internet"
    tree = config.load(str(folder / f"{shape}.toml"), [f"run.inflight={INFLIGHT}", *settings])
    problem = problem_of(tree, str(folder / f"{shape}-machines.toml"), "stochastic")
    return Setting(tree, problem, Churn(record=str(RECORD)))


def decided(problem: Problem, cut: Cut) -> Plan:
    stages, size = cut
    work = problem.work
    sized = msgspec.structs.replace(work, sequences=size, microbatches=work.microbatches * work.sequences // size)
    sized_problem = msgspec.structs.replace(problem, work=sized)
    return strategy.decide(sized_problem, np.random.default_rng(0), BUDGET, stages)


def cuts(shape: str, problem: Problem) -> tuple[Cut, ...]:
    if problem.local_steps > 1:
        return ((1, 1),)
    return SWAPPING[shape] if problem.swapping else RESIDENT[shape]


def batched(problem: Problem, factor: int) -> Problem:
    """With so many times the microbatches in a step."""
    work = problem.work
    return msgspec.structs.replace(problem, work=msgspec.structs.replace(work, microbatches=work.microbatches * factor))


class References:
    """Tokens per FLOP of the best plans made for the data centre of one setting, found once for each set of choices."""

    def __init__(self, setting: Setting, shape: str, tried: tuple[Cut, ...] = ()) -> None:
        self._setting, self._shape = setting, shape
        self._cuts = tried or CENTRE[shape]
        self._known: dict[tuple[str, int], float] = {}

    def rate(self, moments: str, batch: int) -> float:
        """The best of what a run with these choices may choose there."""
        choices = {("float32", 1), ("float32", batch), (moments, 1), (moments, batch)}
        return max(self._best(*choice) for choice in sorted(choices))

    def _best(self, moments: str, batch: int) -> float:
        known = self._known.get((moments, batch))
        if known is None:
            known = self._known[moments, batch] = self._searched(moments, batch)
        return known

    def _searched(self, moments: str, batch: int) -> float:
        problem = centred(batched(self._setting.problem, batch))
        problem = msgspec.structs.replace(problem, travel=Travel(), swapping=True, moments=moments)
        plans = []
        for cut in self._cuts:
            try:
                plans.append((decided(problem, cut), cut))
            except ValueError:  # it does not fit with these moments
                continue
        best, cut = min(plans, key=lambda each: step_of(each[0]))
        rates = [steady(*modelled(self._setting, problem, best), problem.cluster)]
        machines = problem.cluster.chosen(half_of(problem.cluster))  # as many as the record has there
        half = msgspec.structs.replace(problem, cluster=machines)
        try:
            rates.append(steady(*modelled(self._setting, half, decided(half, cut)), machines))
        except ValueError:  # nor on half of the machines
            pass
        words = f"{described(best)}; of half of the machines {rates[-1] / rates[0]:.2f} as much of a FLOP"
        print(f"  {self._shape}, data centre, {moments} moments, batch x{batch}: {words}", flush=True)
        return max(rates)


def half_of(machines: Cluster) -> list[int]:
    """Every second machine of each kind. Every second of the file would be the slower kind alone where kinds alternate: as fast for a
    FLOP as machines that are all alike."""
    kinds: dict[float, list[int]] = {}
    for at, device in enumerate(machines.devices):
        kinds.setdefault(device.flops, []).append(at)
    return sorted(at for alike in kinds.values() for at in alike[::2])


def step_of(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_s


def steady(job: Job, model: StepModel, machines: Cluster) -> float:
    """Tokens per FLOP with all machines there, by the sums that are played with churn too."""
    step = model(np.array(job.stage_of))
    assert step is not None, "a plan serves every stage"
    return job.microbatches * job.tokens / step.step_s / flops(machines)


def modelled(setting: Setting, problem: Problem, plan: Plan) -> tuple[Job, StepModel]:
    job = job_of(chosen(problem, plan), plan, setting.tree)
    histories = [presences(setting.churn, job.machines, HOURS * 3600, seed) for seed in range(SEEDS)]
    return job, corrected(job, histories, setting.churn.start_s, HOURS * 3600, PLAYED)


def flops(machines: Cluster) -> float:
    return sum(device.flops for device in machines.devices)


def churned(setting: Setting, machines: Cluster, job: Job, model: StepModel) -> list[float]:
    """Tokens per FLOP that was there, with the record; of each seed."""
    return [rate for rate, _ in plays(setting, machines, job, model)]


def plays(setting: Setting, machines: Cluster, job: Job, model: StepModel) -> list[tuple[float, History]]:
    """The same with what was played."""
    played = []
    for seed in range(SEEDS):
        history = presences(setting.churn, job.machines, HOURS * 3600, seed)
        result = forecast(job, model, history, setting.churn.start_s, HOURS * 3600, seed)
        there = sum(hours_there(history, slot) * one.flops for slot, one in enumerate(machines.devices))
        played.append((result.tokens / (there * 3600), result))
    return played


def hours_there(history: Sequence[Presence], slot: int) -> float:
    """That the slot had a machine, also one that the plan leaves out."""
    own = [(one.joins, one.at_s / 3600) for one in history if one.slot == slot]
    return sum(-at if joins else at for joins, at in own) + (HOURS if own and own[-1][0] else 0.0)


def priced(setting: Setting, variant: Variant, shape: str, tried: tuple[Cut, ...] = ()) -> Figures:
    """The best of the plans so cut; without any, `plan` says why."""
    problem = msgspec.structs.replace(setting.problem, **variant.changes)
    problem = batched(problem, variant.batch * problem.local_steps)
    plans, refused = [], ""
    for cut in tried or cuts(shape, problem):
        try:
            plans.append((halved if variant.halves else whole)(setting, problem, cut))
        except ValueError as refusal:
            refused = str(refusal).split(";")[0]
    return max(plans, default=Figures(0.0, 0.0, 0.0, refused, 0.0, 0.0))


def whole(setting: Setting, problem: Problem, cut: Cut) -> Figures:
    plan = decided(problem, cut)
    job, model = modelled(setting, problem, plan)
    rates = churned(setting, problem.cluster, job, model)
    assert plan.predicted is not None
    words = described(plan) + ("" if fmean(rates) else ": no progress with this churn")
    full = steady(job, model, problem.cluster)
    return Figures(fmean(rates), min(rates), full, words, plan.predicted.step_s, plan.predicted.averaging_s)


def halved(setting: Setting, problem: Problem, cut: Cut) -> Figures:
    """Two pipelines on half of the regions each, with half of the batch."""
    machines = problem.cluster
    work = msgspec.structs.replace(problem.work, microbatches=problem.work.microbatches // 2)
    halves = []
    for near in (True, False):
        half = machines.chosen([i for i, one in enumerate(machines.devices) if (one.region in NEAR) == near])
        halves.append(whole(setting, msgspec.structs.replace(problem, work=work, cluster=half), cut))
    one, two = halves
    rates = (fmean(pair) for pair in zip(one[:3], two[:3], strict=True))  # each has half of the FLOP/s
    return Figures(*rates, f"2 x {one.plan}", max(one.step_s, two.step_s), max(one.averaging_s, two.averaging_s))


def described(plan: Plan) -> str:
    stages = len(plan.stages)
    swaps = sum(stage.executor == "swapping" for stage in plan.stages)
    text = f"{stages} stage{'s' * (stages > 1)}"
    text += f", {swaps} swapping" if swaps else ""
    text += f", microbatches of {plan.microbatch}" if plan.microbatch > 1 else ""
    return text + (f", {plan.inflight} on their way" if plan.inflight not in (0, INFLIGHT) else "")


def chosen_of(rows: list[Tax]) -> Tax:
    """The least tax among what is built, on the configured batch, and costs at most LOSS_MOST per cent of loss."""
    able = [one for one in rows if one.tax and one.loss_percent <= LOSS_MOST and one.loss != "not measured"]
    return min(able, key=lambda one: one.tax)


def _cluster(change: Callable[[Cluster], Cluster]) -> Callable[[Setting], Setting]:
    return lambda setting: setting._replace(
        problem=msgspec.structs.replace(setting.problem, cluster=change(setting.problem.cluster))
    )


def _churn(**fields: Any) -> Callable[[Setting], Setting]:
    return lambda setting: setting._replace(churn=msgspec.structs.replace(setting.churn, **fields))


CHANGES: tuple[tuple[str, Callable[[Setting], Setting]], ...] = (
    ("lines and links 5 times as wide", _cluster(lambda machines: machines.scaled(bandwidth=5))),
    ("lines of 200 Mbit/s", _cluster(lambda machines: machines.scaled(bandwidth=0.2))),
    ("half the delay", _cluster(lambda machines: machines.scaled(delay=0.5))),
    ("twice the memory of cards", _cluster(lambda machines: machines.scaled(memory=2))),
    ("GPUs half as fast", _cluster(lambda machines: machines.scaled(flops=0.5))),
    ("mean life 8 h instead of the record", _churn(record="", life_s=8 * 3600.0)),
    ("no churn", _churn(record="", life_s=1e12)),
)


class Lever(NamedTuple):
    """One thing that may lower the tax: of the run, or of the machines."""

    name: str
    changes: dict[str, Any] = {}  # of the problem
    batch: bool = False
    setting: Callable[[Setting], Setting] = lambda setting: setting


LEVERS = (
    Lever("larger batch", batch=True),
    Lever("lines of 5 Gbit/s", setting=_cluster(lambda machines: machines.scaled(bandwidth=5))),
    Lever("lives of 8 h", setting=_churn(record="", life_s=8 * 3600.0)),
    Lever("8-bit moments", {"moments": "8bit"}),
    Lever("delayed updates", {"staleness": 1}),
)


class Tried(msgspec.Struct, frozen=True):
    levers: list[str]
    tax: float
    plan: str


class Outcome(msgspec.Struct, frozen=True):
    """Of one shape: every variant, the one that the planner may take, its tax when one thing changes, and sets of levers."""

    rows: list[Tax]
    chosen: str
    sensitivities: dict[str, float]
    tried: list[Tried] = []


def outcome(shape: str) -> Outcome:
    setting = setting_of(shape)
    references = References(setting, shape)
    rows = [row_of(references, one, progressed(shape, one.name, priced(setting, one, shape))) for one in VARIANTS]
    best = chosen_of(rows)
    variant = next(one for one in VARIANTS if one.name == best.variant)
    taxes = {}
    for name, change in CHANGES:
        changed = change(setting)
        each = progressed(shape, name, priced(changed, variant, shape, (cut_of(best),)))
        again = "memory" in name or "GPUs" in name
        reference = (References(changed, shape) if again else references).rate(*choices_of(variant))
        taxes[name] = over(reference, each.churned)
    return Outcome(rows, best.variant, taxes, list(tried(setting, shape, references, cut_of(best))))


def choices_of(variant: Variant) -> tuple[str, int]:
    return variant.changes.get("moments", "float32"), variant.batch


def row_of(references: References, variant: Variant, each: Figures) -> Tax:
    centre = references.rate(*choices_of(variant))
    taxes = (over(centre, rate) for rate in each[:3])
    return Tax(variant.name, variant.loss[1], variant.loss[0], *taxes, *each[3:])


def cut_of(row: Tax) -> Cut:
    """By its plan in words."""
    size = row.plan.rpartition("microbatches of ")[2].split(",")[0] if "microbatches of" in row.plan else "1"
    return int(row.plan.split()[0]), int(size)


def tried(setting: Setting, shape: str, references: References, cut: Cut) -> Iterator[Tried]:
    """Levers one after another, each the best of those that are left, with all that were looked at, until the aim is met or none helps."""
    taken, tax = list[Lever](), math.inf
    while len(taken) < len(LEVERS) and not tax <= AIM:
        looked = [one_more(setting, shape, references, cut, [*taken, lever]) for lever in LEVERS if lever not in taken]
        yield from looked
        best = min((one for one in looked if one.tax), key=lambda one: one.tax, default=None)
        if best is None or best.tax >= tax:
            return
        taken, tax = [lever for lever in LEVERS if lever.name in best.levers], best.tax


def one_more(setting: Setting, shape: str, references: References, cut: Cut, levers: list[Lever]) -> Tried:
    changed, changes = setting, {"swapping": True}
    for lever in levers:
        changed, changes = lever.setting(changed), changes | lever.changes
    batch = LARGER_BATCH[shape] if any(lever.batch for lever in levers) else 1
    names = [lever.name for lever in LEVERS if lever in levers]
    variant = Variant("", EXACT, changes, batch=batch)
    figures = progressed(shape, ", ".join(names), priced(changed, variant, shape, (cut,)))
    return Tried(names, over(references.rate(*choices_of(variant)), figures.churned), figures.plan)


def over(centre: float, rate: float) -> float:
    """The tax. What comes and goes over the internet is no faster than what stays in one place."""
    if not rate:
        return 0.0
    assert rate <= centre * (1 + NOISE), f"a tax of {centre / rate:.2f}: the search missed the data centre's best plan"
    return round(centre / rate, 3)


def progressed(shape: str, what: str, figures: Figures) -> Figures:
    print(
        f"  {shape}, {what}: {figures.churned:.3g} tokens of a FLOP, steps of {figures.step_s:.3g} s; {figures.plan}",
        flush=True,
    )
    return figures

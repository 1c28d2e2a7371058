"""The internet tax: time for the same work on eight regions, mixed GPUs and replayed spot churn, over that in one data centre.

For each shape of configs/internet the planner plans every variant with some numbers of stages on the machines as they are, the forecaster
plays each plan with the spot record, and the best is taken. The data centre has the same machines, all the time, on lines of
100 Gbit/s and 50 us; its rate is that of the best plan: those made for it, and those of all variants run there. A spot machine is away half
of the time, so what counts is the FLOP/s that were there, of machines that a plan leaves out too:

    tax = tokens that the data centre makes with the FLOP-hours that were there / tokens that the swarm makes

`full` is the same with every machine there all the time. It can be the larger one: more machines share a batch of the same size, and
averaging takes as long. "Two pipelines" is not built: each half of the regions trains the same model, and both average every 50 steps
beside their work; its rate is the mean of the halves'.

What would meet the aim is searched among LEVERS, one after another: each time the one that lowers the tax most, planned and played like a
variant. A batch is larger within what published runs of that size took, which says nothing of this project's own losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
import numpy as np

from shoal import config
from shoal.codec import Travel
from shoal.forecasting.churn import Churn, Presence, presences
from shoal.forecasting.forecaster import forecast
from shoal.forecasting.job import job_of
from shoal.forecasting.rates import model_of
from shoal.launcher.planning.problem import problem_of
from shoal.planner.inputs.cluster import Cluster
from shoal.planner.prediction.step import predict
from shoal.planner.strategy import strategy
from shoal.planner.strategy.choices import chosen, tokens_per_s
from shoal.planner.strategy.plan import Plan
from shoal.planner.strategy.pricing import option_of
from shoal.planner.strategy.problem import Problem

CONFIGS = Path(__file__).parents[2] / "configs"
RECORD = CONFIGS / "traces" / "aws-g4dn-spot.csv"
SHAPES = {"1.3B": (2, 3, 4), "8B": (4, 8), "70B": (8, 16)}  # numbers of stages that are tried
RESIDENT = {"1.3B": (2, 3, 4), "8B": (8, 10), "70B": (32,)}  # without swapping
AIM = 1.15
LOSS_MOST = 0.5  # per cent that a choice may cost
HOURS, SEEDS, BUDGET = 24.0, 2, 10
CENTRE_Bps, CENTRE_DELAY_S = 100e9 / 8, 50e-6
INFLIGHT = 16
MANY = 10**6  # compositions: rates are sums for every fleet, small ones too
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
    full: float
    plan: str
    step_s: float
    averaging_s: float


class Figures(NamedTuple):
    """Of one plan: tokens per FLOP that was there, with the record, with all machines there, and in the data centre."""

    churned: float
    full: float
    centre: float
    plan: str
    step_s: float
    averaging_s: float


class Setting(NamedTuple):
    """One shape's problem, the rate of its data centre, and who was asked."""

    tree: config.Config
    problem: Problem
    churn: Churn

    def centre(self) -> Problem:
        return msgspec.structs.replace(centred(self.problem), travel=Travel(), swapping=True)


def centred(problem: Problem) -> Problem:
    """In one data centre."""
    machines = problem.cluster.with_lines(bandwidth_Bps=CENTRE_Bps, delay_s=CENTRE_DELAY_S)
    return msgspec.structs.replace(problem, cluster=machines)


def setting_of(shape: str, *settings: str) -> Setting:
    folder = CONFIGS / "internet"
    tree = config.load(str(folder / f"{shape}.toml"), [f"run.inflight={INFLIGHT}", *settings])
    problem = problem_of(tree, str(folder / f"{shape}-machines.toml"), "stochastic")
    return Setting(tree, problem, Churn(record=str(RECORD)))


def decided(problem: Problem, stages: int) -> Plan:
    return strategy.decide(problem, np.random.default_rng(0), BUDGET, stages)


def counts(shape: str, problem: Problem) -> tuple[int, ...]:
    if problem.local_steps > 1:
        return (1,)
    return SHAPES[shape] if problem.swapping else RESIDENT[shape]


def centre_rate(setting: Setting, shape: str) -> float:
    """Tokens per FLOP of the best plan made for the data centre."""
    centre = setting.centre()
    return max(tokens_per_s(decided(centre, count)) for count in counts(shape, centre)) / flops(centre.cluster)


def in_centre(problem: Problem, plan: Plan) -> float:
    """Tokens per FLOP of that plan there."""
    there = centred(chosen(problem, plan))
    step = predict(option_of(there, plan).seats, there.cluster, np.random.default_rng(0))
    return problem.work.step_tokens / step.step_s / flops(there.cluster)


def flops(machines: Cluster) -> float:
    return sum(device.flops for device in machines.devices)


def churned(setting: Setting, problem: Problem, plan: Plan) -> float:
    """Tokens per FLOP that was there, with the record; mean of the seeds."""
    job = job_of(chosen(problem, plan), plan, setting.tree)
    histories = [presences(setting.churn, job.machines, HOURS * 3600, seed) for seed in range(SEEDS)]
    model = model_of(job, MANY)
    rates = []
    for seed, history in enumerate(histories):
        result = forecast(job, model, history, setting.churn.start_s, HOURS * 3600, seed)
        there = sum(hours_there(history, slot) * one.flops for slot, one in enumerate(problem.cluster.devices))
        rates.append(result.tokens / (there * 3600))
    return fmean(rates)


def hours_there(history: Sequence[Presence], slot: int) -> float:
    """That the slot had a machine, also one that the plan leaves out."""
    own = [(one.joins, one.at_s / 3600) for one in history if one.slot == slot]
    return sum(-at if joins else at for joins, at in own) + (HOURS if own and own[-1][0] else 0.0)


def priced(setting: Setting, variant: Variant, shape: str, stages: tuple[int, ...] = ()) -> Figures:
    """The best of the plans with these numbers of stages; without any, `plan` says why."""
    problem = msgspec.structs.replace(setting.problem, **variant.changes)
    factor = variant.batch * problem.local_steps
    work = msgspec.structs.replace(problem.work, microbatches=problem.work.microbatches * factor)
    problem = msgspec.structs.replace(problem, work=work)
    plans, refused = [], ""
    for count in stages or counts(shape, problem):
        try:
            plans.append((halved if variant.halves else whole)(setting, problem, count))
        except ValueError as refusal:
            refused = str(refusal).split(";")[0]
    return max(plans, default=Figures(0.0, 0.0, 0.0, refused, 0.0, 0.0))


def whole(setting: Setting, problem: Problem, count: int) -> Figures:
    plan = decided(problem, count)
    rate = churned(setting, problem, plan)
    assert plan.predicted is not None
    words = described(plan) + ("" if rate else ": no progress with this churn")
    full = tokens_per_s(plan) / flops(problem.cluster)
    return Figures(rate, full, in_centre(problem, plan), words, plan.predicted.step_s, plan.predicted.averaging_s)


def halved(setting: Setting, problem: Problem, count: int) -> Figures:
    """Two pipelines on half of the regions each, with half of the batch."""
    machines = problem.cluster
    work = msgspec.structs.replace(problem.work, microbatches=problem.work.microbatches // 2)
    halves = []
    for near in (True, False):
        half = machines.chosen([i for i, one in enumerate(machines.devices) if (one.region in NEAR) == near])
        halves.append(whole(setting, msgspec.structs.replace(problem, work=work, cluster=half), count))
    one, two = halves
    rates = (fmean(pair) for pair in zip(one[:3], two[:3], strict=True))  # each has half of the FLOP/s
    return Figures(*rates, f"2 x {one.plan}", max(one.step_s, two.step_s), max(one.averaging_s, two.averaging_s))


def described(plan: Plan) -> str:
    stages = len(plan.stages)
    swaps = sum(stage.executor == "swapping" for stage in plan.stages)
    text = f"{stages} stage{'s' * (stages > 1)}"
    text += f", {swaps} swapping" if swaps else ""
    return text + (f", microbatches of {plan.microbatch}" if plan.microbatch > 1 else "")


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
    own = centre_rate(setting, shape)
    figures = [progressed(shape, one.name, priced(setting, one, shape)) for one in VARIANTS]
    centre = max(own, *(each.centre for each in figures))
    rows = [
        Tax(one.name, one.loss[1], one.loss[0], over(centre, each.churned), over(centre, each.full), *each[3:])
        for one, each in zip(VARIANTS, figures, strict=True)
    ]
    best = chosen_of(rows)
    variant = next(one for one in VARIANTS if one.name == best.variant)
    taxes = {}
    for name, change in CHANGES:
        changed = change(setting)
        each = progressed(shape, name, priced(changed, variant, shape, (int(best.plan.split()[0]),)))
        again = "memory" in name or "GPUs" in name
        reference = max(centre_rate(changed, shape), each.centre) if again else centre
        taxes[name] = over(reference, each.churned)
    return Outcome(rows, best.variant, taxes, list(tried(setting, shape, centre)))


def tried(setting: Setting, shape: str, centre: float) -> Iterator[Tried]:
    """Levers one after another, each the best of those that are left, with all that were looked at, until the aim is met or none helps."""
    taken, tax = list[Lever](), math.inf
    while len(taken) < len(LEVERS) and not tax <= AIM:
        looked = [one_more(setting, shape, centre, [*taken, lever]) for lever in LEVERS if lever not in taken]
        yield from looked
        best = min((one for one in looked if one.tax), key=lambda one: one.tax, default=None)
        if best is None or best.tax >= tax:
            return
        taken, tax = [lever for lever in LEVERS if lever.name in best.levers], best.tax


def one_more(setting: Setting, shape: str, centre: float, levers: list[Lever]) -> Tried:
    changed, changes = setting, {"swapping": True}
    for lever in levers:
        changed, changes = lever.setting(changed), changes | lever.changes
    batch = LARGER_BATCH[shape] if any(lever.batch for lever in levers) else 1
    names = [lever.name for lever in LEVERS if lever in levers]
    figures = progressed(shape, ", ".join(names), priced(changed, Variant("", EXACT, changes, batch=batch), shape))
    return Tried(names, over(max(centre, figures.centre), figures.churned), figures.plan)


def over(centre: float, rate: float) -> float:
    return round(centre / rate, 3) if rate else 0.0


def progressed(shape: str, what: str, figures: Figures) -> Figures:
    share = figures.churned / figures.centre if figures.centre else 0.0
    print(f"  {shape}, {what}: {share:.2f} of the same plan in a data centre; {figures.plan}", flush=True)
    return figures

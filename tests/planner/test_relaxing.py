"""A problem that asks less never gets a slower plan: free sizes, uneven stages, swapping, more or faster machines, on drawn clusters.

A what-if and a sensitivity are searched as the plan was, with its freedoms, and what relaxes a resource is never worse than the plan."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from shoal.planner.inputs.cluster import Cluster, Device
from shoal.planner.inputs.profile import Shape, Work
from shoal.planner.strategy import choices, relaxing, strategy
from shoal.planner.strategy.plan import Plan
from shoal.planner.strategy.problem import Problem
from shoal.planner.strategy.what_if import what_if

BUDGET = 30
WORK = Work(microbatches=8, sequences=2, tokens=512, value_bytes=2)
RELAXED = ("bandwidth=2x", "delay=0.5x", "memory=2x", "peers=2x", "speed=2x", "inflight=2x")


def drawn(seed: int) -> Problem:
    """Unlike machines behind unlike lines; some clusters are alike, some far apart."""
    rng = np.random.default_rng(seed)
    count, spread = int(rng.integers(2, 8)), float(rng.choice([1.0, 4.0, 20.0]))

    def around(value: float) -> float:
        return float(value * spread ** rng.uniform(-1, 1))

    devices = tuple(
        Device(name=f"p{i}", flops=around(5e12), memory_bytes=around(6e9), up_Bps=around(2e7), down_Bps=around(4e7))
        for i in range(count)
    )
    delay_s = rng.uniform(0.001, 0.05, (count, count))
    bandwidth_Bps = 1e7 * spread ** rng.uniform(-1, 1, (count, count))
    shape = Shape(
        hidden=512,
        layers=int(rng.integers(3, 10)),
        heads=8,
        kv_heads=8,
        head_dim=64,
        intermediate=1536,
        vocabulary=int(rng.choice([1000, 32000])),
    )
    return Problem(shape=shape, work=WORK, cluster=Cluster(devices, delay_s, bandwidth_Bps))


def decided(problem: Problem) -> Plan:
    return strategy.decide(problem, np.random.default_rng(0), BUDGET)


def step_s(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_s


def search(budget: int, allow: tuple[str, ...] = (), sizes: bool = False) -> relaxing.Decide:
    """As `shoal plan` searches, with those freedoms."""

    def decide(given: Problem, known: Plan | None = None, /) -> Plan:
        def one(each: Problem) -> Plan:
            if sizes:
                return strategy.decide_sizes(each, lambda: np.random.default_rng(0), budget, None, known)
            return strategy.decide(each, np.random.default_rng(0), budget, None, known)

        return choices.choose(given, allow, one, lambda peers: True)

    return decide


FREEDOMS = ({}, {"sizes": True}, {"allow": ("int8", "local_steps")}, {"allow": ("bf16", "int8"), "sizes": True})


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(100, 108))
def test_a_what_if_is_never_worse_than_the_plan_whatever_may_be_chosen(seed: int) -> None:
    decide = search(5, **FREEDOMS[seed % len(FREEDOMS)])
    problem = drawn(seed)
    more_machines_never_give_a_slower_plan(problem, decide(problem), decide)


@pytest.mark.parametrize("change", ["memory=2x", pytest.param("peers=2x", marks=pytest.mark.slow)])
def test_a_what_if_begins_with_the_plan_and_with_what_it_has_chosen(change: str) -> None:
    problem, decide = drawn(104), search(0, ("int8",))
    plan, changed = decide(problem), what_if(problem, change)
    assert choices.tokens_per_s(decide(changed)) < choices.tokens_per_s(plan), "searched on its own, it is slower"
    other = relaxing.decide_from(problem, plan, changed, decide)
    assert choices.tokens_per_s(other) >= choices.tokens_per_s(plan)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_relaxing_a_problem_never_gives_a_slower_plan(seed: int) -> None:
    problem = drawn(seed)
    plan = decided(problem)
    uneven, swapping = (msgspec.structs.replace(problem, **{flag: True}) for flag in strategy.RELAXATIONS)
    both = msgspec.structs.replace(uneven, swapping=True)
    assert step_s(decided(uneven)) <= step_s(plan)
    assert step_s(decided(swapping)) <= step_s(plan)
    assert step_s(decided(both)) <= min(step_s(decided(uneven)), step_s(decided(swapping)))
    assert step_s(strategy.decide_sizes(problem, lambda: np.random.default_rng(0), BUDGET)) <= step_s(plan)
    more_machines_never_give_a_slower_plan(problem, plan, search(BUDGET))


def test_uneven_stages_never_give_a_slower_plan() -> None:
    problem = drawn(11)  # searched on its own, it was slower
    assert step_s(decided(msgspec.structs.replace(problem, uneven=True))) <= step_s(decided(problem))


def more_machines_never_give_a_slower_plan(problem: Problem, plan: Plan, decide: relaxing.Decide) -> None:
    for change in RELAXED:
        changed = what_if(problem, change)
        assert relaxing.relaxes(problem, changed), change
        other = relaxing.decide_from(problem, plan, changed, decide)
        assert choices.tokens_per_s(other) >= choices.tokens_per_s(plan), change
    for change, other in relaxing.sensitivities(problem, plan, decide):
        assert choices.tokens_per_s(other) >= choices.tokens_per_s(plan), change


@pytest.mark.parametrize(
    "change",
    [
        "peers=1",
        "speed=1 TFLOP/s",
        *(pytest.param(change, marks=pytest.mark.slow) for change in ("bandwidth=0.5x", "delay=2x", "memory=0.9x")),
        pytest.param("microbatches=2x", marks=pytest.mark.slow),
    ],
)
def test_a_change_for_the_worse_or_of_the_work_is_planned_for_itself(change: str) -> None:
    problem = drawn(2)
    changed = what_if(problem, change)
    assert not relaxing.relaxes(problem, changed)
    assert relaxing.decide_from(problem, decided(problem), changed, search(BUDGET)) == decided(changed)


def test_the_same_placement_has_the_same_predicted_step_whatever_was_searched_before() -> None:
    problem = drawn(1)
    plan = decided(problem)
    assert step_s(strategy.decide(problem, np.random.default_rng(0), BUDGET, len(plan.stages))) == step_s(plan)


def test_an_idle_device_that_helps_is_used_and_for_the_others_the_plan_says_what_they_would_cost() -> None:
    alike = {"memory_bytes": 24e9, "up_Bps": 1e8, "down_Bps": 1e8}
    devices = tuple(Device(name=f"p{i}", flops=5e12, **alike) for i in range(4))
    slow = (Device(name="slow", flops=2e10, **alike), Device(name="tiny", flops=5e12, memory_bytes=1e6))
    cluster = Cluster((*devices, *slow), np.full((6, 6), 0.001), np.full((6, 6), 1e9))
    plan = decided(msgspec.structs.replace(drawn(0), cluster=cluster))
    assert set(plan.left_out) == {"slow", "tiny"}
    assert "slow is left out: with it a step would take " in plan.reason
    assert "tiny is left out: it lacks " in plan.reason

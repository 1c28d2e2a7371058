"""Planning anew: a fleet that has changed little goes on, one that has changed much changes over when that pays."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from shoal.planner.inputs.cluster import Cluster, Device
from shoal.planner.inputs.profile import Shape, Work
from shoal.planner.strategy.plan import Plan
from shoal.planner.strategy.problem import Problem
from shoal.planner.strategy.replan import Running, Verdict, difference, replan
from shoal.planner.strategy.strategy import decide

SHAPE = Shape(hidden=512, layers=8, heads=8, kv_heads=8, head_dim=64, intermediate=1536, vocabulary=8192)
WORK = Work(microbatches=24, sequences=4, tokens=512, value_bytes=2)


def machines(*names: str, slow: tuple[str, ...] = ()) -> Cluster:
    devices = tuple(
        Device(name=name, flops=2e11 if name in slow else 1e12, memory_bytes=24e9, up_Bps=25e6, down_Bps=25e6)
        for name in names
    )
    return Cluster(devices, np.full((len(names),) * 2, 0.02), np.full((len(names),) * 2, 1e12))


def problem(cluster: Cluster) -> Problem:
    return Problem(shape=SHAPE, work=WORK, cluster=cluster)


OLD = decide(problem(machines(*"abcdef")), np.random.default_rng(0), budget=20, stages=2)


def judged(
    cluster: Cluster, serving: dict[str, int], steps_left: int = 1000, old: Plan = OLD, **more: float
) -> Verdict:
    running = Running(serving=serving, steps_left=steps_left, **more)
    return replan(old, problem(cluster), running, lambda: np.random.default_rng(0), budget=20)


def test_a_fleet_that_is_as_planned_goes_on_without_a_search() -> None:
    judgement = judged(machines(*"abcdef"), OLD.seats)
    assert (judgement.plan, judgement.changed) == (None, 0.0)
    assert "under the threshold of 20%" in judgement.reason
    one_less = dict(list(OLD.seats.items())[:-1])
    assert judged(machines(*one_less), one_less).plan is None


def test_what_has_changed_is_counted_and_told() -> None:
    names = list(OLD.seats)
    serving = {name: stage for name, stage in OLD.seats.items() if name != names[0]} | {"new": 0, names[1]: 1}
    share, words = difference(OLD, serving)
    assert share == pytest.approx(3 / 6)
    assert words == "of 6 planned machines 1 are gone and 1 moved, 1 others came (50%)"


def test_a_lopsided_fleet_changes_over_when_enough_steps_are_left_to_pay_for_it() -> None:
    """Three of stage 0's machines and no more than one of stage 1's are left: most of them wait for that one."""
    stage = {number: list(planned.peers) for number, planned in enumerate(OLD.stages)}
    serving = dict.fromkeys(stage[0], 0) | {stage[1][0]: 1}
    left = judged(machines(*serving), serving)
    assert left.plan is not None and left.plan.predicted is not None
    assert left.then_s == left.plan.predicted.step_s < 0.9 * left.now_s
    assert "changing over costs" in left.reason
    soon_over = judged(machines(*serving), serving, steps_left=3)
    assert soon_over.plan is None and "the run goes on as it is" in soon_over.reason
    assert soon_over.now_s == left.now_s, "the same fleet"


def test_steps_that_would_be_trained_again_and_a_narrow_storage_weigh_against_it() -> None:
    serving = dict.fromkeys(OLD.stages[0].peers, 0) | {OLD.stages[1].peers[0]: 1}
    quick = judged(machines(*serving), serving)
    far = judged(machines(*serving), serving, undone_steps=100.0)
    narrow = judged(machines(*serving), serving, storage_Bps=1e5)
    assert far.move_s > quick.move_s + 50 * quick.then_s
    assert narrow.move_s > 100 + quick.move_s


def test_a_stage_that_nobody_serves_always_pays() -> None:
    serving = dict.fromkeys(OLD.stages[0].peers, 0)
    judgement = judged(machines(*serving), serving, steps_left=1)
    assert judgement.plan is not None and math.isinf(judgement.now_s)
    assert "a stage is served by nobody" in judgement.reason


def test_a_member_that_the_cluster_does_not_have_is_named() -> None:
    serving = OLD.seats | {"x": 0, "y": 1}
    with pytest.raises(ValueError, match=r"does not have x, which takes part; add a \[\[device\]\]"):
        judged(machines(*"abcdef"), serving)


@pytest.mark.slow
def test_a_plan_of_machines_that_are_slow_now_is_weighed_on_what_they_are_now() -> None:
    serving = {**OLD.seats, "g": 0, "h": 1}
    names = tuple(serving)
    even = judged(machines(*names), serving, steps_left=10)
    lame = judged(machines(*names, slow=OLD.stages[0].peers), serving, steps_left=10)
    assert lame.now_s > even.now_s
    assert msgspec.to_builtins(even)["plan"] is None

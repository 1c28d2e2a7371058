"""What a plan may choose beside places: codes and local steps, only where they are allowed and pay."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from shoal import codec
from shoal.planner.inputs.cluster import Cluster, Device
from shoal.planner.inputs.profile import Shape, Work
from shoal.planner.strategy import choices, strategy
from shoal.planner.strategy.plan import Plan
from shoal.planner.strategy.problem import Problem

SHAPE = Shape(hidden=1024, layers=16, heads=16, kv_heads=4, head_dim=64, intermediate=2816, vocabulary=32000)
WORK = Work(microbatches=32, sequences=4, tokens=1024, value_bytes=2)
EVERYTHING = ("bf16", "int8", "int4", "local_steps")


def problem(bandwidth_Bps: float, delay_s: float = 0.02, **changes: Any) -> Problem:
    lines = {"up_Bps": bandwidth_Bps, "down_Bps": bandwidth_Bps}
    devices = tuple(Device(name=f"p{i}", flops=10e12, memory_bytes=24e9, **lines) for i in range(4))
    machines = Cluster(devices, np.full((4, 4), delay_s), np.full((4, 4), 1e12))
    return msgspec.structs.replace(Problem(shape=SHAPE, work=WORK, cluster=machines), **changes)


def chosen(given: Problem, *allow: str, stages: int | None = None, divides: bool = True) -> Plan:
    def decide(each: Problem) -> Plan:
        return strategy.decide(each, np.random.default_rng(0), 0, stages)

    return choices.choose(given, allow, decide, lambda _: divides)


def travel(plan_made: Plan) -> tuple[str, str, str, int]:
    return plan_made.activations, plan_made.gradients, plan_made.averaging, plan_made.local_steps


SLOW, FAST = 5e6, 1e14


def test_nothing_that_changes_learning_is_chosen_unless_it_is_allowed() -> None:
    best = chosen(problem(SLOW))
    assert travel(best) == ("none", "none", "none", 1) and best.choices == ()
    assert best == strategy.decide(problem(SLOW), np.random.default_rng(0), 0)
    configured = problem(SLOW, travel=codec.Travel("int8", "bf16", "int8"))
    assert travel(chosen(configured)) == ("int8", "bf16", "int8", 1)
    assert travel(chosen(problem(SLOW), "int8", stages=2))[3] == 1
    only_int4 = chosen(problem(SLOW), "int4", stages=2)
    assert [option.how for option in only_int4.choices] == ["none there, none back", "int4 there, none back"]
    assert "int4" not in travel(chosen(problem(SLOW), "bf16", "int8", stages=2))
    assert travel(chosen(problem(SLOW), "local_steps"))[:3] == ("none", "none", "none")


def test_on_slow_lines_what_is_allowed_is_taken_with_its_price() -> None:
    best = chosen(problem(SLOW), "int8", "int4", stages=2)
    assert travel(best) == ("int4", "int8", "int8", 1), "no int4 for gradients: there is none"
    boundary = [option for option in best.choices if option.what == "boundary"]
    assert [option.how for option in boundary] == [
        "none there, none back",
        "int8 there, int8 back",
        "int4 there, int8 back",
    ]
    assert [option.taken for option in boundary] == [False, False, True]
    assert boundary[0].codec_s == 0.0 < boundary[1].codec_s < boundary[2].codec_s
    assert boundary[0].sent_bytes > max(option.sent_bytes for option in boundary[1:])
    averaging = [option for option in best.choices if option.what == "averaging"]
    assert [(option.how, option.taken) for option in averaging] == [("none", False), ("int8", True)]
    assert averaging[0].tokens_per_s == boundary[2].tokens_per_s, "one after another"
    assert best.predicted is not None and averaging[1].step_s == best.predicted.step_s


@pytest.mark.parametrize(("gain", "taken"), [(1.04, False), (1.06, True)])
def test_what_gives_little_is_not_worth_what_it_leaves_out(gain: float, taken: bool) -> None:
    plain = chosen(problem(SLOW))
    assert plain.predicted is not None

    def decide(each: Problem) -> Plan:
        rate = gain if each.travel.activations == "int8" else 1.0
        predicted = msgspec.structs.replace(plain.predicted, tokens_per_s=100 * rate)
        return msgspec.structs.replace(plain, predicted=predicted, activations=each.travel.activations)

    best = choices.choose(problem(SLOW), ("int8",), decide, lambda _: True)
    assert (best.activations == "int8") is taken
    assert [option.taken for option in best.choices if option.what == "boundary"] == [not taken, taken]


def test_where_lines_are_free_nothing_is_left_out_for_nothing() -> None:
    best = chosen(problem(FAST, delay_s=0.0), *EVERYTHING, stages=1)
    assert travel(best) == ("none", "none", "none", 1)
    assert best.choices and all(
        option.taken == (option.how in ("none", "none there, none back", "1")) for option in best.choices
    )


def test_the_fewest_local_steps_that_bring_nearly_all_are_taken() -> None:
    best = chosen(problem(SLOW), "local_steps")
    local = {int(option.how): option for option in best.choices}
    assert list(local) == [1, *choices.LOCAL_STEPS]
    rates = [option.tokens_per_s for option in local.values()]
    assert rates[1:] == sorted(rates[1:]) and rates[0] > rates[1], "a pipeline beats two local steps here"
    assert 1 < best.local_steps and len(best.stages) == 1 and not best.routes
    enough = choices.ENOUGH * max(rates)
    assert local[best.local_steps].tokens_per_s >= enough > local[best.local_steps // 2].tokens_per_s
    assert [steps for steps, option in local.items() if option.taken] == [best.local_steps]


@pytest.mark.slow
def test_an_average_of_local_steps_is_encoded_where_that_pays_and_boundaries_that_are_gone_are_not() -> None:
    best = chosen(problem(SLOW), "int8", "local_steps")
    assert travel(best)[:3] == ("none", "none", "int8") and best.local_steps > 1
    assert best.predicted is not None
    assert best.predicted.tokens_per_s == max(option.tokens_per_s for option in best.choices)
    without = chosen(problem(SLOW), "local_steps")
    assert without.predicted is not None and best.predicted.tokens_per_s > without.predicted.tokens_per_s


def test_local_steps_need_the_whole_model_on_every_peer_and_whole_microbatches() -> None:
    small = problem(SLOW).cluster.scaled(memory=0.2)
    assert chosen(problem(SLOW, cluster=small), "local_steps").local_steps == 1
    assert chosen(problem(SLOW), "local_steps", divides=False).local_steps == 1
    assert chosen(problem(SLOW), "local_steps", stages=2).local_steps == 1
    with pytest.raises(ValueError, match="local steps need the whole model on every peer"):
        strategy.decide(problem(SLOW, local_steps=4), np.random.default_rng(0), 0, stages=2)


@pytest.mark.slow
def test_a_problem_with_what_was_chosen_is_the_one_that_was_planned() -> None:
    given = problem(SLOW)
    best = chosen(given, *EVERYTHING)
    after = choices.chosen(given, best)
    assert (after.travel.averaging, after.local_steps) == (best.averaging, best.local_steps)
    assert after.work.microbatches == best.local_steps * WORK.microbatches
    assert choices.chosen(after, best) == after
    unsaid = msgspec.structs.replace(best, activations="", gradients="", averaging="", local_steps=0)
    assert choices.chosen(given, unsaid) == given

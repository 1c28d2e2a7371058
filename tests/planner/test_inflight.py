"""How many microbatches owners drive at once: chosen where `run.inflight` leaves it to Shoal, kept where it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.planner import test_relaxing as relaxed
from tests.planner.test_strategy import SHAPE, WORK, decided, machines, problem, step_s

from shoal import config as configuration
from shoal.dashboard import plan_report
from shoal.launcher.planning import plan_settings
from shoal.planner.inputs import memory
from shoal.planner.inputs.cluster import Cluster
from shoal.planner.prediction import timed
from shoal.planner.prediction.seats import Seats, thinned
from shoal.planner.prediction.step import Step, predict
from shoal.planner.strategy import choices, inflight, plan, pricing, relaxing, strategy
from shoal.planner.strategy.problem import Problem

SMALL_HEAD = msgspec.structs.replace(SHAPE, vocabulary=1000)


def free(cluster: Cluster | None = None, **changes: Any) -> Problem:
    work = msgspec.structs.replace(WORK, inflight=0)
    return problem(cluster or machines(4, 1e9, memory_bytes=200e9), work=work, shape=SMALL_HEAD, **changes)


def keeping(**changes: Any) -> Problem:
    """Each replica keeps the activations of four forwards: of more on their way it computes some again."""
    return free(kept_activations=4, **changes)


@pytest.mark.slow
def test_the_plan_takes_the_number_with_the_shortest_step_and_says_what_the_run_by_itself_would_take() -> None:
    given = keeping()
    best, by_number = decided(given, 2), {}
    for count in inflight.COUNTS:
        by_number[count] = step_s(decided(inflight.fixed(given, count), 2))
    assert best.inflight == min(by_number, key=lambda count: by_number[count])
    assert step_s(best) == by_number[best.inflight]
    assert by_number[inflight.COUNTS[-1]] > 1.2 * step_s(best), "a search that takes any number is caught"
    assert f"{best.inflight} microbatches of each peer at once: with as many as each measures by itself" in best.reason


def test_a_number_that_does_not_pay_leaves_the_run_to_itself() -> None:
    """What is measured while it runs adapts to what the plan does not know."""
    best = decided(free(kept_activations=-1), 2)  # all are kept, and lines are wide
    assert best.inflight == 0 and "at once" not in best.reason
    assert inflight.pays(1.0, 1.04) and not inflight.pays(1.0, 1.02)


@pytest.mark.slow
def test_no_placement_is_played_twice_in_one_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Problems that lack a relaxation find the same placements again."""
    played: list[Seats] = []

    def predicted(
        seats: Seats, cluster: Cluster, rng: np.random.Generator, spread: float = 0.0, **settled: int
    ) -> Step:
        if not settled:
            played.append(seats)
        return predict(seats, cluster, rng, spread, **settled)

    monkeypatch.setattr(strategy, "predict", predicted)
    decided(keeping(uneven=True, swapping=True), 2)
    assert len(played) == len(set(played)) > 2


@pytest.mark.parametrize("count", [2, 5, 64])
def test_a_number_that_the_configuration_names_stays(count: int) -> None:
    given = inflight.fixed(keeping(), count)
    assert decided(given, 2).inflight == count
    assert choices.chosen(given, msgspec.structs.replace(decided(given, 2), inflight=7)).work.inflight == count


def test_no_number_is_chosen_whose_tensors_do_not_fit_the_activation_stores() -> None:
    cluster = Cluster(machines(4, 1e9).devices, np.full((4, 4), 0.3), np.full((4, 4), 1e12))
    quick = msgspec.structs.replace(
        cluster, devices=tuple(msgspec.structs.replace(one, flops=1e14) for one in cluster.devices)
    )
    work = msgspec.structs.replace(WORK, microbatches=256, inflight=0)
    given = free(quick, kept_activations=0)
    given = msgspec.structs.replace(given, work=work)
    tensor_bytes = given.profile.boundary_bytes

    def tried(keep_bytes: float) -> set[int]:
        counts: set[int] = set()

        def seconds(seats: Seats, machines: Cluster) -> float:
            counts.add(seats.inflight)
            return 1.0 / seats.inflight  # the more the better

        limited = msgspec.structs.replace(given, store_limits=memory.StoreLimits(keep_bytes))
        option = pricing.placed(limited, (range(8), range(8, 16)), (0, 1, 0, 1))
        best = inflight.best(limited, option, seconds)
        assert (best is None) == (not counts)
        assert best is None or best.seats.inflight == max(counts)
        return counts

    assert max(tried(2 * 2 * 16 * tensor_bytes)) == 16
    assert max(tried(2 * 2 * 15.9 * tensor_bytes)) == 12
    assert not tried(2 * 2 * 1.9 * tensor_bytes), "not even two"


def test_of_a_large_fleet_the_same_stages_thinned_are_compared_and_all_machines_are_priced() -> None:
    given = free(machines(80, 1e9, memory_bytes=200e9), kept_activations=4)
    option = pricing.placed(given, (range(8), range(8, 16)), tuple(device % 4 // 3 for device in range(80)))
    seen: list[tuple[int, int, int]] = []

    def seconds(seats: Seats, cluster: Cluster) -> float:
        assert len(cluster.devices) == len(seats.stage_of) == len(seats.forward_s)
        seen.append((seats.stage_of.count(0), seats.stage_of.count(1), seats.microbatches))
        return 1.0

    best = inflight.best(given, option, seconds)
    assert set(seen) == {(24, 8, round(WORK.microbatches * 32 / 80))}
    assert best is not None and len(best.seats.members) == 80
    assert thinned(option.seats.stage_of, 2, 1) == [0, 3], "every stage keeps one"


def test_one_stage_and_local_steps_have_nothing_to_choose() -> None:
    assert decided(keeping(), 1).inflight == 0
    assert not inflight.is_free(keeping(local_steps=4)) and not inflight.is_free(problem())


@pytest.mark.parametrize("seed", [pytest.param(2, marks=pytest.mark.slow), 5, 104])
def test_with_a_free_number_a_what_if_is_never_worse_than_the_plan(seed: int) -> None:
    given = inflight.fixed(relaxed.drawn(seed), 0)
    given = msgspec.structs.replace(given, kept_activations=2)
    decide = relaxed.search(5)
    best = decide(given)
    for change in ("bandwidth=2x", "delay=0.5x", "memory=2x", "peers=2x", "speed=2x"):
        changed = relaxed.what_if(given, change)
        assert relaxing.relaxes(given, changed), change
        other = relaxing.decide_from(given, best, changed, decide)
        assert choices.tokens_per_s(other) >= choices.tokens_per_s(best), change


@pytest.mark.slow
def test_a_known_plan_with_its_number_is_where_a_search_goes_on() -> None:
    """Also for more memory, where the same placement by itself is no better."""
    given, decide = keeping(), relaxed.search(0)
    best = decide(given)
    assert best.inflight
    again = decide(given, best)
    assert (again.inflight, step_s(again)) == (best.inflight, step_s(best))


def test_a_plans_number_reaches_the_run_unless_the_configuration_names_one(tmp_path: Path) -> None:
    best = decided(keeping(), 2)
    file = tmp_path / "run.toml"
    file.write_text("[model]\nlayers = 16\n[train]\nmicrobatch = 4\nbatch = 64\n")
    assert plan_settings.load(str(file), [], best, "plan.json").run.inflight == best.inflight != 0
    assert plan_settings.load(str(file), ["run.inflight=9"], best, "plan.json").run.inflight == 9
    by_itself = msgspec.structs.replace(best, inflight=0)
    assert configuration.inflight(plan_settings.load(str(file), [], by_itself, "plan.json").run) == 0
    plan.save(best, tmp_path / "plan.json")
    assert plan.load(tmp_path / "plan.json").inflight == best.inflight


def test_the_printed_plan_says_how_many() -> None:
    given = keeping()
    best = decided(given, 2)
    words = plan_report.numbers(best, choices.chosen(given, best))
    assert f"each peer drives {best.inflight} microbatches" in words
    assert f"run.inflight={best.inflight}" in words
    auto = plan_report.numbers(msgspec.structs.replace(best, inflight=0), given)
    assert "by what it measures (auto)" in auto and "run.inflight=" not in auto


def test_a_long_step_is_as_long_as_when_all_of_it_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 192 and 96 microbatches nothing is seen of 16 owners that drive 16 each: steps came out 16 % too short."""
    cluster = machines(16, 125e6)
    speeds = [3.0 if device % 2 else 1.0 for device in range(16)]
    seats = Seats(
        stage_of=tuple(device % 4 // 2 for device in range(16)),
        forward_s=tuple(0.3 / speed for speed in speeds),
        backward_s=tuple(0.6 / speed for speed in speeds),
        gradient_bytes=(1e6, 1e6),
        boundary_bytes=8e6,
        tokens_bytes=8e3,
        microbatches=512,
        inflight=16,
    )
    steps = []
    for longest in (timed.LONGEST, 512):
        monkeypatch.setattr(timed, "LONGEST", longest)
        steps.append(timed.played(seats, cluster, np.random.default_rng(0))[0])
    assert steps[0] == pytest.approx(steps[1], rel=0.03)

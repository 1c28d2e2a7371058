"""Whether a running run should follow another plan, now that its fleet is not the planned one. For `shoal plan --replan`.

A plan outlives some change: newcomers are placed and peers moved by core/leader/rebalance.py, and a planned peer that is gone is wired
round. When more than THRESHOLD of the fleet has come, gone or moved, the fleet as it stands and a fresh plan for it are both
played (step.py), and the plan is worth having when what it saves until the end of the run is more than what changing over
costs: everybody starts again from the newest checkpoint with the state of its stage, and what was trained since is done again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import msgspec
import numpy as np

from shoal.planner.prediction.step import predict
from shoal.planner.strategy.plan import Plan
from shoal.planner.strategy.pricing import placed
from shoal.planner.strategy.problem import Problem
from shoal.planner.strategy.strategy import decide

THRESHOLD = 0.2  # of the planned fleet: below it the search's own noise is as large as what it finds
START_S = 60.0  # until processes that were stopped train again, besides loading their state
GAIN = 1.1  # a change must save so many times what it costs: both are predictions


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """A run as it stands."""

    serving: Mapping[str, int]  # machines by name, and the stage of each
    steps_left: int
    undone_steps: float = 0.0  # trained since the newest checkpoint
    storage_Bps: float = math.inf  # from where checkpoints lie to one machine, if narrower than its line


class Verdict(msgspec.Struct, frozen=True):
    """`plan` is None when the run should go on as it is."""

    plan: Plan | None
    reason: str
    changed: float  # share of the planned fleet
    now_s: float = math.nan  # a step of the fleet as it is; infinite when it serves no stage of some blocks
    then_s: float = math.nan  # a step of the plan
    move_s: float = 0.0  # changing over


def replan(
    old: Plan,
    problem: Problem,
    running: Running,
    rng: Callable[[], np.random.Generator],
    threshold: float = THRESHOLD,
    budget: int = 400,
) -> Verdict:
    """`problem.cluster` holds the machines that are there now."""
    changed, words = difference(old, running.serving)
    if changed < threshold:
        return Verdict(None, f"{words}: under the threshold of {threshold:.0%}, the run goes on as it is", changed)
    now_s = as_it_is(old, problem, running.serving, rng())
    fresh = decide(problem, rng(), budget)
    assert fresh.predicted is not None
    then_s, move_s = fresh.predicted.step_s, change_s(fresh, problem, running, now_s)
    saved_s = running.steps_left * (now_s - then_s)
    text = f"{words}; a step takes {_s(now_s)} as it is and {_s(then_s)} with the new plan"
    if not saved_s > GAIN * move_s:
        left = (
            f"over {running.steps_left} steps that saves {_s(max(saved_s, 0.0))}, and changing over costs {_s(move_s)}"
        )
        return Verdict(None, f"{text}: {left}; the run goes on as it is", changed, now_s, then_s, move_s)
    pays = f"changing over costs {_s(move_s)} and saves {_s(saved_s)} until the end"
    return Verdict(fresh, f"{text}: {pays}", changed, now_s, then_s, move_s)


def difference(old: Plan, serving: Mapping[str, int]) -> tuple[float, str]:
    """How much of the planned fleet has gone, come or moved, as a share of it and in words."""
    planned = old.seats
    gone = sum(name not in serving for name in planned)
    come = sum(name not in planned for name in serving)
    moved = sum(serving.get(name, stage) != stage for name, stage in planned.items())
    share = (gone + come + moved) / max(len(planned), 1)
    return (
        share,
        f"of {len(planned)} planned machines {gone} are gone and {moved} moved, {come} others came ({share:.0%})",
    )


def as_it_is(old: Plan, problem: Problem, serving: Mapping[str, int], rng: np.random.Generator) -> float:
    """Seconds of a step with the old blocks and today's machines, wired by measured times."""
    known = {device.name for device in problem.cluster.devices}
    strangers = sorted(set(serving) - known)
    if strangers:
        raise ValueError(
            f"the cluster file does not have {strangers[0]}, which takes part; add a [[device]] of that name"
        )
    stage_of = tuple(serving.get(device.name, -1) for device in problem.cluster.devices)
    if set(range(len(old.stages))) - set(stage_of):
        return math.inf
    cut = tuple(range(stage.first, stage.end) for stage in old.stages)
    return predict(placed(problem, cut, stage_of).seats, problem.cluster, rng).step_s


def change_s(fresh: Plan, problem: Problem, running: Running, now_s: float) -> float:
    """Seconds that are lost by changing over: starting, loading, and the steps since the checkpoint once more."""
    line = {device.name: device.down_Bps or math.inf for device in problem.cluster.devices}
    load_s = 0.0
    for stage in fresh.stages:
        state_bytes = problem.optimizer.state_bytes(problem.profile.stage(range(stage.first, stage.end)))
        load_s = max(load_s, *(state_bytes / min(line[peer], running.storage_Bps) for peer in stage.peers))
    assert fresh.predicted is not None
    step_s = now_s if math.isfinite(now_s) else fresh.predicted.step_s
    return START_S + load_s + running.undone_steps * min(step_s, fresh.predicted.step_s)


def _s(seconds: float) -> str:
    if math.isinf(seconds):
        return "for ever, as a stage is served by nobody," if seconds > 0 else "nothing"
    return f"{seconds:.3g} s" if seconds < 600 else f"{seconds / 3600:.2g} h"

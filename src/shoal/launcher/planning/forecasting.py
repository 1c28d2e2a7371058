"""From a configuration, machines and churn to a forecast: for `shoal forecast` and `shoal.forecast`."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from shoal import config, units
from shoal.forecasting import churn as churns
from shoal.forecasting.churn import Churn, presences
from shoal.forecasting.forecaster import forecast
from shoal.forecasting.job import Job, job_of
from shoal.forecasting.models.choice import model_of
from shoal.forecasting.summary import Forecast, summarized
from shoal.launcher import preflight
from shoal.launcher.planning.problem import problem_of
from shoal.planner.strategy import choices, plan, strategy

SEED, BUDGET = 0, 400  # of the planner's search
EXACT_MOST_S = 3600.0  # that a forecast of every message may take
PROBE_S = 5.0  # after which it is known what it will take


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """What is forecast of every configuration."""

    cluster: str | None = None  # file of the machines
    churn: str | None = None  # file; without it the machines' losses_per_h
    hours: float = 24.0
    seeds: int = 20
    stages: int | None = None  # plan with this number only
    plan: str | None = None  # file; without it the planner's choice
    exact: bool = False  # message by message, as long as that takes no more than EXACT_MOST_S


def check(outlook: Outlook) -> None:
    if not 0 < outlook.hours <= 24 * 366:
        raise ValueError(f"--hours {outlook.hours:g}: wanted more than 0, and a year at most")
    if not 1 <= outlook.seeds <= 10_000:
        raise ValueError(f"--seeds {outlook.seeds}: wanted 1 to 10000")


def forecasted(
    tree: config.Config,
    name: str,
    outlook: Outlook,
    tell: Callable[[int, float], None] = lambda seed, now: None,
    fits: Callable[[int, int], None] = lambda played, of: None,
) -> Forecast:
    """`tell`: is called with the seed that is played and its time, s; `fits` before, with how many plays of how many there are that the
    seconds of a step are fitted to. ValueError: nothing fits, or no seed makes progress."""
    check(outlook)
    churn = churns.load(outlook.churn) if outlook.churn else Churn()
    return histories_of(_job(outlook, tree), churn, name, outlook, tell, fits)


def histories_of(
    job: Job,
    churn: Churn,
    name: str,
    outlook: Outlook,
    tell: Callable[[int, float], None],
    fits: Callable[[int, int], None],
) -> Forecast:
    """All seeds of one job."""
    horizon_s = outlook.hours * 3600
    histories = [presences(churn, job.machines, horizon_s, seed) for seed in range(outlook.seeds)]
    model = model_of(job, [] if outlook.exact else histories, churn.start_s, horizon_s, fits)
    planned = model(np.array(job.stage_of))
    assert planned is not None, "a plan serves every stage"
    if planned.step_s > horizon_s:
        raise ValueError(
            f"--hours {outlook.hours:g}: a step takes {planned.step_s / 3600:.3g} hours; wanted several of them"
        )
    if outlook.exact:
        from shoal.forecasting.exact import (
            forecast_exact,
        )  # the simulator and all machines of a run: only who asks waits for them

        tell = _Probe(outlook, horizon_s, tell)
        results = [
            forecast_exact(job, history, churn.start_s, horizon_s, seed, partial(tell, seed))
            for seed, history in enumerate(histories)
        ]
    else:
        results = [
            forecast(job, model, history, churn.start_s, horizon_s, seed, partial(tell, seed))
            for seed, history in enumerate(histories)
        ]
    if not any(result.steps for result in results):
        raise ValueError(f"{name} cannot make progress: {results[0].stuck}")
    return summarized(name, job, planned, results, outlook.exact)


class _Probe:
    """Passes on what it is told, and refuses a forecast of every message that would take too long here, once that can be known."""

    def __init__(self, outlook: Outlook, horizon_s: float, tell: Callable[[int, float], None]) -> None:
        self._outlook, self._horizon_s, self._tell = outlook, horizon_s, tell
        self._began_s = time.monotonic()
        # Seconds of this clock and simulated ones: what begins a run is no measure
        self._first: tuple[float, float] | None = None

    def __call__(self, seed: int, now: float) -> None:
        self._tell(seed, now)
        passed_s = time.monotonic() - self._began_s
        if seed or passed_s < PROBE_S:
            return
        if self._first is None:
            self._first = passed_s, now
        elif passed_s > 2 * PROBE_S and self._first[0] > 0:
            pace = (passed_s - self._first[0]) / max(now - self._first[1], 1.0)
            whole_s = passed_s + pace * (self._horizon_s * self._outlook.seeds - now)
            self._first = 0.0, now
            if whole_s > EXACT_MOST_S:
                raise ValueError(
                    f"--exact: {self._outlook.seeds} seeds of {self._outlook.hours:g} hours would take about"
                    f" {units.duration(whole_s)} on this machine, {units.duration(EXACT_MOST_S)} at most; wanted fewer --hours or"
                    " --seeds, or no --exact"
                )


def name_of(file: str | None, tree: config.Config) -> str:
    return Path(file).stem if file else tree.run.name


def _job(outlook: Outlook, tree: config.Config) -> Job:
    if tree.device.executor != "emulated":
        preflight.refuse(preflight.shape(tree))
    problem = problem_of(tree, outlook.cluster)
    if outlook.plan:
        decided = plan.load(outlook.plan)
        problem = choices.chosen(problem, decided)
        preflight.refuse(plan.validate(decided, problem.profile, problem.cluster, problem.work.value_bytes))
    else:
        decided = strategy.decide(problem, np.random.default_rng(SEED), BUDGET, outlook.stages)
    return job_of(problem, decided, tree)

"""`shoal forecast CONFIG... --cluster FILE`: how far a run comes on machines that come and go, what it costs, and how sure that is.

    shoal forecast my.toml --cluster cluster.toml --churn spot.csv --hours 24 --seeds 20
    shoal forecast a.toml b.toml --cluster cluster.toml --churn churn.toml       two ways, seed by seed on the same machines
    shoal forecast my.toml --cluster cluster.toml --plan plan.json --json        that plan instead of the planner's

Every figure is simulated. forecast/ plays; this file reads, calls and prints.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from shoal import config
from shoal.dashboard import forecast_report
from shoal.forecast import churn as churns
from shoal.forecast.churn import Churn, presences
from shoal.forecast.forecaster import forecast
from shoal.forecast.job import Job, job_of
from shoal.forecast.rates import model_of
from shoal.forecast.summary import Forecast, compared, summarized
from shoal.launcher import preflight
from shoal.launcher.planning.problem import problem_of
from shoal.planner.strategy import choices, plan, strategy

SEED, BUDGET = 0, 400  # of the planner's search
QUIET_S = 2.0  # a forecast that takes longer says how far it is


def arguments(parser: argparse.ArgumentParser) -> None:
    text = "TOML files, one for each way that is compared, and settings that replace all files' own"
    parser.add_argument("words", nargs="*", metavar="CONFIG | section.field=value", help=text)
    parser.add_argument("--cluster", metavar="FILE", help="the machines: a TOML file, as for `shoal plan`")
    parser.add_argument(
        "--churn",
        metavar="FILE",
        help="a record of spot instances, or a TOML file; without it the machines' losses_per_h",
    )
    parser.add_argument("--hours", type=float, default=24.0, metavar="H", help="forecast so many hours (24)")
    parser.add_argument("--seeds", type=int, default=20, metavar="N", help="play so many histories (20)")
    parser.add_argument("--stages", type=int, metavar="S", help="plan with this number of stages only")
    parser.add_argument("--plan", metavar="PLAN", help="forecast this plan instead of the planner's choice")
    parser.add_argument("--pictures", metavar="DIR", help="draw the forecast into this directory (PNG, SVG)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    files = [word for word in args.words if "=" not in word]
    settings = [word for word in args.words if "=" in word]
    horizon_s = args.hours * 3600
    _check(args, files)
    churn = churns.load(args.churn) if args.churn else Churn()
    forecasts = [_forecast(args, file, settings, churn, horizon_s) for file in files or [None]]
    comparisons = [compared(forecasts[0], other) for other in forecasts[1:]]
    if args.pictures:
        from shoal.dashboard import forecast_pictures  # matplotlib: only who draws waits for it

        Path(args.pictures).mkdir(parents=True, exist_ok=True)
        forecast_pictures.tokens(forecasts, Path(args.pictures) / "tokens")
        forecast_pictures.parts(forecasts, Path(args.pictures) / "time")
        print(f"drawn in {args.pictures}: tokens, time (png, svg)", file=sys.stderr)
    if args.json:
        print(msgspec.json.encode({"simulated": True, "forecasts": forecasts, "comparisons": comparisons}).decode())
        return 0
    print("\n\n".join(map(forecast_report.report, forecasts)))
    for comparison in comparisons:
        print(forecast_report.comparison(comparison))
    return 0


def _check(args: argparse.Namespace, files: list[str]) -> None:
    if not 0 < args.hours <= 24 * 366:
        raise ValueError(f"--hours {args.hours:g}: wanted more than 0, and a year at most")
    if not 1 <= args.seeds <= 10_000:
        raise ValueError(f"--seeds {args.seeds}: wanted 1 to 10000")
    if args.plan and len(files) > 1:
        raise ValueError("--plan goes with one configuration; two are compared each with its own plan")


def _forecast(
    args: argparse.Namespace, file: str | None, settings: list[str], churn: Churn, horizon_s: float
) -> Forecast:
    tree = config.load(file, settings)
    job = _job(args, tree)
    histories = [presences(churn, job.machines, horizon_s, seed) for seed in range(args.seeds)]
    model = model_of(job, sum(map(len, histories)))
    planned = model(np.array(job.stage_of))
    assert planned is not None, "a plan serves every stage"
    if planned.step_s > horizon_s:
        raise ValueError(
            f"--hours {args.hours:g}: a step takes {planned.step_s / 3600:.3g} hours; wanted several of them"
        )
    name = Path(file).stem if file else tree.run.name
    progress = _Progress()
    results = []
    for seed, history in enumerate(histories):

        def text(now: float, seed: int = seed) -> None:
            progress(lambda: forecast_report.progress(name, seed, args.seeds, now, horizon_s))

        results.append(forecast(job, model, history, churn.start_s, horizon_s, seed, text))
    if not any(result.steps for result in results):
        raise ValueError(f"{name} cannot make progress: {results[0].stuck}")
    return summarized(name, job, planned, results)


def _job(args: argparse.Namespace, tree: config.Config) -> Job:
    if tree.device.executor != "emulated":
        preflight.refuse(preflight.model(tree))
    problem = problem_of(tree, args.cluster)
    if args.plan:
        decided = plan.load(args.plan)
        problem = choices.chosen(problem, decided)
        preflight.refuse(plan.validate(decided, problem.profile, problem.cluster, problem.work.value_bytes))
    else:
        decided = strategy.decide(problem, np.random.default_rng(SEED), BUDGET, args.stages)
    return job_of(problem, decided, tree)


class _Progress:
    """Prints how far a forecast is, once every QUIET_S seconds."""

    def __init__(self) -> None:
        self._printed_s = time.monotonic()

    def __call__(self, text: Callable[[], str]) -> None:
        if time.monotonic() > self._printed_s + QUIET_S:
            self._printed_s = time.monotonic()
            print(text(), file=sys.stderr, flush=True)

"""`shoal forecast CONFIG... --cluster FILE`: how far a run comes on machines that come and go, what it costs, and how sure that is.

    shoal forecast my.toml --cluster cluster.toml --churn spot.csv --hours 24 --seeds 20
    shoal forecast a.toml b.toml --cluster cluster.toml --churn churn.toml       two ways, seed by seed on the same machines
    shoal forecast my.toml --cluster cluster.toml --plan plan.json --json        that plan instead of the planner's
    shoal forecast --from-run runs/NAME --bandwidth x2 run.inflight=8            a recorded run, and what would be if
    shoal forecast my.toml --cluster cluster.toml --hours 1 --seeds 5 --exact    message by message

Every figure is simulated. forecast/ plays; this file reads, calls and prints.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from shoal import config
from shoal.dashboard import forecast_report
from shoal.forecasting.summary import Forecast, compared
from shoal.launcher.planning import from_run
from shoal.launcher.planning.forecasting import Outlook, check, forecasted, histories_of, name_of
from shoal.model import remote

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
    parser.add_argument(
        "--from-run", metavar="DIR", help="machines, lines and churn from that run's trace instead of files"
    )
    for name, what in (("bandwidth", "lines are"), ("delay", "links take"), ("speed", "machines are")):
        parser.add_argument(f"--{name}", metavar="xN", default="", help=f"with --from-run: what if {what} N times that")
    parser.add_argument(
        "--exact", action="store_true", help="play every message of the runs: slower, and refused over an hour"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    files = [word for word in args.words if "=" not in word]
    settings = [word for word in args.words if "=" in word]
    if args.plan and len(files) > 1:
        raise ValueError("--plan goes with one configuration; two are compared each with its own plan")
    outlook = Outlook(
        cluster=args.cluster,
        churn=args.churn,
        hours=args.hours,
        seeds=args.seeds,
        stages=args.stages,
        plan=args.plan,
        exact=args.exact,
    )
    check(outlook)
    forecasts, text = _forecasts(args, outlook, files, settings)
    comparisons = [compared(forecasts[0], other) for other in forecasts[1:]]
    if args.pictures:
        _draw(forecasts, Path(args.pictures))
    if args.json:
        print(msgspec.json.encode({"simulated": True, "forecasts": forecasts, "comparisons": comparisons}).decode())
        return 0
    print("\n\n".join([*([text] if text else []), *map(forecast_report.report, forecasts)]))
    for comparison in comparisons:
        print(forecast_report.comparison(comparison))
    return 0


def _forecasts(
    args: argparse.Namespace, outlook: Outlook, files: list[str], settings: list[str]
) -> tuple[list[Forecast], str]:
    """And what goes before them, as text."""
    if args.from_run:
        return _from_run(args, outlook, files, settings)
    if args.bandwidth or args.delay or args.speed:
        raise ValueError("--bandwidth, --delay and --speed change a recorded run: name it with --from-run runs/NAME")
    named: list[str | None] = [*files] or [None]
    return [_forecast(outlook, file, settings) for file in named], ""


def _draw(forecasts: list[Forecast], there: Path) -> None:
    from shoal.dashboard import forecast_pictures  # matplotlib: only who draws waits for it

    there.mkdir(parents=True, exist_ok=True)
    forecast_pictures.tokens(forecasts, there / "tokens")
    forecast_pictures.parts(forecasts, there / "time")
    print(f"drawn in {there}: tokens, time (png, svg)", file=sys.stderr)


def _from_run(
    args: argparse.Namespace, outlook: Outlook, files: list[str], settings: list[str]
) -> tuple[list[Forecast], str]:
    """The run's machines as they were, and if they were otherwise; what was fitted, as text."""
    if given := [*files, *(name for name in ("cluster", "churn", "plan", "stages") if getattr(args, name) is not None)]:
        raise ValueError(
            f"{given[0]} with --from-run, which takes machines, plan and churn from the record; leave it out"
        )
    run = from_run.of_run(args.from_run)
    what = from_run.WhatIf(bandwidth=args.bandwidth, delay=args.delay, speed=args.speed, settings=tuple(settings))
    jobs = {run.config.run.name: run.fit.job} | ({f"with {what}": from_run.what_if(run, what)} if what else {})
    progress = _Progress()

    def tell(name: str, seed: int, now: float) -> None:
        progress(lambda: forecast_report.progress(name, seed, outlook.seeds, now, outlook.hours * 3600))

    def fits(name: str, played: int, of: int) -> None:
        progress(lambda: forecast_report.fitting(name, played, of))

    forecasts = [
        histories_of(job, run.fit.churn, name, outlook, partial(tell, name), partial(fits, name))
        for name, job in jobs.items()
    ]
    return forecasts, forecast_report.fitted(args.from_run, run.fit, run.step, run.replayed_s)


def _forecast(outlook: Outlook, file: str | None, settings: list[str]) -> Forecast:
    tree, progress = remote.local(config.load(file, settings)), _Progress()
    name, horizon_s = name_of(file, tree), outlook.hours * 3600

    def tell(seed: int, now: float) -> None:
        progress(lambda: forecast_report.progress(name, seed, outlook.seeds, now, horizon_s))

    def fits(played: int, of: int) -> None:
        progress(lambda: forecast_report.fitting(name, played, of))

    return forecasted(tree, name, outlook, tell, fits)


class _Progress:
    """Prints how far a forecast is, once every QUIET_S seconds."""

    def __init__(self) -> None:
        self._printed_s = time.monotonic()

    def __call__(self, text: Callable[[], str]) -> None:
        if time.monotonic() > self._printed_s + QUIET_S:
            self._printed_s = time.monotonic()
            print(text(), file=sys.stderr, flush=True)

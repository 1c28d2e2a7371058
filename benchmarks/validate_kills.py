"""Committed samples of real runs after ten minutes with kills and joins, over their forecast.

    python benchmarks/validate_kills.py [--first 7] [--configurations 12] [--minutes 10] [--at-once 2] [--done FILE.jsonl] [--record]

The configurations with kills of validate.py, by its rule of what two cores carry: real processes, emulated compute, modelled lines. Every
30 to 70 s a peer is killed, from a seed, and the run starts another. The forecast is given the run's own deaths and requests to join, since
a forecast draws such moments and cannot know them. Beside it stands the simulation of every message with the same. Both begin with the
first commit, as the run's own beginning warms up. The two constants of validate.py (a hop's and a step's own seconds) are fitted to the
usual step of every other run; the figures are of the rest.

--at-once: runs beside one another, each of which takes at most half a core. --done keeps what was measured and goes on from there. The last
line is one JSON object: the held-out median difference of committed samples, 5 % its target.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from threading import Lock

import msgspec

from forecast_kills import FIRST_S, KILLS_S, LAST_S
from report import at_most, parse, report
from shoal.forecasting.churn import Presence
from shoal.forecasting.forecaster import Run
from shoal.forecasting.job import Job
from shoal.forecasting.models.played import Played
from validate import (
    Configuration,
    Measured,
    by_message,
    doubting,
    drawn,
    fitted,
    played,
    predicted_s,
    there_and_then,
    too_much,
    with_constants,
)

PERCENT = 5.0
EVERY = 4  # so many configurations, one has kills


def kills_s(seed: int, horizon_s: float) -> list[float]:
    rng, now, found = Random(f"real/{seed}"), FIRST_S, list[float]()
    while (now := now + rng.uniform(*KILLS_S)) <= horizon_s - LAST_S:
        found.append(now)
    return found


def long_enough(seed: int, horizon_s: float) -> Configuration:
    """With as many steps as there would be without kills."""
    return drawn(seed, 2 + math.ceil(horizon_s / predicted_s(drawn(seed).job)))


def measured(one: Configuration, horizon_s: float) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        return played(one, Path(folder), kills_s(one.seed, horizon_s))


def committed(run: Measured, horizon_s: float) -> int:
    """Steps after the first, in so many seconds after its commit."""
    return sum(at_s <= run.commits_s[0] + horizon_s for at_s in run.commits_s) - 1


def forecast(job: Job, there: list[int], changes: list[Presence], horizon_s: float) -> int:
    run = Run(job, Played(job), [Presence(0.0, slot, True) for slot in there] + changes, 0.0)
    run.play(horizon_s)
    return run.progress.step


def simulated(job: Job, there: list[int], changes: list[Presence], horizon_s: float) -> int:
    exact, began_s = by_message(job, there, changes)
    exact.play(began_s + horizon_s)
    return len(exact.watch.commits.times_s) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--first", type=int, default=7, metavar="SEED", help="3, 7, 11 or so on")
    parser.add_argument("--configurations", type=int, default=12)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--done", metavar="FILE", help="what was measured before, to which the rest is added")
    args = parse(parser)
    horizon_s, done = 60 * args.minutes, Path(args.done) if args.done else None
    known = {}
    if done is not None and done.exists():
        known = {run.seed: run for run in (msgspec.json.decode(each, type=Measured) for each in done.open("rb"))}
    chosen = [
        long_enough(seed, horizon_s) for seed in range(args.first, args.first + EVERY * args.configurations, EVERY)
    ]
    for one in chosen:
        if why := too_much(one):
            print(f"{one.seed:>3}: {one.words}: left out: {why}", flush=True)
    carried = [one for one in chosen if not too_much(one)]
    lock = Lock()

    def run_of(one: Configuration) -> Measured:
        run = known.get(one.seed) or measured(one, horizon_s)
        with lock:
            if done is not None and one.seed not in known:
                with done.open("ab") as file:
                    file.write(msgspec.json.encode(run) + b"\n")
            print(f"{one.seed:>3}: {one.words}: {committed(run, horizon_s)} steps in {args.minutes:g} min", flush=True)
        return run

    with ThreadPoolExecutor(args.at_once) as pool:
        runs = list(pool.map(run_of, carried))
    scored(list(zip(carried, runs, strict=True)), horizon_s, args)


def scored(pairs: list[tuple[Configuration, Measured]], horizon_s: float, args: argparse.Namespace) -> None:
    constants = fitted(pairs[::2])
    print(f"fitted to every other of {len(pairs)}: {1e3 * constants[0]:g} ms a hop, {1e3 * constants[1]:g} ms a step")
    errors: dict[int, float] = {}
    exact_errors: dict[int, float] = {}
    for number, (one, run) in enumerate(pairs):
        job = doubting(with_constants(one.job, *constants))
        there, changes = there_and_then(job, run)
        have, deaths = committed(run, horizon_s), sum(not joins for _, _, joins in run.changes)
        steps, exact = forecast(job, there, changes, horizon_s), simulated(job, there, changes, horizon_s)
        errors[one.seed], exact_errors[one.seed] = 100 * (steps / have - 1), 100 * (exact / have - 1)
        print(
            f"| {one.seed} | {one.words} | {deaths} | {have} | {steps} | {errors[one.seed]:+.1f} % | {exact} |"
            f" {exact_errors[one.seed]:+.1f} % | {'held out' if number % 2 else 'fitted'} |",
            flush=True,
        )
    of = {"fitted": pairs[::2], "held out": pairs[1::2] or pairs}
    off = {name: [abs(errors[one.seed]) for one, _ in part] for name, part in of.items()}
    for name, part in off.items():
        print(f"{name}: median {statistics.median(part):.1f} %, worst {max(part):.1f} % of {len(part)}")
    held_out = off["held out"]
    report(
        "validate_kills",
        statistics.median(held_out),
        "% median difference of forecast from committed samples, held-out real runs with kills and joins",
        at_most(PERCENT),
        {
            "minutes": args.minutes,
            "at_once": args.at_once,
            "constants_s": [float(each) for each in constants],
            "worst_percent": round(max(held_out), 2),
            "fitted_percent": [round(statistics.median(off["fitted"]), 2), round(max(off["fitted"]), 2)],
            "percent": {str(seed): round(error, 2) for seed, error in errors.items()},
            "by_message_percent": {str(seed): round(error, 2) for seed, error in exact_errors.items()},
        },
        args.record,
    )


if __name__ == "__main__":
    main()

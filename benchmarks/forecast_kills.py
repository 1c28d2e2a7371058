"""Committed samples after ten minutes with kills and joins: the aggregated forecast against every message of the same runs, both simulated.

    python benchmarks/forecast_kills.py [--first 39] [--configurations 8] [--minutes 10] [--plays 3]

The configurations are those of validate.py with kills: 4 to 10 machines that are all alike, 1 to 3 stages, 50 to 1000 Mbit/s, up to 150 ms,
codes. Every 30 to 70 s a machine is killed, as a process whose connections break, and 4 to 8 s later another one begins in its place, from
a seed. Beside the samples stand seconds of a step without kills, both ways, so that what deaths cost is told from what a step takes.

With --plays N each configuration is played N times with every message, with other delays of messages and the same kills and joins, and the
forecast is compared with the median. The steps of each play, and how far each is from the median of the others, stand beside it: who is
elected, and whom a leader moves, is chance.

The model was mended by configurations 7 to 35, 51, 55 and 59; the others from 39 on are held out. The last line is one JSON object: the
worst configuration that was played, 5 % its target.
"""

from __future__ import annotations

import argparse
import math
import statistics
from random import Random

import numpy as np

from forecast_check import from_others, print_spread, spread
from report import at_most, parse, report
from shoal.forecasting.churn import Presence
from shoal.forecasting.exact import ExactRun, forecast_exact
from shoal.forecasting.forecaster import forecast
from shoal.forecasting.job import Job
from shoal.forecasting.models.played import Played
from validate import doubting, drawn, with_constants

WORST_PERCENT = 5.0
HOP_S = 0.008  # the runtime's own time of a hop, as validate.py fits it
KILLS_S, BACK_S, CALM_S = (30.0, 70.0), (4.0, 8.0), 5.0  # between kills; until another machine; after that
FIRST_S, LAST_S = 20.0, 30.0  # without kills, at the beginning and at the end
CALM_STEPS = 25
EVERY, SEEN = 4, 39  # every so many configurations have kills; those before were seen


def job_of(seed: int) -> tuple[Job, str]:
    one = drawn(seed)
    return doubting(with_constants(one.job, HOP_S, 0.0)), one.words


def kills(slots: list[int], horizon_s: float, seed: int) -> list[Presence]:
    rng, now, changes = Random(f"ten/{seed}"), FIRST_S, list[Presence]()
    while (now := now + rng.uniform(*KILLS_S)) <= horizon_s - LAST_S:
        slot = rng.choice(slots)
        back_s = now + rng.uniform(*BACK_S)
        changes += [Presence(now, slot, False), Presence(back_s, slot, True)]
        now = back_s + CALM_S
    return changes


def exact_step_s(job: Job, there: list[Presence]) -> float:
    """Of a step without kills, without the first two, in which what is measured of hops settles."""
    run = ExactRun(job, there, 0.0, 0)
    run.play(math.inf, steps=CALM_STEPS)
    times_s = run.watch.commits.times_s
    return (times_s[-1] - times_s[1]) / (len(times_s) - 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--first", type=int, default=SEEN, metavar="SEED", help="3, 7, 11 or so on")
    parser.add_argument("--configurations", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--plays", type=int, default=1, help="of every configuration with every message")
    args = parse(parser)
    errors: dict[int, float] = {}
    calm_errors: dict[int, float] = {}
    apart: dict[int, list[float]] = {}  # of single plays from the others
    for seed in range(args.first, args.first + EVERY * args.configurations, EVERY):
        job, words = job_of(seed)
        model = Played(job)
        step = model(np.array(job.stage_of))
        assert step is not None
        slots = [slot for slot, stage in enumerate(job.stage_of) if stage >= 0]
        there, horizon_s = [Presence(0.0, slot, True) for slot in slots], 60 * args.minutes
        calm_s = exact_step_s(job, there)
        changes = there + kills(slots, horizon_s, seed)
        plays = [forecast_exact(job, changes, 0.0, horizon_s, play) for play in range(args.plays)]
        steps = [play.steps for play in plays]
        exact, forecasted = statistics.median(steps), forecast(job, model, changes, 0.0, horizon_s, 0).steps
        calm_errors[seed] = 100 * (step.step_s / calm_s - 1)
        errors[seed] = 100 * (forecasted / exact - 1)
        apart[seed] = from_others(steps)
        print(
            f"| {seed} | {words} | {plays[0].deaths} | {exact:g} ({', '.join(map(str, steps))}) | {forecasted} |"
            f" {errors[seed]:+.1f} % | {max(apart[seed], default=0.0):.1f} % | {calm_errors[seed]:+.1f} % |",
            flush=True,
        )
    worst = max(map(abs, errors.values()))
    print(f"median {statistics.median(map(abs, errors.values())):.1f} %, worst {worst:.1f} %")
    every = [one for each in apart.values() for one in each]
    print_spread(every)
    report(
        "forecast_kills",
        worst,
        "% worst difference of microbatches committed with kills and joins, aggregated forecast from every message",
        at_most(WORST_PERCENT),
        {
            "minutes": args.minutes,
            "percent": errors,
            "calm_percent": calm_errors,
            "plays": args.plays,
            "plays_apart": spread(every),
        },
        args.record,
    )


if __name__ == "__main__":
    main()

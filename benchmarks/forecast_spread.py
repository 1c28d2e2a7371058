"""How sure a forecast is: what it says of an hour, over seeds, against the simulator of every message with the same machines.

    python benchmarks/forecast_spread.py [--first 0] [--runs 8] [--seeds 6] [--hours 1] [--parts] [--aggregated]

A run has 8 to 40 slots in one to three regions, 2 to 6 stages, two or three kinds of machines, and churn of its own: a record of spot
instances, lives that end by chance, young ones first, or whole regions that fail. Nothing spares a stage's last replica. Both speeds play
the same machines, coming and going at the same moments, for each seed. Compared are the steps of the hour: the 5th percentile, the
median and the 95th percentile that `shoal forecast` prints, and single seeds. Both are simulated. --aggregated: sums over stages
instead of played steps, as a forecast of a day or of many seeds has them for small fleets, too.

Value: how far the medians are apart, in the median over runs. Beside it: the share of the histories by every message that is within the
forecast's 5th and 95th percentile, 0.9 where both spread alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from random import Random

import numpy as np

from forecast_check import between
from report import at_most, parse, report
from shoal.forecasting.churn import Churn, presences
from shoal.forecasting.exact import forecast_exact
from shoal.forecasting.forecaster import History, forecast
from shoal.forecasting.job import Job
from shoal.forecasting.machines import Machines
from shoal.forecasting.models.choice import corrected, model_of
from shoal.forecasting.summary import spread_of
from shoal.planner.inputs.cluster import Device
from shoal.planner.prediction.seats import Seats

RECORD = Path(__file__).parents[1] / "configs" / "traces" / "aws-g4dn-spot.csv"
MEDIAN_PERCENT = 2.0
START_S = 60.0
BACKWARD = 2.0
PARAMETER_BYTES, STATE_BYTES = 4, 12


def drawn(seed: int) -> tuple[Job, Churn]:
    rng = Random(f"spread/{seed}")
    stages, regions = rng.randint(2, 6), rng.randint(1, 3)
    slots = stages * rng.randint(4, 40 // stages)
    kinds = tuple(
        Device(
            name="",
            flops=1 / between(0.7, 1.4, rng),
            up_Bps=(up := between(5e6, 5e7, rng)),
            down_Bps=up * between(1, 3, rng),
            region=f"region {kind % regions}",
        )
        for kind in range(max(2, regions))
    )
    delay_s = np.empty((len(kinds), len(kinds)))
    for one in range(len(kinds)):
        for other in range(one, len(kinds)):
            near = kinds[one].region == kinds[other].region
            delay_s[one, other] = delay_s[other, one] = 0.01 if near else between(0.03, 0.12, rng)
    kind_of = tuple(slot // stages % len(kinds) for slot in range(slots))
    machines = Machines(kinds, kind_of, delay_s, np.full_like(delay_s, 1e9))
    stage_of = tuple(slot % stages for slot in range(slots))
    forward_s = between(0.3, 1.0, rng) / np.array([[kind.flops] * stages for kind in kinds])
    own = tuple(float(forward_s[kind, 0]) for kind in kind_of)
    narrow_Bps = min(kind.up_Bps for kind in kinds)
    gradient_bytes = between(0.3, 3.0, rng) * narrow_Bps
    job = Job(
        machines=machines,
        stage_of=stage_of,
        forward_s=forward_s,
        backward_s=BACKWARD * forward_s,
        seats=Seats(
            stage_of,
            own,
            tuple(BACKWARD * seconds for seconds in own),
            (gradient_bytes,) * stages,
            between(0.05, 0.5, rng) * narrow_Bps * min(own),
            4096.0,
            slots * rng.randint(3, 6),
            4,
        ),
        state_bytes=(gradient_bytes * STATE_BYTES / PARAMETER_BYTES,) * stages,
        tokens=2048,
        save_every=rng.choice((5, 10, 20)),
    )
    life_s, away_s = between(3600, 4 * 3600, rng), between(300, 1200, rng)
    churns = (
        Churn(record=str(RECORD)),
        Churn(life_s=life_s, away_s=away_s),
        Churn(life_s=life_s, away_s=away_s, shape=0.7),
        Churn(life_s=2 * life_s, away_s=away_s, region_failures_per_h=0.5, region_away_s=600.0),
    )
    return job, churns[seed % len(churns)]


def percent(one: float, other: float) -> float:
    return 100 * (one / other - 1) if other else 0.0


def told(history: History) -> str:
    parts = ", ".join(f"{part} {getattr(history.parts, part):.0f}" for part in history.parts.__struct_fields__)
    return f"{history.steps} steps; {parts}; {history.deaths} deaths, {history.moves} moves, {history.lost_stages} lost stages"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--parts", action="store_true", help="of each seed, where the time goes")
    parser.add_argument("--aggregated", action="store_true", help="sums over stages instead of played steps")
    args = parse(parser)
    horizon_s = args.hours * 3600
    rows: dict[str, dict[str, object]] = {}
    medians, singles = list[float](), list[float]()
    covered = histories = 0
    for number in range(args.first, args.first + args.runs):
        job, churn = drawn(number)
        exact, forecasts = list[History](), list[History]()
        began = time.process_time()
        played = [presences(churn, job.machines, horizon_s, seed) for seed in range(args.seeds)]
        model = (corrected if args.aggregated else model_of)(job, played, START_S, horizon_s)
        for seed, changes in enumerate(played):
            exact.append(forecast_exact(job, changes, START_S, horizon_s, seed))
            forecasts.append(forecast(job, model, changes, START_S, horizon_s, seed))
            singles.append(percent(forecasts[-1].steps, exact[-1].steps))
            if args.parts:
                print(
                    f"  seed {seed}: by message {told(exact[-1])}\n          forecast   {told(forecasts[-1])}",
                    flush=True,
                )
        one, other = (spread_of([each.steps for each in part]) for part in (exact, forecasts))
        inside = sum(other.p5 <= each.steps <= other.p95 for each in exact)
        covered, histories = covered + inside, histories + len(exact)
        medians.append(percent(other.p50, one.p50))
        rows[str(number)] = {
            "exact": [one.p5, one.p50, one.p95],
            "forecast": [other.p5, other.p50, other.p95],
            "inside": inside,
        }
        print(
            f"run {number}: {len(job.stage_of)} slots, {job.stages} stages, {job.microbatches} microbatches:"
            f" by message {one.p5:.1f}, {one.p50:.1f}, {one.p95:.1f} steps, forecast {other.p5:.1f}, {other.p50:.1f}, {other.p95:.1f},"
            f" median {medians[-1]:+.1f} %, {inside} of {len(exact)} inside;"
            f" single seeds {', '.join(f'{each:+.1f}' for each in singles[-args.seeds :])} % ({time.process_time() - began:.0f} s)",
            flush=True,
        )
    apart, single = sorted(map(abs, medians)), sorted(map(abs, singles))
    setting = {
        "worst_percent": round(apart[-1], 2),
        "inside": round(covered / histories, 3),
        "single_seeds": [round(statistics.median(single), 2), round(single[-1], 2)],
        "runs": rows,
    }
    what = "% by which the medians of an hour's steps differ"
    report("forecast_spread", statistics.median(apart), what, at_most(MEDIAN_PERCENT), setting, args.record)


if __name__ == "__main__":
    main()

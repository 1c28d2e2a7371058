"""Steps one step late over eight regions: the forecast beside every message of the same plan, both simulated (docs/internet-tax.md).

    python benchmarks/late_steps.py [--inflight 8,16,32] [--steps 7]

1.3B with 8-bit moments in two stages on configs/internet's machines, all there from the beginning. Seconds of a step: what
the forecaster plays, and the mean of the steps after the second by every message. Value: the largest difference of the forecast.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec
import numpy as np

from report import Target, parse, report
from shoal.forecasting.churn import Presence
from shoal.forecasting.exact import ExactRun

sys.path.insert(0, str(Path(__file__).parent / "papers"))

import remains
import tax

SHAPE, HORIZON_S = "1.3B", 1e6


def seconds(inflight: str, steps: int) -> tuple[float, float]:
    """Of a step: forecast, and by every message."""
    setting = tax.setting_of(SHAPE, f"run.inflight={inflight}")
    problem = msgspec.structs.replace(setting.problem, swapping=False, **remains.LATE_8BIT)
    job, model = tax.modelled(setting, problem, tax.decided(problem, remains.CUTS[SHAPE][1]))
    step = model(np.array(job.stage_of))
    assert step is not None, "a plan serves every stage"
    run = ExactRun(job, [Presence(0.0, slot, True) for slot in range(len(job.stage_of))], 0.0, 0)
    run.play(HORIZON_S, steps=steps)
    times_s = run.watch.commits.times_s
    return step.step_s, (times_s[-1] - times_s[1]) / (len(times_s) - 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inflight", default="8,16,32", help="microbatches of each machine on their way at once")
    parser.add_argument("--steps", type=int, default=7)
    args = parse(parser)
    taken: dict[str, tuple[float, float]] = {}
    for inflight in args.inflight.split(","):
        taken[inflight] = seconds(inflight, args.steps)
        print(
            f"{inflight} on their way: forecast {taken[inflight][0]:.2f} s, every message {taken[inflight][1]:.2f} s",
            flush=True,
        )
    worst = max(100 * abs(forecast_s / exact_s - 1) for forecast_s, exact_s in taken.values())
    unit = "% largest difference of a late step's forecast from every message"
    report("late_steps", worst, unit, Target(None, "lower"), {"seconds": taken}, args.record)


if __name__ == "__main__":
    main()

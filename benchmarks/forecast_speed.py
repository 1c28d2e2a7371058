"""Seconds and memory of a forecast: fleets of several sizes under the recorded spot churn, on one core.

    python benchmarks/forecast_speed.py [--peers 100,1000] [--hours 24]
    python benchmarks/forecast_speed.py --exact --peers 100 --hours 1         # every message

Two kinds of machines in two regions, 32 slots to a stage (8 stages at least), four microbatches of each machine in a step. The exponent is
that of processor seconds over peers, between the smallest and the largest fleet. The last line is one JSON object: processor seconds
of the largest fleet.
"""

from __future__ import annotations

import argparse
import math
import resource
import time
from pathlib import Path

import numpy as np

from report import at_most, parse, report
from shoal.forecasting.churn import Churn, presences
from shoal.forecasting.exact import ExactRun
from shoal.forecasting.forecaster import forecast
from shoal.forecasting.job import Job
from shoal.forecasting.machines import Machines
from shoal.forecasting.models.choice import model_of
from shoal.planner.inputs.cluster import Device
from shoal.planner.prediction.seats import Seats

RECORD = Path(__file__).parents[1] / "configs" / "traces" / "aws-g4dn-spot.csv"
TARGET_S, EXACT_TARGET_S, TARGET_BYTES = 600.0, 120.0, 2e9
START_S = 60.0


def job_of(peers: int) -> Job:
    stages = max(8, peers // 32)
    near = Device(name="", flops=2.0, up_Bps=25e6, down_Bps=25e6, region="east")
    far = Device(name="", flops=1.0, up_Bps=12e6, down_Bps=25e6, region="west")
    delay_s = np.array([[0.02, 0.08], [0.08, 0.02]])
    machines = Machines((near, far), tuple(slot % 2 for slot in range(peers)), delay_s, np.full((2, 2), 1e9))
    stage_of = tuple(slot * stages // peers for slot in range(peers))
    forward_s = np.repeat([[0.2], [0.4]], stages, axis=1)
    own = tuple(float(forward_s[kind, 0]) for kind in machines.kind_of)
    twice = tuple(2 * seconds for seconds in own)
    return Job(
        machines=machines,
        stage_of=stage_of,
        forward_s=forward_s,
        backward_s=2 * forward_s,
        seats=Seats(stage_of, own, twice, (4e7,) * stages, 1e6, 4096.0, 4 * peers, 4),
        state_bytes=(1.2e8,) * stages,
        tokens=2048,
        save_every=10,
    )


def steps_of(job: Job, hours: float, *, exact: bool) -> tuple[int, int]:
    """Steps that are committed, and changes of the fleet."""
    changes = presences(Churn(record=str(RECORD)), job.machines, hours * 3600, 0)
    if not exact:
        model = model_of(job, [changes], START_S, hours * 3600)
        return forecast(job, model, changes, START_S, hours * 3600, 0).steps, len(changes)
    run = ExactRun(job, changes, START_S, 0)
    run.play(hours * 3600)
    return run.history(0, hours * 3600).steps, len(changes)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", default="100,1000", metavar="N,...")
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--exact", action="store_true", help="every message of the peers")
    args = parse(parser)
    sizes = sorted(int(word) for word in args.peers.split(","))
    seconds: dict[int, float] = {}
    for peers in sizes:
        began = time.process_time()
        steps, changes = steps_of(job_of(peers), args.hours, exact=args.exact)
        seconds[peers] = time.process_time() - began
        print(
            f"{peers} peers, {args.hours:g} simulated hours: {seconds[peers]:.1f} s, {changes} changes, {steps} steps",
            flush=True,
        )
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    exponent = (
        math.log(seconds[sizes[-1]] / seconds[sizes[0]]) / math.log(sizes[-1] / sizes[0]) if len(sizes) > 1 else 0
    )
    print(f"exponent {exponent:.2f}; {peak_bytes / 1e6:.0f} MB at most, {TARGET_BYTES / 1e6:.0f} allowed")
    setting = {"hours": args.hours, "seconds": seconds, "exponent": round(exponent, 2), "peak_bytes": peak_bytes}
    unit = f"s of one core, {sizes[-1]} peers for {args.hours:g} simulated hours"
    name, target_s = ("forecast_exact_speed", EXACT_TARGET_S) if args.exact else ("forecast_speed", TARGET_S)
    report(name, seconds[sizes[-1]], unit, at_most(target_s), setting, args.record)


if __name__ == "__main__":
    main()

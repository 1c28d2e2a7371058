"""Long steps of large fleets, which the planner extends from a part of the machines and of the microbatches: against plays of all of both.

    python benchmarks/long_steps.py [--fleets 16] [--first 0]

Fleets are drawn by their seeds: 80 to 300 machines in eight regions, 3 to 16 stages, 10 to 40 microbatches of each machine; of three
in ten the machines are alike. `extended`: all machines, as far as MOST_PLAYED microbatches go, which is how it was until 1 December 2026.
Value: the root mean square of what the planner's seconds of microbatches differ by, in percent.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from unittest import mock

import numpy as np

from report import Target, parse, report
from shoal.planner.inputs.cluster import Cluster, Device, from_matrices
from shoal.planner.prediction import timed
from shoal.planner.prediction.seats import Seats
from shoal.planner.prediction.step import predict

HOPS = 40_000  # of a step, at most: more take minutes to play whole
LEAST_EACH = 6  # microbatches of a machine
REGIONS, ALIKE = 8, 0.3
FORWARD_S, BOUNDARY_BYTES, TOKENS_BYTES = 0.2, 2e6, 4e4


def fleet(seed: int) -> tuple[Seats, Cluster]:
    rng = np.random.default_rng(seed)
    peers, stages = int(rng.integers(80, 300)), int(rng.choice([3, 4, 6, 8, 12, 16]))
    each = max(LEAST_EACH, min(int(rng.choice([10, 16, 24, 40])), HOPS // (peers * stages)))
    alike = rng.random() < ALIKE
    line_Bps = float(rng.choice([4e6, 8e6, 16e6, 32e6]))
    inflight = int(rng.choice([0, 3, 6, 12]))
    slower = np.ones(peers) if alike else rng.uniform(1.0, 1.8, peers)
    wider = np.ones(peers) if alike else rng.uniform(0.6, 1.5, peers)
    stage_of = tuple(int(stage) for stage in rng.permutation(np.arange(peers) * stages // peers))
    devices = tuple(
        Device(name=f"p{i}", flops=1.0, up_Bps=line_Bps * wider[i], down_Bps=1.2 * line_Bps) for i in range(peers)
    )
    regions = rng.integers(0, REGIONS, peers)
    apart = np.abs(regions[:, None] - regions[None, :])
    delay_s = np.where(apart == 0, 0.01, 0.03 + 0.012 * apart)
    seats = Seats(
        stage_of,
        tuple(FORWARD_S * slower),
        tuple(2 * FORWARD_S * slower),
        (0.0,) * stages,
        BOUNDARY_BYTES,
        TOKENS_BYTES,
        each * peers,
        inflight,
    )
    return seats, from_matrices(devices, delay_s, np.full((peers, peers), 1e12))


def microbatches_s(seed: int, **changes: object) -> tuple[float, float]:
    """Of a step, with these names of timed.py changed; and seconds of this processor."""
    seats, cluster = fleet(seed)
    began_s = time.process_time()
    with contextlib.ExitStack() as stack:
        for name, value in changes.items():
            stack.enter_context(mock.patch.object(timed, name, value))
        step = predict(seats, cluster, np.random.default_rng(0))
    return float(step.microbatches_s), time.process_time() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fleets", type=int, default=16)
    parser.add_argument("--first", type=int, default=0, help="seed")
    args = parse(parser)
    rows: dict[str, list[float]] = {}
    for seed in range(args.first, args.first + args.fleets):
        whole_s, whole_cpu_s = microbatches_s(seed, longest=lambda seats: seats.microbatches)
        extended_s, extended_cpu_s = microbatches_s(seed, shown_by=lambda seats: seats.members)
        planned_s, planned_cpu_s = microbatches_s(seed)
        percent = [round(100 * (seconds / whole_s - 1), 1) for seconds in (planned_s, extended_s)]
        cpu_s = [round(seconds, 1) for seconds in (planned_cpu_s, extended_cpu_s, whole_cpu_s)]
        rows[str(seed)] = [round(whole_s, 2), *percent, *cpu_s]
        seats, _ = fleet(seed)
        print(
            f"{seed}: {len(seats.stage_of)} machines, {seats.stages} stages, {seats.microbatches} microbatches:"
            f" {whole_s:.1f} s; {percent[0]:+} %, extended {percent[1]:+} %; {cpu_s} s of a core",
            file=sys.stderr,
            flush=True,
        )
    planned, extended = (math.hypot(*(row[at] for row in rows.values())) / math.sqrt(len(rows)) for at in (1, 2))
    setting = {"extended": extended, "fleets": rows}
    report(
        "long_steps",
        planned,
        "% rms difference of planned microbatches from plays of all",
        Target(None, "lower"),
        setting,
        args.record,
    )


if __name__ == "__main__":
    main()

"""Who is asked first, in the simulator with lines: by turns and the measured time alone, or by what is in progress at each, too.

    python benchmarks/wiring.py [--link 200:50] [--batch 96] [--steps 3] [--seeds 4]
    python benchmarks/wiring.py --geographies 5

The run of benchmarks/hops.py as benchmarks/simulated.py simulates it: six peers in three stages, tensors of 8 MB. Microbatches per second
after the first step, of each seed; with peers that compute alike, and with peers whose speeds are drawn between 1 and 3. The first rule is
core's own with nothing in progress (core/trainer/choice.py). docs/design/2026-11-22-least-loaded.md and 2026-11-23-turns.md say why.

With --geographies: planned wiring instead, in the planner's model. Peers of four regions, whose links are drawn,
serve three or four stages; a step's seconds with each microbatch's replicas near one another, over those with all of them near its owner.

The last line is one JSON object: the middle rate with equal peers and by response time, of the bound that hops.py derives.
"""

from __future__ import annotations

import argparse
import sys
from random import Random

import numpy as np
from msgspec.structs import replace

import hops
import overhead
from report import Target, at_most, parse, report
from shoal import config as configuration
from shoal.core.trainer import choice
from shoal.planner.inputs.cluster import Cluster, Device
from shoal.planner.prediction.seats import Seats
from shoal.planner.prediction.step import predict
from shoal.planner.prediction.wiring import matched, planned
from simulated import case, middle, simulated, words

SPREAD = 3.0  # fastest over slowest


def rates(link: str, batch: int, steps: int, seeds: int, spread: float) -> list[float]:
    config = configuration.load(overhead.LAB, words(link, batch, steps, []))
    found = []
    for seed in range(seeds):
        rng = Random(f"wiring/{seed}")
        speeds = tuple(spread ** rng.uniform(-0.5, 0.5) for _ in range(config.run.peers))
        found.append(batch / simulated(case(config, seed, speeds)))
    return sorted(found)


FLEETS = ((12, 3, 96), (16, 4, 96), (24, 4, 144), (24, 3, 144))  # peers, stages, microbatches


def geographies(seeds: int) -> list[float]:
    """Of every fleet and seed."""
    found = []
    for peers, stages, microbatches in FLEETS:
        for seed in range(seeds):
            rng = np.random.default_rng(seed)
            stage_of = [device % stages for device in range(peers)]
            rng.shuffle(stage_of)
            region = rng.integers(0, 4, peers)
            width_Bps, delay_s = np.exp(rng.uniform(np.log(5e5), np.log(8e6), (4, 4))), rng.uniform(0.02, 0.12, (4, 4))
            width_Bps, delay_s = (width_Bps + width_Bps.T) / 2, (delay_s + delay_s.T) / 2
            np.fill_diagonal(width_Bps, 1e8)
            np.fill_diagonal(delay_s, 0.001)
            devices = tuple(Device(name=f"p{n}", flops=1.0, up_Bps=1e8, down_Bps=1e8) for n in range(peers))
            at = np.ix_(region, region)
            cluster, compute = Cluster(devices, delay_s[at], width_Bps[at]), ((0.2,) * peers, (0.4,) * peers)
            seats = Seats(tuple(stage_of), *compute, (0.0,) * stages, 1e6, 0.0, microbatches, 4)
            routes = planned(seats, cluster)
            near_owner, matching = (
                np.mean(
                    [
                        predict(replace(seats, routes=ways), cluster, np.random.default_rng(draw)).step_s
                        for draw in range(2)
                    ]
                )
                for ways in (routes, matched(seats, cluster, routes))
            )
            found.append(round(float(matching / near_owner), 3))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--link", default="200:50", metavar="MBIT:MS")
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--steps", type=int, default=3, help="the first is not counted")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--geographies", type=int, default=0, metavar="N", help="so many seeds of each fleet")
    asked = parse(parser)
    if asked.geographies:
        found = geographies(asked.geographies)
        told = {"ratios": found, "shorter": sum(x < 0.9995 for x in found), "longer": sum(x > 1.0005 for x in found)}
        report(
            "wiring, neighbours",
            middle(sorted(found)),
            "of the step with replicas near the owner",
            at_most(1.0),
            told,
            asked.record,
        )
        return
    usual, told = choice.in_progress, {}
    for spread in (1.0, SPREAD):
        for rule in ("measured time", "response time"):
            choice.in_progress = usual if rule == "response time" else lambda _: {}
            found = rates(asked.link, asked.batch, asked.steps, asked.seeds, spread)
            told[f"speeds x {spread:g}, {rule}"] = [round(rate, 3) for rate in found]
            print(f"x {spread:g} {rule:<18} {found[0]:.2f} to {found[-1]:.2f}", file=sys.stderr, flush=True)
    choice.in_progress = usual
    config = configuration.load(overhead.LAB, words(asked.link, asked.batch, asked.steps, []))
    value = middle(told["speeds x 1, response time"])
    report(
        "wiring",
        value,
        "microbatches/s, simulated",
        Target(None, "higher"),
        {"link": asked.link, "batch": asked.batch, "bound": hops.bound(config), "rates": told},
        asked.record,
    )


if __name__ == "__main__":
    main()

"""Who is asked first, in the simulator with lines: SWARM's rule alone (least virtual time), or first whoever has least in progress.

    python benchmarks/wiring.py [--link 200:50] [--batch 96] [--steps 3] [--seeds 4]

The run of benchmarks/hops.py as benchmarks/simulated.py simulates it: six peers in three stages, tensors of 8 MB. Microbatches per second
after the first step, of each seed; with peers that compute alike, and with peers whose speeds are drawn between 1 and 3. SWARM's rule is
core's own with nothing in progress (core/choice.py), so that only virtual time is left. docs/design/2026-11-22-least-loaded.md says why.

The last line is one JSON object: the middle rate with direct hops, equal peers and least in progress, of the bound that hops.py derives.
"""

from __future__ import annotations

import argparse
import sys
from random import Random

import hops
import overhead
from report import report
from shoal import config as configuration
from shoal.core import choice
from simulated import case, middle, simulated, words

SPREAD = 3.0  # fastest over slowest


def rates(link: str, how: str, batch: int, steps: int, seeds: int, spread: float) -> list[float]:
    config = configuration.load(overhead.LAB, words(link, how, batch, steps, []))
    found = []
    for seed in range(seeds):
        rng = Random(f"wiring/{seed}")
        speeds = tuple(spread ** rng.uniform(-0.5, 0.5) for _ in range(config.run.peers))
        found.append(batch / simulated(case(config, seed, speeds)))
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--link", default="200:50", metavar="MBIT:MS")
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--steps", type=int, default=3, help="the first is not counted")
    parser.add_argument("--seeds", type=int, default=4)
    asked = parser.parse_args()
    usual, told = choice.in_progress, {}
    for how in ("direct", "owner"):
        for spread in (1.0, SPREAD):
            for rule in ("virtual time", "least in progress"):
                choice.in_progress = usual if rule == "least in progress" else lambda _: {}
                found = rates(asked.link, how, asked.batch, asked.steps, asked.seeds, spread)
                told[f"{how}, speeds x {spread:g}, {rule}"] = [round(rate, 3) for rate in found]
                print(
                    f"{how:<7} x {spread:g} {rule:<18} {found[0]:.2f} to {found[-1]:.2f}", file=sys.stderr, flush=True
                )
    choice.in_progress = usual
    config = configuration.load(overhead.LAB, words(asked.link, "direct", asked.batch, asked.steps, []))
    value = middle(told["direct, speeds x 1, least in progress"])
    report(
        "wiring",
        value,
        "microbatches/s, simulated",
        hops.bound(config),
        {"link": asked.link, "batch": asked.batch, "rates": told},
    )


if __name__ == "__main__":
    main()

"""Our search against the published algorithm on 40 irregular clusters of 8 to 128 devices, at equal evaluations; and how soon
64, 128 and 1000 devices are placed well enough, on one core.

Each cluster comes from a seed: devices at random over the ten AWS regions that DT-FM measured, every link with a factor of its
own (placements.py). An evaluation is as many matchings as pricing one placement takes; ours also refuses up to 200 candidates for each by
a bound, which the published algorithm's own local search may be compared with: seconds of CPU stand beside, and the same with
so small a budget that ours proposes no more candidates than the other evaluates.

    python benchmarks/schedulers.py [evaluations=5000] [cases=40] [longer=10] [clusters=2]

`cases=0` leaves the comparison out, `longer=0` the longer searches of 64 devices; `clusters` are those of each shape of 64.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import numpy as np

from report import at_most, parse, report
from search import irregular, timed
from shoal.planner.costs import communication
from shoal.planner.search import anneal, dtfm, placements

SHAPES = (
    (4, 2),
    (2, 6),
    (4, 4),
    (3, 7),
    (8, 4),
    (4, 8),
    (6, 7),
    (8, 8),
    (16, 4),
    (5, 16),
    (12, 8),
    (8, 16),
    (16, 8),
    (4, 32),
)
FIRST = 1000  # seeds from here on: none that the search was tuned on
QUICK = (  # stages, size, evaluations, seconds allowed
    (8, 8, 15_000, 2.0),
    (16, 4, 14_000, 2.0),
    (4, 16, 70_000, 2.0),
    (8, 16, 12_000, 2.0),
    (10, 100, 400, 20.0),
)
SEEDS = 4  # of the search, wherever it is held against a longer one


def ours(model: communication.Model, evaluations: int, seed: int = 0) -> placements.Found:
    return anneal.anneal(model, np.random.default_rng(seed), evaluations)


def quick(model: communication.Model, evaluations: int, longer: int) -> dict[str, Any]:
    """What so many evaluations find and take; how far above a search `longer` times as long that is, for each of some seeds."""
    runs = [timed(lambda seed=seed: ours(model, evaluations, seed)) for seed in range(SEEDS if longer else 1)]
    told: dict[str, Any] = {"evaluations": evaluations, "cpu_s": [round(took_s, 2) for _, took_s in runs]}
    if longer:
        best, took_s = timed(lambda: ours(model, evaluations * longer, SEEDS))
        told |= {"longer_cpu_s": round(took_s), "longer_s": round(best.cost.total_s, 3)}
        told["above"] = [round(found.cost.total_s / best.cost.total_s - 1, 4) for found, _ in runs]
    return told


def main() -> None:
    asked = {"evaluations": 5000, "cases": 40, "longer": 10, "clusters": 2}
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("settings", nargs="*", metavar="NAME=N", help=", ".join(asked))
    given = parse(parser)
    for word in given.settings:
        name, _, value = word.partition("=")
        asked[name] = int(value)
    budget = asked["evaluations"]
    ours(irregular(1, 8, 8), 300)  # compiles, once per machine
    ratios, seconds, even = [], [0.0, 0.0], []
    for case in range(asked["cases"]):
        stages, size = SHAPES[case % len(SHAPES)]
        model = irregular(FIRST + case, stages, size)
        mine, mine_s = timed(lambda m=model: ours(m, budget))
        theirs, theirs_s = timed(lambda m=model: dtfm.evolve(m, np.random.default_rng(0), budget))
        few = ours(model, max(stages + 1, budget // anneal.PROPOSALS))
        ratios.append(mine.cost.total_s / theirs.cost.total_s)
        even.append(few.cost.total_s / theirs.cost.total_s)
        seconds = [seconds[0] + mine_s, seconds[1] + theirs_s]
        print(
            f"{case:2d}  {stages:2d} x {size:2d}  ours {mine.cost.total_s:7.2f} s in {mine_s:5.2f} s, published"
            f" {theirs.cost.total_s:7.2f} s in {theirs_s:6.2f} s: {ratios[-1]:.3f}; at equal candidates {even[-1]:.3f}",
            flush=True,
        )
    setting = {
        "evaluations": budget,
        "cases": len(ratios),
        "worst_ratio": round(max(ratios, default=0.0), 4),
        "above": sum(ratio > 1 + 1e-9 for ratio in ratios),
        "cpu_s": [round(value, 1) for value in seconds],
        "median_at_equal_candidates": round(statistics.median(even), 4) if even else None,
    }
    if ratios:
        median, unit = statistics.median(ratios), "of the published algorithm's cost, median"
        report("schedulers", median, unit, at_most(0.9), setting, given.record)
    above, setting = [], {}
    for stages, size, evaluations, allowed_s in QUICK:
        for cluster in range(FIRST, FIRST + (asked["clusters"] if stages * size == 64 else 1)):
            told = quick(irregular(cluster, stages, size), evaluations, asked["longer"] if stages * size == 64 else 0)
            name = f"{stages} x {size}, cluster {cluster}"
            print(f"{name}: {told} ({allowed_s} s allowed)", flush=True)
            setting[name] = told
            above += told.get("above", [])
    if above:
        setting["mean"] = round(statistics.mean(above), 4)
        unit = f"% above a search {asked['longer']} times as long"
        report("schedulers, quick", 100 * max(above), unit, at_most(2), setting, given.record)


if __name__ == "__main__":
    main()

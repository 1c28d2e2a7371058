"""Our search against the published algorithm on 40 irregular clusters of 8 to 128 devices, at equal evaluations; and how soon
64, 128 and 1000 devices are placed well enough, on one core.

Each cluster comes from a seed: devices at random over the ten AWS regions that DT-FM measured, every link with a factor of its
own (search.py). An evaluation is as many matchings as pricing one placement takes; ours also refuses up to 200 candidates for each by
a bound, which the published algorithm's own local search may be compared with: seconds of CPU stand beside, and the same with
so small a budget that ours proposes no more candidates than the other evaluates.

    python benchmarks/schedulers.py [evaluations=5000] [cases=40] [longer=100]
"""

from __future__ import annotations

import statistics
import sys

import numpy as np

from report import report
from search import irregular, timed
from shoal.planner import anneal, cost, dtfm, search

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
QUICK = (
    (8, 8, 15_000, 2.0),
    (8, 16, 12_000, 2.0),
    (10, 100, 1000, 20.0),
)  # stages, size, evaluations, seconds allowed


def ours(model: cost.Model, evaluations: int, seed: int = 0) -> search.Found:
    return anneal.anneal(model, np.random.default_rng(seed), evaluations)


def main() -> None:
    asked = {"evaluations": 5000, "cases": 40, "longer": 100}
    for word in sys.argv[1:]:
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
        "worst_ratio": round(max(ratios), 4),
        "above": sum(ratio > 1 + 1e-9 for ratio in ratios),
        "cpu_s": [round(value, 1) for value in seconds],
        "median_at_equal_candidates": round(statistics.median(even), 4),
    }
    for stages, size, evaluations, allowed_s in QUICK:
        model = irregular(FIRST, stages, size)
        found, took_s = timed(lambda m=model, n=evaluations: ours(m, n))
        name = f"{stages * size} devices"
        print(
            f"{name}: {found.cost.total_s:.3f} s an iteration in {took_s:.2f} s of CPU ({allowed_s} allowed)",
            flush=True,
        )
        setting[f"{name}, cpu_s"] = round(took_s, 2)
        if stages * size == 64 and asked["longer"]:
            longer, longer_s = timed(lambda m=model, n=evaluations: ours(m, n * asked["longer"], seed=1))
            gap = found.cost.total_s / longer.cost.total_s - 1
            print(
                f"  {asked['longer']} times as many: {longer.cost.total_s:.3f} s in {longer_s:.0f} s, {gap:+.2%}",
                flush=True,
            )
            setting["64 devices above a longer search"] = round(gap, 4)
    report("planner.schedulers", statistics.median(ratios), "of the published algorithm's cost, median", 0.9, setting)


if __name__ == "__main__":
    main()

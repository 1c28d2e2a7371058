"""How long the search for a placement takes and what it finds: 64, 128 and 1000 devices, DT-FM's cost model, one core.

Clusters are irregular: devices at random over the ten AWS regions that DT-FM measured, every link with a factor of its own,
from a seed. The published cases are too regular to tell searches apart (a rule of greedy.py is optimal on all five).
Random and greedy placements, and the published algorithm at equal evaluations, stand beside ours. The last line is ours
at 64 devices against the published algorithm: its cost over ours.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from report import at_least, parse, report
from shoal.planner.costs import communication
from shoal.planner.inputs import cluster
from shoal.planner.search import anneal, dtfm, greedy, placements

SHAPES = ((8, 8, 5000), (8, 16, 5000), (10, 100, 1000))  # stages, devices per stage, evaluations
SEED = 1


def irregular(seed: int, stages: int, size: int) -> communication.Model:
    rng = np.random.default_rng(seed)
    delay_s, bandwidth_Bps, _ = cluster.read_matrices(cluster.network("aws10"))
    at = rng.choice(10, size=stages * size, p=rng.dirichlet(np.ones(10)))
    noise = [np.exp(rng.normal(0, 0.25, (len(at), len(at)))) for _ in range(2)]
    noise = [np.sqrt(values * values.T) for values in noise]
    here = np.ix_(at, at)
    return communication.Model(
        delay_s[here] * noise[0], bandwidth_Bps[here] * noise[1], stages, communication.PUBLISHED
    )


def timed(find: Callable[[], placements.Found]) -> tuple[placements.Found, float]:
    before = time.process_time()  # of this process: others on the machine do not count
    found = find()
    return found, time.process_time() - before


def main() -> None:
    asked = parse(argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]))
    gain, setting = 0.0, {}
    for stages, size, budget in SHAPES:
        model = irregular(SEED, stages, size)
        searches: dict[str, Callable[[], placements.Found]] = {
            "anneal": lambda m=model, b=budget: anneal.anneal(m, np.random.default_rng(SEED), b),
            "greedy": lambda m=model: greedy.greedy_search(m),
            "random": lambda m=model, b=budget: placements.random_search(m, np.random.default_rng(SEED), b),
        }
        if stages * size <= 64:
            searches["dtfm"] = lambda m=model, b=budget: dtfm.evolve(m, np.random.default_rng(SEED), b)
        if stages * size > 64:
            searches.pop("random")  # exact matchings of 100 x 100 each time: minutes
        print(
            f"{stages * size} devices, {stages} stages, {budget} evaluations; nothing below {model.lower_bound_s():.2f} s"
        )
        for name, find in searches.items():
            found, seconds = timed(find)
            print(f"  {name:<7} {found.cost.total_s:8.2f} s an iteration, found in {seconds:6.2f} s")
            if stages * size == 64:
                setting[f"{name}_cost_s"], setting[f"{name}_cpu_s"] = round(found.cost.total_s, 3), round(seconds, 2)
                gain = found.cost.total_s / setting["anneal_cost_s"] if name == "dtfm" else gain
    setting |= {"devices": 64, "stages": 8, "evaluations": SHAPES[0][2], "seed": SEED}
    report("search", gain, "x, the published algorithm's cost over ours", at_least(1.0), setting, asked.record)


if __name__ == "__main__":
    main()

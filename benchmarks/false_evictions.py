"""How often does a simulated run without liars evict an honest peer, and for what?

    python benchmarks/false_evictions.py [--scenarios fleet,unlike,...] [--seeds 0:50] [--jobs 1] [--minutes 10]

Every scenario has its own faults: processes that die, stop, are cut off, become slow or full, links that lose and delay messages. Counted
is every process that the run removed while it lived and had not asked to leave. `disturbed`: a fault had its hands on it within the last
30 s (stopped, cut off from whoever leads, ten times slower, its messages garbled, other bits in its optimizer), so that the others may
miss it by right.
`honest`: none had; beside lost and delayed messages, which every peer has. `convicted`: for what it did, so that it is also barred
for a while, not only for silence. Printed of each scenario, and of each cause its number and one seed to play again. The last line is
one JSON object: honest peers evicted, in per cent of all processes that took part; the target is 0.1.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import msgspec

from report import at_most, parse, report
from shoal.sim.faults.removals import Removed, WatchedSwarm
from shoal.sim.scenarios.catalogue import load
from shoal.sim.scenarios.drawing import draw

SCENARIOS = ("fleet", "unlike", "slowed", "lines", "unlike_lines", "chaos", "large_group", "counted")


class Played(msgspec.Struct):
    scenario: str
    seed: int
    processes: int
    removed: list[Removed]
    violations: tuple[str, ...]


def cause_of(why: str) -> str:
    """Without names and numbers."""
    return re.sub(r"\d+(\.\d+)?", "N", re.sub(r"p\d+\.\d+", "P", why))[:110]


def play(given: tuple[str, int]) -> Played:
    name, seed = given
    swarm = WatchedSwarm(draw(load(name), seed))
    outcome = swarm.run()
    processes = max(len(swarm.known), swarm.case.peers)
    return Played(name, seed, processes, swarm.removed, tuple(map(str, outcome.violations)))


def played(scenarios: list[str], seeds: range, jobs: int, until_s: float) -> Iterator[Played]:
    """Seed by seed through all scenarios, until the time is over."""
    work = [(name, seed) for seed in seeds for name in scenarios]
    with ProcessPoolExecutor(jobs) as pool:
        for first in range(0, len(work), jobs):
            if time.monotonic() > until_s:
                return
            yield from pool.map(play, work[first : first + jobs])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scenarios", default=",".join(SCENARIOS), metavar="A,B")
    parser.add_argument("--seeds", default="0:50", metavar="A:B")
    parser.add_argument("--jobs", type=int, default=1, help="seeds played at once")
    parser.add_argument("--minutes", type=float, default=60.0, help="no seed is begun after so many")
    given = parse(parser)
    first, end = map(int, given.seeds.split(":"))
    runs, processes, kinds, broken = Counter[str](), Counter[str](), Counter[tuple[str, str]](), list[str]()
    causes, example = Counter[tuple[str, str]](), dict[tuple[str, str], str]()
    until_s = time.monotonic() + 60.0 * given.minutes
    for one in played(given.scenarios.split(","), range(first, end), given.jobs, until_s):
        runs[one.scenario] += 1
        processes[one.scenario] += one.processes
        rerun = f"shoal simulate {one.scenario} seed={one.seed}"
        broken += [rerun] * bool(one.violations)
        for removed in one.removed:
            who = f"{'disturbed' if removed.disturbed else 'honest'}, {'convicted' if removed.convicted else 'silent'}"
            kinds[one.scenario, who] += 1
            causes[who, cause_of(removed.why)] += 1
            example.setdefault((who, cause_of(removed.why)), f"{rerun}, {removed.at_s:.0f} s, {removed.peer}")
            if who == "honest, convicted":
                print(f"{rerun}, {removed.at_s:.1f} s: {removed.why[:300]}", flush=True)
    classes = ("honest, convicted", "honest, silent", "disturbed, convicted", "disturbed, silent")
    print(f"{'scenario':14} {'runs':>5} {'processes':>9}  {'   '.join(classes)}")
    for name in runs:
        counts = "   ".join(f"{kinds[name, of]:{len(of)}}" for of in classes)
        print(f"{name:14} {runs[name]:5} {processes[name]:9}  {counts}")
    for (who, cause), count in causes.most_common():
        if who.startswith("honest") or "convicted" in who:
            print(f"{count:5} {who}: {cause} ({example[who, cause]})")
    total = sum(processes.values())
    honest = sum(count for (_, who), count in kinds.items() if who.startswith("honest"))
    setting = {
        "runs": dict(runs), "processes": total, "broken": broken,
        "removed": {who: sum(count for (_, of), count in kinds.items() if of == who) for who in classes},
    }  # fmt: skip
    report("false evictions", 100.0 * honest / max(1, total), "% of processes", at_most(0.1), setting, given.record)
    return 0 if 1000 * honest <= total and not broken else 1


if __name__ == "__main__":
    sys.exit(main())

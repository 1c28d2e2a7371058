"""How often does a simulated run without liars evict an honest peer, and for what?

    python benchmarks/false_evictions.py [--scenarios fleet,unlike,...] [--seeds 0:50] [--jobs 1] [--minutes 10]

Every scenario has its own faults: processes that die, stop, are cut off, become slow or full, links that lose and delay messages. Counted
is every process that the run removed while it lived and had not asked to leave. `disturbed`: a fault had its hands on it within the last
RECENT_S (stopped, cut off from whoever leads, ten times slower, its messages garbled, other bits in its optimizer), so that the others may
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
from shoal.core.messages import Peer, View
from shoal.sim.node import Node
from shoal.sim.scenarios.catalogue import load
from shoal.sim.scenarios.drawing import draw
from shoal.sim.scenarios.scenario import Case
from shoal.sim.swarm import Swarm

SCENARIOS = ("fleet", "unlike", "slowed", "lines", "unlike_lines", "chaos", "large_group", "counted")
RECENT_S, LOOK_S = 30.0, 0.5


class Removed(msgspec.Struct):
    """A process that lived: who, when, why."""

    peer: Peer
    at_s: float
    disturbed: bool
    convicted: bool
    why: str


class Played(msgspec.Struct):
    scenario: str
    seed: int
    processes: int
    removed: list[Removed]
    violations: tuple[str, ...]


class Watched(Swarm):
    """Writes down who is removed while it lives."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.disturbed_s: dict[Peer, float] = {}
        self.known: dict[Peer, Node] = {}
        self.removed: list[Removed] = []
        self.newest: View | None = None
        self.kernel.after(LOOK_S, self._look)

    def _look(self, _: object) -> None:
        leading = [name for name, node in self.nodes.items() if node.machine.leading]
        for pair in self.network.cut:
            if pair[0] in leading or pair[1] in leading:
                self.disturbed_s.update(dict.fromkeys((one for one in pair if one not in leading), self.kernel.now))
        for name, node in self.nodes.items():
            self.known[name] = node
            if self._disturbed(node):
                self.disturbed_s[name] = self.kernel.now
        self.kernel.after(LOOK_S, self._look)

    def _disturbed(self, node: Node) -> bool:
        condition = node.condition
        return not node.available or condition.slow or condition.leaving or condition.lies > 0.0

    def agreed(self, node: Node, view: View) -> None:
        before = self.newest
        if before is None or view.number > before.number:
            self.newest = view
            if before is not None and not view.finished and view.epoch == before.epoch:
                self._compare(before, view)
        super().agreed(node, view)

    def _compare(self, before: View, view: View) -> None:
        gone = {one.peer for one in before.members + before.joining} - {one.peer for one in view.members + view.joining}
        times = [{one.key: one.times for one in of.evicted} for of in (before, view)]
        for peer in sorted(gone):
            node = self.nodes.get(peer)
            if node is None or not node.lives or node.condition.leaving:
                continue
            disturbed = self._disturbed(node) or self.kernel.now - self.disturbed_s.get(peer, -RECENT_S) < RECENT_S
            key = peer.partition(".")[0]
            convicted = times[1].get(key, 0) > times[0].get(key, 0)
            self.removed.append(Removed(peer, self.kernel.now, disturbed, convicted, why_of(peer, view.reason)))


def why_of(peer: Peer, reason: str) -> str:
    """What a view's reason says of that peer."""
    return next((part for part in reason.split("; ") if part.startswith(peer)), reason)


def cause_of(why: str) -> str:
    """Without names and numbers."""
    return re.sub(r"\d+(\.\d+)?", "N", re.sub(r"p\d+\.\d+", "P", why))[:110]


def play(given: tuple[str, int]) -> Played:
    name, seed = given
    swarm = Watched(draw(load(name), seed))
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

"""Audited steps among simulated peers: after how many steps is who computes wrongly evicted, is an honest peer ever, and what do they cost?

    python benchmarks/audits_simulated.py [--kinds noise,invent,poison,lazy] [--seeds 0:6] [--steps 50] [--share 0.1] [--jobs 1] [--trusted]
    python benchmarks/audits_simulated.py --honest [--seeds 0:50] [--minutes 600]   # nobody lies: who is convicted?
    python benchmarks/audits_simulated.py --cost [--seeds 0:4]         # steps without audits, at full trust, and while all are new

The machines are those of real peers (core/), the network and the clock are simulated. Three stages; one and two of six peers lie, in groups
of two, and one and three of nine, in groups of three. The liars are members that found no run and lie from the first step on; they are
honest while no honest peer serves their stage, and while they lead: those that ever did, and were not evicted, are left out. In every
other seed messages are lost and late, tasks fail, a peer dies and comes back, one joins, one stops for a while and one becomes slow.
Without liars every other machine is unlike the others: what it computes differs by 1e-4. `noise` sends other tensors than it has made,
`invent` believes them as well, `poison` adds something else to its gradient sum and sends what is right, `lazy` computes no backward.
Steps are counted from the first lie. `--trusted`: the founder, who leads first, trusts all
replicas as after very many audits that they have passed; whoever leads after it trusts nobody yet, as any new leader. Rows:
kind, peers, liars that have lied, those evicted within --steps steps, the median and the most of these, and honest peers that were
evicted. The last line is one JSON object: the share evicted in time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product

import msgspec

from liars_simulated import LOOK_S, Timed, case_of
from report import Target, parse, report
from shoal.core.leader.evidence import Evidence
from shoal.core.messages import Peer, Settings, View
from shoal.sim.node import Node
from shoal.sim.processes import Processes
from shoal.sim.scenarios.scenario import Case, Happenings, Messages

SIZES = ((6, 1), (6, 2), (9, 1), (9, 3))
FAULTS = Happenings(restarts=1, joiners=1, pauses=1, slows=1)
LOSSES = Messages(drop=0.01, delay=0.01, fail=0.01)
FAULTS_S, MOST_S = 30.0, 120.0  # simulated
MORE = 10  # steps, for liars that begin later
TOLD = 20  # runs
PASSED = 10**6  # audits, of a replica that is trusted
COSTS = {
    "none": (0.0, 0),
    "full trust": (0.1, PASSED),
    "all new": (0.1, 0),
}  # share of a new replica, audits that all have passed


class Job(msgspec.Struct, frozen=True):
    """One run; `kind`: of its liars, "" where there are none. `passed`: audits that the founder believes all to have passed."""

    kind: str
    peers: int
    liars: int
    seed: int
    share: float
    steps: int
    faults: bool = True
    passed: int = 0
    stays: bool = False


BEGIN, FOUNDER = Evidence.__init__, "p0.0"


class Trust(Counter[str]):
    """Audits that each key has passed: of whom nothing is known, `passed`. `stays`: whatever audits show."""

    def __init__(self, passed: int, stays: bool) -> None:
        super().__init__()
        self._given, self._stays = passed, stays

    def __missing__(self, key: str) -> int:
        return self._given

    def __setitem__(self, key: str, value: int) -> None:
        if not self._stays:
            super().__setitem__(key, value)


class Played(msgspec.Struct):
    lied: int = 0
    steps: tuple[int, ...] = ()  # committed until each liar that was evicted in time was
    kept: tuple[str, ...] = ()  # liars that were not
    wronged: tuple[str, ...] = ()
    violations: tuple[str, ...] = ()
    committed: int = 0


class Watched(Timed):
    """Ends when all liars that have lied are evicted, or so many steps are committed."""

    def __init__(self, case: Case, seconds: float, steps: int, unlike: bool) -> None:
        super().__init__(case, seconds)
        self.most = steps
        self.led: set[int] = set()
        if unlike:
            self._make_unlike(self.processes)

    def _make_unlike(self, processes: Processes) -> None:
        really = processes.boot

        def boot(identity: tuple[int, int]) -> None:
            really(identity)
            node: Node | None = processes.nodes.get(f"p{identity[0]}.{identity[1]}")
            if node is not None and identity[0] % 2:
                node.runner.oddities.rounding = 1e-4

        processes.boot = boot  # type: ignore[method-assign]

    def _look(self, given: object) -> None:
        super()._look(given)
        self.led |= {node.process.key for node in self.nodes.values() if node.machine.leading}
        liars = self.strangers
        lied = liars.lied_s.keys() if liars is not None and len(liars.lied_s) == len(self.case.hostile) else ()
        out = lied and liars is not None and lied <= liars.evicted.keys()
        if out or self.commits[-1] >= self.most + MORE * bool(self.case.hostile):
            self.kernel.stop()


def case(kind: str, peers: int, liars: int, seed: int, share: float, faults: bool) -> Case:
    of = case_of(kind, peers, liars, seed)
    of = msgspec.structs.replace(of, settings=msgspec.structs.replace(of.settings, spot_checks=share))
    if not faults:
        return of
    scenario = msgspec.structs.replace(of.scenario, faults_s=FAULTS_S)
    return msgspec.structs.replace(of, scenario=scenario, messages=LOSSES, happenings=FAULTS)


def believe(passed: int, stays: bool) -> None:
    """The founder of every simulation of this process from now on, while it leads."""

    def begin(evidence: Evidence, name: Peer, settings: Settings, chance: Callable[[], float]) -> None:
        BEGIN(evidence, name, settings, chance)
        if name == FOUNDER:
            evidence.audits._passed = Trust(passed, stays)

    Evidence.__init__ = begin  # type: ignore[method-assign]


def play(given: Job) -> Played:
    kind, peers, liars, seed = given.kind, given.peers, given.liars, given.seed
    share, steps, faults = given.share, given.steps, given.faults
    believe(given.passed, given.stays)
    swarm = Watched(case(kind, peers, liars, seed, share, faults and seed % 2 == 1), MOST_S, steps, not kind)
    swarm.play()
    strangers = swarm.strangers
    if strangers is None or not kind:
        return Played(
            wronged=tuple(f"{peers} peers, seed {seed}: {why}" for why in convictions(views(swarm))),
            violations=tuple(map(str, swarm.watch.violations)),
            committed=swarm.commits[-1],
        )
    began_s = swarm.context.timeline.began_s or 0.0
    lied = {who: at(swarm.commits, when - began_s) for who, when in strangers.lied_s.items()}
    out = {who: at(swarm.commits, strangers.evicted[who][0]) for who in lied if who in strangers.evicted}
    leads = {str(one) for one in swarm.case.hostile if one.key in swarm.led}  # whoever leads is honest
    lied = {who: step for who, step in lied.items() if who in out or who not in leads}
    return Played(
        len(lied),
        tuple(out[who] - lied[who] for who in out if out[who] - lied[who] <= steps),
        tuple(f"{who}, lies since step {step}" for who, step in lied.items() if who not in out),
        tuple(strangers.wronged),
        tuple(map(str, swarm.watch.violations)),
        swarm.commits[-1],
    )


def views(swarm: Timed) -> list[View]:
    return sorted(swarm.watch._views.values(), key=lambda view: view.number)


def convictions(known: list[View]) -> list[str]:
    """Why each was evicted, once: a view names those that are barred as long as they are."""
    found, before = [], dict[str, int]()
    for view in known:
        times = {one.key: one.times for one in view.evicted}
        found += [view.reason for key in times if times[key] > before.get(key, 0)]
        before |= times
    return found


def at(commits: list[int], seconds: float) -> int:
    return commits[min(int(seconds / LOOK_S), len(commits) - 1)]


def show(rows: list[Played], what: str) -> tuple[int, int, int]:
    lied, steps = sum(one.lied for one in rows), sorted(step for one in rows for step in one.steps)
    wronged = sum(len(one.wronged) for one in rows)
    median, most = (statistics.median(steps), steps[-1]) if steps else (0, 0)
    print(f"{what:22} {lied:6} {len(steps):8} {median:7.0f} {most:5} {wronged:7}", flush=True)
    for number, one in enumerate(rows):
        for text in (*one.kept, *one.wronged, *one.violations[:2]):
            print(f"    run {number}: {text[:300]}", flush=True)
    return lied, len(steps), wronged


def played(pool: ProcessPoolExecutor, work: list[Job], jobs: int, until_s: float) -> Iterator[Played]:
    """In their order, until the time is over; the sum so far every now and then."""
    wronged = 0
    for first in range(0, len(work), jobs):
        if time.monotonic() > until_s:
            return
        for one in pool.map(play, work[first : first + jobs]):
            wronged += len(one.wronged) + len(one.violations)
            for text in (*one.wronged, *one.violations[:2]):
                print(text[:600], flush=True)
            yield one
        if (first + jobs) % TOLD < jobs:
            print(f"{first + jobs} runs, convicted or broken: {wronged}", flush=True)


def costs(pool: ProcessPoolExecutor, seeds: range) -> dict[str, int]:
    """Steps in MOST_S of an undisturbed run, by what leaders trust their replicas; it stays so."""
    total = {}
    for what, (share, passed) in COSTS.items():
        work = [Job("", peers, 0, seed, share, 10**6, False, passed, True) for peers in (6, 9) for seed in seeds]
        total[what] = sum(one.committed for one in pool.map(play, work))
        print(f"{what:10} {total[what]} steps, {1 - total[what] / total['none']:.1%} fewer", flush=True)
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", default="noise,invent,poison,lazy", metavar="A,B")
    parser.add_argument("--seeds", default="0:6", metavar="A:B")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--share", type=float, default=0.1, help="run.spot_checks")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=600.0, help="with --honest: no run is begun after so many")
    parser.add_argument("--honest", action="store_true", help="nobody lies")
    parser.add_argument("--trusted", action="store_true", help="the first leader trusts all replicas fully")
    parser.add_argument("--cost", action="store_true", help="count the steps of undisturbed runs")
    given = parse(parser)
    seeds, passed = range(*map(int, given.seeds.split(":"))), PASSED if given.trusted else 0
    with ProcessPoolExecutor(given.jobs) as pool:
        if given.cost:
            steps = costs(pool, seeds)
            loss = 1.0 - steps["full trust"] / steps["none"]
            report("cost of audits", loss, "of the steps, at full trust", Target(0.05, "lower"), steps, given.record)
            return 0
        print(f"{'kind':22} {'lied':>6} {'in time':>8} {'median':>7} {'most':>5} {'wronged':>7}", flush=True)
        if given.honest:
            work = [Job("", peers, 0, s, given.share, given.steps, passed=passed) for s in seeds for peers in (6, 9)]
            rows = list(played(pool, work, given.jobs, time.monotonic() + 60.0 * given.minutes))
            wronged = show(rows, "honest")[2]
            report("convicted", wronged, "honest peers", Target(0.0, "lower"), {"runs": len(rows)}, given.record)
            return 0
        lied = found = 0
        for kind, (peers, liars) in product(given.kinds.split(","), SIZES):
            work = [Job(kind, peers, liars, s, given.share, given.steps, passed=passed) for s in seeds]
            rows = list(pool.map(play, work))
            counted = show(rows, f"{kind}, {liars} of {peers}")
            lied, found = lied + counted[0], found + counted[1]
    report(
        "liars evicted",
        found / max(1, lied),
        "of those that lied",
        Target(0.99, "higher"),
        {"liars": lied},
        given.record,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

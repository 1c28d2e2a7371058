"""Audited steps among simulated peers: after how many steps is who computes wrongly evicted, is an honest peer ever, and what do they cost?

    python benchmarks/audits_simulated.py [--kinds noise,invent,poison,lazy] [--seeds 0:6] [--steps 50] [--share 0.1] [--jobs 1]
    python benchmarks/audits_simulated.py --honest [--seeds 0:50] [--minutes 600]   # nobody lies: who is convicted?
    python benchmarks/audits_simulated.py --cost [--seeds 0:4]         # steps in 60 s without audits, at 1 %, 10 % and 100 %

The machines are those of real peers (core/), the network and the clock are simulated. Three stages; one and two of six peers lie, in groups
of two, and one and three of nine, in groups of three. The liars are members that found no run and lie from the first step on; they are
honest while they lead, and while no honest peer serves their stage. In every other seed messages are lost and late, tasks fail, a peer
dies and comes back, one joins, one stops for a while and one becomes slow. Without liars every other machine is unlike the others: what it
computes differs by 1e-4. `noise` sends other tensors than it has made, `invent` believes them as well, `poison` adds something else to its
gradient sum and sends what is right, `lazy` computes no backward. Steps are counted from the first lie. Rows: kind, peers, liars that have
lied, those evicted within --steps steps, the median and the most of these, and honest peers that were evicted. The last line is one JSON
object: the share evicted in time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product

import msgspec

from liars_simulated import LOOK_S, Timed, case_of
from report import Target, parse, report
from shoal.core.messages import View
from shoal.sim.node import Node
from shoal.sim.processes import Processes
from shoal.sim.scenarios.scenario import Case, Happenings, Messages

SIZES = ((6, 1), (6, 2), (9, 1), (9, 3))
FAULTS = Happenings(restarts=1, joiners=1, pauses=1, slows=1)
LOSSES = Messages(drop=0.01, delay=0.01, fail=0.01)
FAULTS_S, MOST_S = 30.0, 120.0  # simulated
MORE = 10  # steps, for liars that begin later
TOLD = 20  # runs
SHARES = (0.0, 0.01, 0.1, 1.0)


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


def play(given: tuple[str, int, int, int, float, int, bool]) -> Played:
    kind, peers, liars, seed, share, steps, faults = given
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


def played(
    pool: ProcessPoolExecutor, work: list[tuple[str, int, int, int, float, int, bool]], jobs: int, until_s: float
) -> Iterator[Played]:
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
    """Steps in MOST_S of an undisturbed run, by share of audited steps, which does not fall: trust is kept from being earned."""
    total = {}
    for share in SHARES:
        work = [("", peers, 0, seed, share, 10**6, False) for peers in (6, 9) for seed in seeds]
        total[f"{share:.0%}"] = sum(one.committed for one in pool.map(play, work))
        print(f"{share:5.0%} {total[f'{share:.0%}']} steps", flush=True)
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
    parser.add_argument("--cost", action="store_true", help="count the steps of undisturbed runs")
    given = parse(parser)
    seeds = range(*map(int, given.seeds.split(":")))
    with ProcessPoolExecutor(given.jobs) as pool:
        if given.cost:
            steps = costs(pool, seeds)
            loss = 1.0 - steps["1%"] / steps["0%"]
            report("cost of audits", loss, "of the steps, at 1 %", Target(0.05, "lower"), steps, given.record)
            return 0
        print(f"{'kind':22} {'lied':>6} {'in time':>8} {'median':>7} {'most':>5} {'wronged':>7}", flush=True)
        if given.honest:
            work = [("", peers, 0, s, given.share, given.steps, True) for s in seeds for peers in (6, 9)]
            rows = list(played(pool, work, given.jobs, time.monotonic() + 60.0 * given.minutes))
            wronged = show(rows, "honest")[2]
            report("convicted", wronged, "honest peers", Target(0.0, "lower"), {"runs": len(rows)}, given.record)
            return 0
        lied = found = 0
        for kind, (peers, liars) in product(given.kinds.split(","), SIZES):
            rows = list(pool.map(play, [(kind, peers, liars, s, given.share, given.steps, True) for s in seeds]))
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

"""Liars among simulated peers: what each kind costs, alone or several together, and what honest peers suffer for it.

    python benchmarks/liars_simulated.py [--kinds withhold,held,...] [--peers 6] [--liars 1] [--seconds 60] [--seeds 0:2] [--jobs 1]

The machines are those of real peers (core/), the network and the clock are simulated, so that the figures do not depend on what else this
machine does. Three stages of equal peers on a quick network, the settings that a run has by default, a step of about 0.3 s. The liars are
members that found no run and lie from the first step on, all in the same way; `mixed`: each in a way of its own. They are honest while
they lead, and while no honest peer serves their stage. Printed of each kind, over all seeds: steps as a share of the honest run's, the
same for the last half of the time, seconds until the first and the last liar was evicted first and the steps that were committed until
the first was, how often liars and how often honest peers were (or had to download their state again). `--markdown`: rows of a table
instead. The last line is one JSON object: the smallest share.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from random import Random

import msgspec

from report import Target, parse, report
from shoal.core.messages import Settings
from shoal.sim.faults.hostile import Hostile
from shoal.sim.scenarios.drawing import draw
from shoal.sim.scenarios.scenario import Case, Scenario
from shoal.sim.swarm import Swarm

STAGES, STEP_S, SPOT_CHECKS = 3, 0.3, 0.1
LOOK_S = 0.25
MIXED = ("withhold", "held", "missing", "gone", "mute", "digest", "coming", "idle")
KINDS = (
    "withhold", "held", "missing", "refuse", "busy", "soon", "idle", "wander", "coming", "gone", "mute", "rate", "delay",
    "sums", "norm", "digest", "wrong", "noise", "invent", "poison", "lazy",
    "overflow", "books", "far", "complain", "culprit", "waits", "unable", "mixed",
)  # fmt: skip


class Played(msgspec.Struct):
    """One kind and seed. Steps of the whole time and of its last half; seconds from the first step."""

    steps: int
    late: int
    evicted_s: tuple[float, ...]  # of each liar that was evicted: the first time
    until: int  # steps committed until the first of them
    evictions: int
    wronged: tuple[str, ...]
    violations: tuple[str, ...]


class Timed(Swarm):
    """Plays for `seconds` from the first step on."""

    def __init__(self, case: Case, seconds: float) -> None:
        super().__init__(case)
        self.seconds, self.at_half = seconds, 0
        self.commits: list[int] = []  # at every LOOK_S from the first step on

    def _begin_faults(self) -> None:
        super()._begin_faults()
        self._look(None)
        self.kernel.after(self.seconds / 2, self._half)
        self.kernel.after(self.seconds, lambda _: self.kernel.stop())

    def _look(self, _: object) -> None:
        self.commits.append(len(self.watch.commits.known))
        self.kernel.after(LOOK_S, self._look)

    def _half(self, _: object) -> None:
        self.at_half = len(self.watch.commits.known)

    def play(self) -> Played:
        rng = self.case.rng("boot")
        self.boot((0, 0))
        for key in range(1, self.case.peers):
            self.kernel.at(rng.uniform(0.0, 2.0), self.boot, (key, 0))
        self.kernel.run(until=float("inf"), events=self.case.scenario.events)
        assert self.context.timeline.began_s is not None, "the run did not begin"
        steps, liars = len(self.watch.commits.known), self.strangers
        evicted = liars.evicted if liars is not None else {}
        first = tuple(after[0] for after in evicted.values())
        return Played(
            steps,
            steps - self.at_half,
            first,
            self.commits[min(int(min(first) / LOOK_S), len(self.commits) - 1)] if first else steps,
            sum(map(len, evicted.values())),
            tuple(liars.wronged) if liars is not None else (),
            tuple(str(one) for one in self.watch.violations),
        )


def case_of(kind: str, peers: int, liars: int, seed: int) -> Case:
    scenario = Scenario(
        name=f"liars/{peers}",
        peers=(peers, peers),
        stages=(STAGES, STAGES),
        steps=(100_000, 100_000),
        microbatches=(max(16, peers), max(16, peers)),
        step_s=STEP_S,
        spread=1.3,
        delay_s=(0.0002, 0.002),
        bandwidth_Bps=(1e8, 1e9),
        save_every=(0, 0),
        faults_s=1e6,
        events=200_000_000,
    )
    case = draw(scenario, seed)
    settings = Settings(
        stages=STAGES,
        microbatches=case.settings.microbatches,
        steps=100_000,
        peers=peers,
        inflight=4,
        save_every=0,
        heartbeat_s=0.5,
        heartbeat_timeout_s=4.0,
        min_request_timeout_s=2.0,
        ready_timeout_s=30.0,
        spot_checks=SPOT_CHECKS,
    )
    keys = sorted(Random(f"liars/{seed}").sample(range(1, peers), liars)) if kind else []
    acts = [MIXED[(seed + at) % len(MIXED)] if kind == "mixed" else kind for at in range(len(keys))]
    hostile = tuple(Hostile(key, "member", tuple(act.split("+")), 0.0) for key, act in zip(keys, acts, strict=True))
    return msgspec.structs.replace(
        case,
        settings=settings,
        hostile=hostile,
        rounds=1.0,
        states=1.0,
        speeds=tuple(case.speeds),
        nonfinite=frozenset(),
    )


def play(given: tuple[str, int, int, int, float]) -> Played:
    kind, peers, liars, seed, seconds = given
    return Timed(case_of(kind, peers, liars, seed), seconds).play()


def line_of(kind: str, played: list[Played], honest: list[Played], liars: int) -> tuple[str, dict[str, object]]:
    share, late = (
        sum(getattr(one, what) for one in played) / max(1, sum(getattr(one, what) for one in honest))
        for what in ("steps", "late")
    )
    first = [min(one.evicted_s) for one in played if one.evicted_s]
    last = [max(one.evicted_s) for one in played if len(one.evicted_s) == liars]
    times, harmed = (sum(one.evictions for one in played), sum(len(one.wronged) for one in played))
    broken = sum(bool(one.violations) for one in played)
    seconds = [f"{statistics.median(of):.0f} s" if of else "never" for of in (first, last)]
    all_out = f"{len(last)} of {len(played)}"
    until = f"{statistics.median(one.until for one in played if one.evicted_s):.0f}" if first else "-"
    when = f"{seconds[0]:>8} {seconds[1]:>8} {until:>6} {all_out:>9}"
    text = f"{kind or 'honest':17} {share:6.0%} {late:6.0%} {when} {times:6} {harmed:7} {broken:6}"
    row = {
        "kind": kind or "honest", "share": round(share, 3), "last_half": round(late, 3), "first": seconds[0],
        "last": seconds[1], "steps": until, "all_out": all_out, "evictions": times, "harmed": harmed, "broken": broken,
    }  # fmt: skip
    return text, row


def markdown(row: dict[str, object]) -> str:
    """Of docs/threat-model.md: lie, share of steps, seconds and steps until the first is evicted, honest peers harmed."""
    return f"| {row['kind']} | {float(str(row['share'])):.0%} | {row['first']} | {row['steps']} | {row['harmed']} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", default=",".join(KINDS), metavar="A,B")
    parser.add_argument("--peers", type=int, default=6)
    parser.add_argument("--liars", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0, help="simulated, from the first step on")
    parser.add_argument("--seeds", default="0:2", metavar="A:B")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--markdown", action="store_true", help="print rows of a table of the documentation")
    parser.add_argument("--harmed", action="store_true", help="print what happened to honest peers, and why")
    given = parse(parser)
    first, end = map(int, given.seeds.split(":"))
    rows = []
    columns = f"{'liars':17} {'share':>6} {'later':>6} {'first':>8} {'last':>8} {'steps':>6} {'all out':>9}"
    print(f"{columns} {'times':>6} {'harmed':>7} {'broken':>6}", flush=True)
    with ProcessPoolExecutor(given.jobs) as pool:
        honest: list[Played] = []
        for kind in ("", *(one for one in given.kinds.split(",") if one)):
            work = [(kind, given.peers, given.liars, seed, given.seconds) for seed in range(first, end)]
            played = list(pool.map(play, work))
            honest = honest or played
            text, row = line_of(kind, played, honest, given.liars)
            rows.append(row)
            print(markdown(row) if given.markdown else text, flush=True)
            for seed, one in enumerate(played, first):
                for what in (*(one.wronged if given.harmed else ()), *one.violations[:3]):
                    print(f"    seed {seed}: {what[:400]}", flush=True)
    least = min((float(str(row["share"])) for row in rows[1:]), default=1.0)
    setting = {
        "peers": given.peers,
        "liars": given.liars,
        "seconds": given.seconds,
        "seeds": given.seeds,
        "kinds": rows,
    }
    report("liars, simulated", least, "of the honest run's steps", Target(0.5, "higher"), setting, given.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())

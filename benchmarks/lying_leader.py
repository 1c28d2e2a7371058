"""A leader that lies among simulated peers: what it costs, when another one leads, and whom it harms until then.

    python benchmarks/lying_leader.py [--kinds stall,fork,...] [--peers 9] [--seconds 120] [--seeds 0:2] [--trusting] [--jobs 1]

The machines are those of real peers (core/), the network and the clock are simulated, with the settings that a run has by default
(liars_simulated.py). The founder leads, and lies whenever it leads, from 5 s after the first step began; it is honest in all else. Printed
of each kind, over all seeds: steps as a share of the honest run's, the same of the last half of the time, seconds until another first led
(never), how often the liar led again, honest peers that were evicted or had to download their state again, commits that list what a
replica did not compute, steps of which one peer owned more than half, and steps undone. --trusting: nobody judges a leader (before). The
last line is one JSON object: the smallest share of the last half.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise

import msgspec

from liars_simulated import Timed, case_of
from report import Target, parse, report
from shoal.core.member.judge import LeaderJudge
from shoal.core.messages import View
from shoal.sim.faults.hostile import LEADS, Hostile
from shoal.sim.node import Node
from shoal.sim.scenarios.scenario import Case

AT_S, LOOK_S = 5.0, 0.25
LIAR = 0  # founds the run
SAVE_EVERY = 8


class Led(msgspec.Struct):
    steps: int
    late: int
    replaced_s: float | None
    times: int  # that the liar began to lead after it had been replaced
    wronged: int
    padded: int
    hoarded: int
    undone: int
    violations: tuple[str, ...]


class Watched(Timed):
    """Looks who leads, and at every view."""

    def __init__(self, case: Case, seconds: float) -> None:
        super().__init__(case, seconds)
        self.replaced_s: float | None = None
        self.led_again, self.liar_leads = 0, True
        self.agreed_views: dict[int, View] = {}

    def _begin_faults(self) -> None:
        super()._begin_faults()
        self.kernel.after(AT_S, self._who)

    def _who(self, _: object) -> None:
        newest = max((node.machine.register.term for node in self.nodes.values() if node.mask is None), default=0)
        leading = {
            node.process.key
            for node in self.nodes.values()
            if node.machine.leading and node.machine.register.term >= newest
        }
        if leading - {LIAR} and self.liar_leads:
            self.liar_leads = False
            began = self.context.timeline.began_s or 0.0
            self.replaced_s = self.replaced_s or self.kernel.now - began - AT_S
        elif leading == {LIAR} and not self.liar_leads:
            self.liar_leads, self.led_again = True, self.led_again + 1
        self.kernel.after(LOOK_S, self._who)

    def agreed(self, node: Node, view: View) -> None:
        self.agreed_views.setdefault(view.number, view)
        super().agreed(node, view)


def play(given: tuple[str, int, int, float, bool]) -> Led:
    kind, peers, seed, seconds, trusting = given
    if trusting:
        LeaderJudge.objection = lambda *_: ""  # type: ignore[method-assign]
        LeaderJudge.doubts = lambda *_: ""  # type: ignore[method-assign]
    case = case_of("", peers, 0, seed)
    settings = msgspec.structs.replace(case.settings, save_every=SAVE_EVERY)
    hostile = (Hostile(LIAR, "leader", (kind,), AT_S),) if kind else ()
    swarm = Watched(msgspec.structs.replace(case, settings=settings, hostile=hostile), seconds)
    done = swarm.play()
    views = list(swarm.agreed_views.values())
    commits = [view for view in views if view.last is not None and view.last.groups]
    most = [max(map(view.owners.count, set(view.owners))) / len(view.owners) for view in views if view.owners]
    padded = {view.step for view in commits if any(_lone(group) for group in view.last.groups)}  # type: ignore[union-attr]
    undone = sum(max(0, one.step - two.step) for one, two in pairwise(views))
    steps = swarm.commits
    at_half = steps[min(int(seconds / 2 / LOOK_S), len(steps) - 1)]
    return Led(
        done.steps, done.steps - at_half, swarm.replaced_s, swarm.led_again, len(done.wronged), len(padded),
        sum(share > 0.5 for share in most), undone, done.violations,
    )  # fmt: skip


def _lone(group: tuple[object, ...]) -> bool:
    """One of several replicas is said to have computed all."""
    with_some = [share for share in group if share.indices]  # type: ignore[attr-defined]
    return len(group) > 1 and len(with_some) == 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", default=",".join(LEADS), metavar="A,B")
    parser.add_argument("--peers", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seeds", default="0:2", metavar="A:B")
    parser.add_argument("--trusting", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    given = parse(parser)
    seeds = range(*map(int, given.seeds.split(":")))
    found, worst = dict[str, list[float]](), 1.0
    with ProcessPoolExecutor(given.jobs) as pool:
        honest: list[Led] = []
        print(
            f"{'kind':8} {'share':>6} {'late':>6} {'replaced':>12} {'again':>5} {'wronged':>7} {'padded':>6} {'hoarded':>7} {'undone':>6}"
        )
        for kind in ("", *given.kinds.split(",")):
            runs = list(pool.map(play, [(kind, given.peers, seed, given.seconds, given.trusting) for seed in seeds]))
            honest = honest or runs
            share = sum(one.steps for one in runs) / max(1, sum(one.steps for one in honest))
            late = sum(one.late for one in runs) / max(1, sum(one.late for one in honest))
            replaced = " ".join("never" if one.replaced_s is None else f"{one.replaced_s:.1f}" for one in runs)
            sums = [
                sum(getattr(one, name) for one in runs) for name in ("times", "wronged", "padded", "hoarded", "undone")
            ]
            again, wronged, padded, hoarded, undone = sums
            print(
                f"{kind or 'honest':8} {share:6.0%} {late:6.0%} {replaced:>12} {again:5} {wronged:7} {padded:6} {hoarded:7} {undone:6}",
                flush=True,
            )
            for text in sorted({text[:200] for one in runs for text in one.violations})[:3]:
                print(f"    {text}", flush=True)
            found[kind or "honest"], worst = [round(share, 3), round(late, 3), *sums], min(worst, late)
    report("lying leader", worst, "of the honest run's steps, last half", Target(0.69, "higher"), found, given.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())

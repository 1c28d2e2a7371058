"""What rebalancing is worth: a pipeline on spot instances that come and go, by the rule that places and moves its peers.

    python benchmarks/rebalance.py [--stages 4,8] [--seeds 10] [--step 30]

The record of an AWS spot cluster (configs/traces) is played against stages that hold no model: a pipeline of n peers is as fast as its
thinnest stage, and at best passes what floor(n / stages) replicas of each would. Every rule's throughput is told in percent of that best,
which nobody can reach: it moves peers free of charge and at once. A move here takes a peer away for 60 s (its download); joining is
free for all rules alike, as is dying. Peers are equally fast and stages equally heavy.

Side by side: no rebalancing and SWARM's rule (arXiv 2301.11913, section 3.2) with T = 300 s and 60 s, each with joiners placed at
random and on the emptiest stage, and ours: core/rebalance.py as core/coordinator.py asks it, at step boundaries, at most once in
MOVE_STEPS steps and never while a peer loads. SWARM's rule says nothing of equal queues; here it moves nobody between stages that differ by
one peer, which would never end, so it is a little better than as published.

The last line is one JSON object: ours with the most stages, its bound being the best of the others there.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from random import Random

import msgspec

from report import report
from shoal.core.coordinator import MOVE_STEPS
from shoal.core.messages import Member
from shoal.core.rebalance import move, place
from shoal.sim.preemption import Change, read

TRACE = Path(__file__).parents[1] / "configs" / "traces" / "aws-g4dn-spot.csv"
MOVE_S = 60.0  # a moving peer serves nobody for so long
STEP_S = 30.0  # of an optimizer step, at whose end our moves are decided
FIRST_S = 600.0  # whoever is there by then was placed at random, whatever the rule: it is rebalancing that is measured


class Rule(msgspec.Struct, frozen=True):
    """`period_s`: how often somebody may move; None: never. `ours`: by core/rebalance.py."""

    name: str
    emptiest: bool
    period_s: float | None = None
    ours: bool = False


class Pipeline:
    """The peers of one moment. `members` is in the order in which they came, as in a View."""

    def __init__(self, stages: int, rng: Random) -> None:
        self.stages, self.rng = stages, rng
        self.members: dict[str, int] = {}
        self.loading: dict[str, float] = {}  # who moves -> when it serves again

    def counts(self) -> list[int]:
        found = [0] * self.stages
        for stage in self.members.values():
            found[stage] += 1
        return found

    def rate(self) -> int:
        """In microbatches per unit of one peer's time."""
        found = self.counts()
        for peer in self.loading:
            found[self.members[peer]] -= 1
        return min(found)

    def join(self, peer: str, rule: Rule, early: bool) -> None:
        if early or not rule.emptiest:
            self.members[peer] = self.rng.randrange(self.stages)
        else:
            self.members[peer], _ = place(self._members(), self.stages)

    def leave(self, peer: str) -> None:
        del self.members[peer]
        self.loading.pop(peer, None)

    def move_by_swarm(self, now: float) -> None:
        """From the stage with the shortest queues to the one with the longest, one peer."""
        counts = self.counts()
        thick = max(range(self.stages), key=lambda stage: (counts[stage], self.rng.random()))
        thin = min(range(self.stages), key=lambda stage: (counts[stage], self.rng.random()))
        able = [peer for peer, stage in self.members.items() if stage == thick and peer not in self.loading]
        if counts[thick] - counts[thin] >= 2 and able:
            self._move(self.rng.choice(able), thin, now)

    def move_by_us(self, now: float) -> bool:
        if self.loading:
            return False
        chosen = move(self._members(), self.stages)
        if chosen is not None:
            self._move(chosen[0].peer, chosen[1], now)
        return chosen is not None

    def _move(self, peer: str, stage: int, now: float) -> None:
        del self.members[peer]
        self.members[peer] = stage  # it is the newest member of its new stage
        self.loading[peer] = now + MOVE_S

    def _members(self) -> tuple[Member, ...]:
        return tuple(Member(peer=peer, stage=stage) for peer, stage in self.members.items())


class Share(msgspec.Struct, frozen=True):
    percent: float
    moves: int


def play(changes: Sequence[Change], stages: int, rule: Rule, seed: int) -> Share:
    """One run through the record."""
    pipeline = Pipeline(stages, Random(f"{seed}/{stages}/{rule.name}"))
    end_s = changes[-1].at_s
    done = best = now = 0.0
    moves, due, allowed_s = 0, list(reversed(changes)), 0.0
    period_s = rule.period_s if rule.period_s is not None else float("inf")
    turn_s = period_s
    while now < end_s:
        until = min([due[-1].at_s if due else end_s, turn_s, *pipeline.loading.values()])
        done += pipeline.rate() * (until - now)
        best += len(pipeline.members) // stages * (until - now)
        now = until
        pipeline.loading = {peer: at for peer, at in pipeline.loading.items() if at > now}
        while due and due[-1].at_s <= now:
            change = due.pop()
            if change.joins:
                pipeline.join(change.node, rule, early=change.at_s <= FIRST_S)
            else:
                pipeline.leave(change.node)
        if now >= turn_s:
            turn_s += period_s
            before = len(pipeline.loading)
            if not rule.ours:
                pipeline.move_by_swarm(now)
            elif now >= allowed_s and pipeline.move_by_us(now):
                allowed_s = now + MOVE_STEPS * period_s
            moves += len(pipeline.loading) - before
    return Share(percent=100 * done / best, moves=moves)


def rules(step_s: float) -> tuple[Rule, ...]:
    return (
        Rule("none, placed at random", emptiest=False),
        Rule("none, placed on the emptiest", emptiest=True),
        Rule("SWARM T=300, at random", emptiest=False, period_s=300.0),
        Rule("SWARM T=300, on the emptiest", emptiest=True, period_s=300.0),
        Rule("SWARM T=60, at random", emptiest=False, period_s=60.0),
        Rule("SWARM T=60, on the emptiest", emptiest=True, period_s=60.0),
        Rule("ours", emptiest=True, period_s=step_s, ours=True),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", default="4,8")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--step", type=float, default=STEP_S, metavar="S", help="seconds of an optimizer step")
    parser.add_argument("--trace", default=str(TRACE), help="a record of who came and went")
    asked = parser.parse_args()
    changes = read(asked.trace)
    sizes = sorted(int(size) for size in asked.stages.split(","))
    found: dict[str, dict[str, float]] = {}
    for stages in sizes:
        for rule in rules(asked.step):
            shares = [play(changes, stages, rule, seed) for seed in range(asked.seeds)]
            percent = sum(share.percent for share in shares) / len(shares)
            moves = sum(share.moves for share in shares) / len(shares)
            found.setdefault(f"{stages} stages", {})[rule.name] = round(percent, 1)
            worst = min(share.percent for share in shares)
            print(f"{stages} stages  {rule.name:30} {percent:5.1f} %  worst seed {worst:5.1f} %  {moves:6.1f} moves")
    last = found[f"{sizes[-1]} stages"]
    others = max(value for name, value in last.items() if name != "ours")
    setting = {"seeds": asked.seeds, "step_s": asked.step, "move_s": MOVE_S, "trace": Path(asked.trace).name, **found}
    report("rebalance", last["ours"], "% of the optimum", others, setting)


if __name__ == "__main__":
    main()

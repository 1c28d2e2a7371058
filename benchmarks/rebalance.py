"""What rebalancing is worth: a pipeline on machines that come and go, by the rule that places and moves its peers.

    python benchmarks/rebalance.py [--seeds 10] [--stages 4,8] [--no-fleet] [--uneven 3]

Two records are played against stages that hold no model: an AWS spot cluster's, whole (configs/traces, 10.6 h, 4 and 8 stages), and a drawn
one of 400 peers with a mean life of 8 h that are replaced as they go (32 h, 32 stages). A step is a number of microbatches that every stage
passes: what the best assignment does in 30 s, on the record's average. A pipeline of n equal peers is as fast as its thinnest stage and at
best passes what floor(n / stages) replicas of each would; throughput is told in percent of that best, which nobody can reach: it moves
peers at once and free of charge. What lacks is told apart:

  detection  a death is noticed after 4.5 s (measured on real processes: 4.4 s); until then its share of the stage's requests, and with them
             so much of the whole pipeline's work, waits for it
  redone     what the dead had booked of the step is booked again by the stage's others, beside the step's work where they have time left,
             else after it
  moves      who moves serves nobody for 60 s
  imbalance  what a better assignment of those who live would pass

Joining is free for all rules alike, so joiners are placed by who serves now (the leader also counts those who download, since a joiner
downloads as well). Who is there in the first ten minutes was placed at random, whatever the rule: rebalancing is measured. A stage that has
lost its last replica waits here for the next peer; how often that happened is printed (a real run goes back to its checkpoint).

Side by side: `none` (the n-th peer that comes serves stage n modulo stages), joiners placed at random, or on the stage that serves least,
SWARM's rule (arXiv 2301.11913, section 3.2) with T = 300 s and 60 s and both placements, and ours:
core/leader/rebalance.py as core/leader/leader.py
asks it, at the end of each step, and at once where a stage has nobody. SWARM's rule says nothing of equal queues; here it moves nobody
between stages that differ by one peer, which would never end, and whoever moves in the middle of a step loses nothing, so it is a little
better than as published.

`only forced moves cost` is no rule that a run could follow but what is left for rules to win: as even as can be at every moment, every
spare peer where it is wanted, at once and free; only where a death has taken a peer that the best assignment needs does somebody move for
60 s. Nothing foresees who dies, so with the same detection, redone work and seconds of a move no rule is much better.

--uneven X draws speeds between 1 and X, and compares ours with and without knowing them; the bound is then the sum of speeds over stages.

The last line is one JSON object: ours where it is furthest behind (or least ahead of) the best of the others, its target being that, or
what only forced moves cost if all peers are alike.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

import msgspec

from report import at_least, parse, report
from shoal.core.leader.rebalance import Fleet, Move, place, rebalance
from shoal.core.messages import Member
from shoal.sim.faults.preemption import Change, read

TRACE = Path(__file__).parents[1] / "configs" / "traces" / "aws-g4dn-spot.csv"
MOVE_S = 60.0  # a moving peer serves nobody for so long
DETECT_S = 4.5  # from a death to its removal: tests/e2e/test_chaos.py saw 4.4 s
STEP_S = 30.0  # of an optimizer step, at the average of the best assignment
FIRST_S = 600.0  # whoever is there by then was placed at random
FLEET, LIFE_S, FLEET_S, FLEET_STAGES = 400, 8 * 3600.0, 32 * 3600.0, 32
NEVER = float("inf")
ROUNDING = 1e-6  # microbatches


class Rule(msgspec.Struct, frozen=True):
    """`placed`: by turn, at random, or on the emptiest stage. `period_s`: how often SWARM's rule may move somebody."""

    name: str
    placed: str = "emptiest"
    period_s: float = NEVER
    ours: bool = False
    at_once: bool = True  # ours, also in the middle of a step
    blind: bool = False  # ours, without being told the peers' speeds
    forced: bool = False  # even after every change, and only a move that a death forces takes time


RULES = (
    Rule("none", placed="turn"),
    Rule("random placement", placed="random"),
    Rule("placement only"),
    Rule("SWARM T=300, random", placed="random", period_s=300.0),
    Rule("SWARM T=300, placed", period_s=300.0),
    Rule("SWARM T=60, random", placed="random", period_s=60.0),
    Rule("SWARM T=60, placed", period_s=60.0),
    Rule("ours, at step ends", ours=True, at_once=False),
    Rule("ours", ours=True),
)
BOUND = Rule("only forced moves cost", forced=True)
LOSSES = ("detection", "redone", "moves", "imbalance")


class Share(msgspec.Struct):
    """In microbatches, then (`percent`) of the best assignment's."""

    best: float = 0.0
    done: float = 0.0
    detection: float = 0.0
    redone: float = 0.0
    moves: float = 0.0
    imbalance: float = 0.0
    moved: int = 0
    emptied: int = 0  # how often a stage lost its last peer

    def percent(self, field: str) -> float:
        return 100 * float(getattr(self, field)) / self.best


class Pipeline:
    """The peers of one moment. `members` is in the order in which they came to their stage, as in a View."""

    def __init__(self, stages: int, speeds: Mapping[str, float], step: float) -> None:
        self.stages, self.speeds, self.step = stages, speeds, step
        self.members: dict[str, int] = {}
        self.loading: dict[str, float] = {}  # who moves -> when it serves again
        self.unnoticed: dict[str, tuple[int, float]] = {}  # who died -> its stage, and when that is noticed
        self.passed = 0.0  # of the step, at every stage
        self.backlog = [0.0] * stages  # microbatches to be booked again
        self.share = Share()
        self._tell()

    def speed(self, peer: str) -> float:
        return self.speeds.get(peer, 1.0)

    def _tell(self) -> None:
        """What every stage passes: `serving` now, `there` with who moves to it, `known` with who is not known to be dead."""
        self.serving = [0.0] * self.stages
        self.there = [0.0] * self.stages
        for peer, stage in self.members.items():
            self.there[stage] += self.speed(peer)
            if peer not in self.loading:
                self.serving[stage] += self.speed(peer)
        self.known = list(self.there)
        self.open = 1.0  # the part of all requests that does not wait for a dead peer
        for peer, (stage, _) in self.unnoticed.items():
            self.known[stage] += self.speed(peer)
        for peer, (stage, _) in self.unnoticed.items():
            self.open *= 1 - self.speed(peer) / self.known[stage]
        if self.speeds:
            self.best = sum(self.there) / self.stages
        else:
            self.best = float(len(self.members) // self.stages)

    # ------------------------------------------------------------------------------------------------- time

    def rate(self) -> float:
        """Microbatches per second that the whole pipeline passes for the first time."""
        return 0.0 if self.passed >= self.step else min(self.serving) * self.open

    def until_step_s(self) -> float:
        """Seconds until the step ends, or its first part, if nothing changes before."""
        if self.passed < self.step:
            rate = self.rate()
            return (self.step - self.passed) / rate if rate else NEVER
        waits = [
            (left / power if power else NEVER) for left, power in zip(self.backlog, self.serving, strict=True) if left
        ]
        return max(waits, default=0.0)

    def advance(self, seconds: float) -> None:
        """Let time pass in which nobody comes, goes or moves; tell apart what was lost in it."""
        share, rate = self.share, self.rate()
        known, there, serving = (min(self.best, min(powers)) for powers in (self.known, self.there, self.serving))
        share.best += self.best * seconds
        share.done += rate * seconds
        share.imbalance += (self.best - known) * seconds
        share.detection += (known - there + serving * (1 - self.open)) * seconds
        share.moves += (there - serving) * seconds
        share.redone += (serving * self.open - rate) * seconds
        self.passed += rate * seconds
        if self.passed > self.step - ROUNDING:
            self.passed = self.step
        for stage in range(self.stages):
            left = self.backlog[stage] - (self.serving[stage] - rate) * seconds
            self.backlog[stage] = left if left > ROUNDING else 0.0

    def finish_step(self) -> bool:
        """Is the step over? Then the next one begins."""
        if self.passed < self.step or max(self.backlog) > 0:
            return False
        self.passed, self.backlog = 0.0, [0.0] * self.stages
        return True

    # ------------------------------------------------------------------------------------------- who is there

    def join(self, peer: str, stage: int) -> None:
        self.members[peer] = stage
        self._tell()

    def leave(self, peer: str, now: float) -> None:
        idle = self.loading.pop(peer, None) is not None
        if not idle:
            self.void(peer)
        stage = self.members.pop(peer)
        if not idle:
            self.unnoticed[peer] = stage, now + DETECT_S
        if stage not in self.members.values():
            self.share.emptied += 1
        self._tell()

    def void(self, peer: str) -> None:
        """What it has booked of the step is booked again by others."""
        stage = self.members[peer]
        self.backlog[stage] += self.passed * self.speed(peer) / self.serving[stage]

    def move(self, peer: str, stage: int, now: float) -> None:
        del self.members[peer]
        self.members[peer] = stage
        self.loading[peer] = now + MOVE_S
        self.share.moved += 1
        self._tell()

    def place(self, peer: str, stage: int) -> None:
        """A move that takes no time."""
        self.members[peer] = stage
        self._tell()

    def settle(self, now: float) -> bool:
        """Movers arrive, deaths are noticed: was one?"""
        loading = {peer: at for peer, at in self.loading.items() if at > now}
        unnoticed = {peer: one for peer, one in self.unnoticed.items() if one[1] > now}
        noticed, changed = len(unnoticed) < len(self.unnoticed), len(loading) < len(self.loading)
        self.loading, self.unnoticed = loading, unnoticed
        if noticed or changed:
            self._tell()
        return noticed


class Play:
    """One run through a record by one rule. Chance is the same for all rules of a seed where they ask for the same."""

    def __init__(
        self, changes: Sequence[Change], stages: int, rule: Rule, seed: int, speeds: Mapping[str, float]
    ) -> None:
        self.rule, self.stages = rule, stages
        self.placing, self.moving = Random(f"{seed}/{stages}/place"), Random(f"{seed}/{stages}/move")
        self.due, self.end_s = list(reversed(changes)), changes[-1].at_s
        self.pipeline = Pipeline(stages, speeds, STEP_S * average_best(changes, stages))
        self.recent: tuple[Move, ...] = ()
        self.come = 0
        self.now = 0.0

    def run(self) -> Share:
        pipeline, turn_s = self.pipeline, self.rule.period_s
        while self.now < self.end_s:
            coming = self.due[-1].at_s if self.due else self.end_s
            events = [*pipeline.loading.values(), *(at for _, at in pipeline.unnoticed.values())]
            until = min([coming, self.end_s, turn_s, self.now + pipeline.until_step_s(), *events])
            pipeline.advance(until - self.now)
            self.now = until
            noticed = pipeline.settle(until)
            while self.due and self.due[-1].at_s <= until:
                self._change(self.due.pop())
            boundary = pipeline.finish_step()
            if until >= turn_s:
                turn_s += self.rule.period_s
                self._by_swarm()
            if self.rule.ours and (boundary or self._empty() or (noticed and self.rule.at_once)):
                self._by_us()
            if self.rule.forced:
                self._evenly()
        return pipeline.share

    def _change(self, change: Change) -> None:
        if not change.joins:
            self.pipeline.leave(change.node, self.now)
            return
        placed = "random" if change.at_s <= FIRST_S else self.rule.placed
        drawn = self.placing.randrange(self.stages)
        if placed == "random":
            stage = drawn
        elif placed == "turn":
            stage = self.come % self.stages
        else:
            stage, _ = place(self._view(), self.stages, speeds=self._speeds())
        self.come += 1
        self.pipeline.join(change.node, stage)

    def _by_swarm(self) -> None:
        """From the stage with the shortest queues to the one with the longest, one peer."""
        pipeline = self.pipeline
        powers = [pipeline.known[s] for s in range(self.stages)]
        for peer in pipeline.loading:
            powers[pipeline.members[peer]] -= pipeline.speed(peer)
        thick = max(range(self.stages), key=lambda stage: (powers[stage], self.moving.random()))
        thin = min(range(self.stages), key=lambda stage: (powers[stage], self.moving.random()))
        able = [peer for peer, at in pipeline.members.items() if at == thick and peer not in pipeline.loading]
        if powers[thick] - powers[thin] >= 2 and len(able) > 1:
            pipeline.move(self.moving.choice(able), thin, self.now)

    def _by_us(self) -> None:
        fleet = Fleet(
            members=self._view(),
            stages=self.stages,
            speeds=self._speeds(),
            loading=tuple(Member(peer, self.pipeline.members[peer]) for peer in self.pipeline.loading),
            recent=self.recent,
            now=self.now,
            move_s=MOVE_S,
            left_s=self.end_s - self.now,
            passed=self.pipeline.passed / self.pipeline.step,
        )
        moves = rebalance(fleet)
        self.recent = (*self.recent, *moves)[-256:]
        for move in moves:
            self.pipeline.void(move.peer)
            self.pipeline.move(move.peer, move.stage, self.now)

    def _evenly(self) -> None:
        """What no rule without foresight does better: even at every moment, each spare peer where it is wanted, at once and free.

        Evenly spread, the fewest stages have no spare peer, so that the next death, which nobody foresees, hits one of those least
        often. Where it does, someone must come, and needs its time."""
        pipeline = self.pipeline
        while True:
            counts = [round(power) for power in pipeline.known]
            thick, thin = (
                max(range(self.stages), key=counts.__getitem__),
                min(range(self.stages), key=counts.__getitem__),
            )
            able = [one for one, at in pipeline.members.items() if at == thick and one not in pipeline.loading]
            if counts[thick] - counts[thin] < 2 or not able:
                return
            if counts[thin] < sum(counts) // self.stages:  # a death has done this
                pipeline.void(able[-1])
                pipeline.move(able[-1], thin, self.now)
            else:
                pipeline.place(able[-1], thin)

    def _empty(self) -> bool:
        """A stage has nobody, and that is known: the run goes back to its checkpoint and waits for no step's end."""
        held = {stage for stage, _ in self.pipeline.unnoticed.values()}.union(self.pipeline.members.values())
        return len(held) < self.stages and len(self.pipeline.members) >= self.stages

    def _view(self) -> tuple[Member, ...]:
        """Who serves, as the leader knows it: with who is dead and not noticed yet."""
        pipeline = self.pipeline
        living = [Member(peer, stage) for peer, stage in pipeline.members.items() if peer not in pipeline.loading]
        return (*(Member(peer, stage) for peer, (stage, _) in pipeline.unnoticed.items()), *living)

    def _speeds(self) -> Mapping[str, float]:
        return {} if self.rule.blind else self.pipeline.speeds


def average_best(changes: Sequence[Change], stages: int) -> float:
    """Replicas per stage of the best assignment, on average while there is one."""
    present, since, area, time = 0, 0.0, 0.0, 0.0
    for change in changes:
        if present >= stages:
            area += present // stages * (change.at_s - since)
            time += change.at_s - since
        present += 1 if change.joins else -1
        since = change.at_s
    return area / time


def fleet(seed: int, peers: int = FLEET) -> tuple[Change, ...]:
    """`peers` with exponential lives, mean 8 h; as many come as go, on average."""
    rng = Random(f"fleet/{seed}")
    changes: list[Change] = []
    at_s, born = 0.0, 0
    while at_s < FLEET_S:
        node = f"n{born}"
        changes.append(Change(at_s=at_s, node=node, joins=True))
        gone_s = at_s + rng.expovariate(1 / LIFE_S)
        if gone_s < FLEET_S:
            changes.append(Change(at_s=gone_s, node=node, joins=False))
        born += 1
        if born >= peers:
            at_s += rng.expovariate(peers / LIFE_S)
    return tuple(sorted(changes, key=lambda change: (change.at_s, change.joins, change.node)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", default="4,8", help="of the spot cluster's record")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--trace", default=str(TRACE), help="a record of who came and went")
    parser.add_argument("--no-fleet", action="store_true", help="without the 400 peers, which take minutes")
    parser.add_argument("--uneven", type=float, default=1.0, metavar="X", help="fastest over slowest peer")
    asked = parse(parser)
    record = read(asked.trace)
    settings = [(f"spot, {stages} stages", stages, None) for stages in sorted(map(int, asked.stages.split(",")))]
    settings += [] if asked.no_fleet else [(f"{FLEET} peers, {FLEET_STAGES} stages", FLEET_STAGES, fleet)]
    rules = (*RULES, BOUND) if asked.uneven == 1 else (*RULES, Rule("ours, told no speeds", ours=True, blind=True))
    found: dict[str, dict[str, float]] = {}
    print(
        f"{'':22} {'':22} {'done':>6}  {'worst':>6}  " + "  ".join(f"{loss:>9}" for loss in LOSSES) + "  moves  emptied"
    )
    for name, stages, drawn in settings:
        for rule in rules:
            shares = []
            for seed in range(asked.seeds):
                if sys.stderr.isatty():
                    print(f"\r{name}, {rule.name}, seed {seed} of {asked.seeds} ", end="\r", file=sys.stderr)
                changes = drawn(seed) if drawn else record
                shares.append(Play(changes, stages, rule, seed, speeds(changes, asked.uneven, seed)).run())
            mean = {f: sum(s.percent(f) for s in shares) / len(shares) for f in ("done", *LOSSES)}
            assert abs(sum(mean.values()) - 100) < 1e-3, mean
            found.setdefault(name, {})[rule.name] = round(mean["done"], 2)
            worst = min(share.percent("done") for share in shares)
            lost = "  ".join(f"{mean[loss]:8.2f}%" for loss in LOSSES)
            moved, emptied = (sum(getattr(s, f) for s in shares) / len(shares) for f in ("moved", "emptied"))
            print(
                f"{name:22} {rule.name:22} {mean['done']:5.2f}%  {worst:5.2f}%  {lost}  {moved:5.0f}  {emptied:5.1f}",
                flush=True,
            )
    least = min(found.values(), key=lambda one: one["ours"] / best_of_others(one))
    setting = {"seeds": asked.seeds, "step_s": STEP_S, "move_s": MOVE_S, "detect_s": DETECT_S, "uneven": asked.uneven}
    setting |= {"trace": Path(asked.trace).name, **found}
    report("rebalance", least["ours"], "% of the optimum", at_least(best_of_others(least)), setting, asked.record)


def best_of_others(found: Mapping[str, float]) -> float:
    return max(value for name, value in found.items() if not name.startswith("ours"))


def speeds(changes: Sequence[Change], uneven: float, seed: int) -> dict[str, float]:
    if uneven == 1:
        return {}
    rng = Random(f"speeds/{seed}")
    return {node: uneven ** rng.random() for node in dict.fromkeys(change.node for change in changes)}


if __name__ == "__main__":
    main()

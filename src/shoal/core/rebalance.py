"""Which stage a peer should serve: a joiner goes where the pipeline is thinnest.

SWARM (arXiv 2301.11913, section 3.2) moves peers between stages by queue sizes; placing joiners on the emptiest stage
captures most of that gain with no move at all, so it comes first. For coordinator.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from shoal.core.messages import Member


def place(members: Iterable[Member], stages: int, seconds: tuple[float, ...] = ()) -> tuple[int, str]:
    """The stage a new peer should serve, and why.

    `seconds[s]` is what one microbatch costs at stage s (planned or measured; equal when empty): the stage with the
    fewest replicas per second of work is the bottleneck. Ties go to the lower stage."""
    counts = [0] * stages
    for member in members:
        counts[member.stage] += 1
    cost = seconds if len(seconds) == stages else (1.0,) * stages
    stage = min(range(stages), key=lambda s: (counts[s] / cost[s], s))
    others = ", ".join(f"{s}:{n}" for s, n in enumerate(counts))
    return stage, f"stage {stage} has the fewest replicas for its work (replicas {others})"


# Of what one more replica would bring to the thinnest stage (from n to n + 1): so much must all moves together gain. Stages are
# measured on few peers and loads change: with less, five peers on three equal stages move to and fro with the noise.
GAIN = 0.5


def move(members: tuple[Member, ...], stages: int, seconds: tuple[float, ...] = ()) -> tuple[Member, int, str] | None:
    """The next move on the way to an even pipeline: who goes, where to, and why; None if that is not worth it.

    SWARM's rule (section 3.2: from the least to the most loaded stage, one peer per period) with what it leaves out: a
    threshold, so that peers do not wander, and the last replica of a stage never goes. What counts is the gain of all
    moves that are left: of two stages that are equally thin, the first one's move gains nothing by itself, and a rule
    that looks at one move would make none (benchmarks/rebalance.py, 8 stages: 95.5 % of the optimum, this one 96.9 %).
    Of the giving stage the newest member goes."""
    counts = [0] * stages
    for member in members:
        counts[member.stage] += 1
    cost = seconds if len(seconds) == stages else (1.0,) * stages
    power = [counts[s] / cost[s] for s in range(stages)]
    first: tuple[int, int] | None = None
    best = before = min(power)
    while (step := _evening(counts, cost)) is not None:
        giver, thin = step
        first = first or step
        counts[giver] -= 1
        counts[thin] += 1
        best = max(best, min(counts[s] / cost[s] for s in range(stages)))
    if first is None:
        return None
    giver, thin = first
    gain = best / before if before else float("inf")
    if before and gain < 1 + GAIN / (before * cost[thin]):
        return None
    who = next(member for member in reversed(members) if member.stage == giver)
    reason = (
        f"move {who.peer} {giver}->{thin}: stage {thin} serves {power[thin]:.2f}, stage {giver} {power[giver]:.2f} "
        f"microbatches per unit of time; gain {gain:.2f}x"
    )
    return who, thin, reason


def _evening(counts: list[int], cost: tuple[float, ...]) -> tuple[int, int] | None:
    """From the stage that is left with most to the thinnest, which must have been thinner than what is left there.

    So the last replica never goes."""
    thin = min(range(len(counts)), key=lambda s: (counts[s] / cost[s], s))
    able = [s for s in range(len(counts)) if (counts[s] - 1) / cost[s] > counts[thin] / cost[thin]]
    return (max(able, key=lambda s: ((counts[s] - 1) / cost[s], -s)), thin) if able else None

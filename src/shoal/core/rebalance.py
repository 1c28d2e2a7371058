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


GAIN = 1.25  # a move must speed the pipeline up by this much: a download and a smaller group are its price


def move(members: tuple[Member, ...], stages: int, seconds: tuple[float, ...] = ()) -> tuple[Member, int, str] | None:
    """The one move that speeds up the pipeline's slowest stage most: who goes, where to, and why; None if none is
    worth it.

    SWARM's rule (section 3.2: from the least to the most loaded stage, one peer per period) with what it leaves out: a
    threshold, so that peers do not wander, and the last replica of a stage never goes. Of the giving stage the newest
    member goes."""
    counts = [0] * stages
    for member in members:
        counts[member.stage] += 1
    cost = seconds if len(seconds) == stages else (1.0,) * stages
    power = [counts[s] / cost[s] for s in range(stages)]
    thin = min(range(stages), key=lambda s: (power[s], s))
    best: tuple[float, int] | None = None
    for giver in range(stages):
        if giver == thin or counts[giver] < 2:
            continue
        after = list(power)
        after[thin] = (counts[thin] + 1) / cost[thin]
        after[giver] = (counts[giver] - 1) / cost[giver]
        gain = min(after) / power[thin] if power[thin] else float("inf")
        if best is None or gain > best[0]:
            best = (gain, giver)
    if best is None or best[0] < GAIN:
        return None
    gain, giver = best
    who = next(member for member in reversed(members) if member.stage == giver)
    reason = (
        f"move {who.peer} {giver}->{thin}: stage {thin} serves {power[thin]:.2f}, stage {giver} {power[giver]:.2f} "
        f"microbatches per unit of time; gain {gain:.2f}x"
    )
    return who, thin, reason

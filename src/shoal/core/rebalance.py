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

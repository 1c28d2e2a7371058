"""Two replicas that differ again part: one of them changes places with a third peer, as nobody can tell which of the two lies.

Whoever stays meets another peer, and whoever goes meets several: the one that lies differs again, this time with a second one, and is
evicted for it (evictions.py). Both that change places download the state of their new stage; nobody is evicted on one peer's word.
docs/design/2026-11-24-jams.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping

from shoal.core.leader.rebalance import Move
from shoal.core.messages import Member, Peer, View


def part(
    view: View, parted: Mapping[Peer, str], evicted: Container[Peer], leader: Peer, now: float
) -> tuple[Move, ...]:
    """Who changes places with whom; nobody for a peer that finds no stage with two others."""
    moves: list[Move] = []
    for member in view.members:
        if member.peer in parted and member.peer not in evicted and not any(member.peer == one.peer for one in moves):
            other = _other(view, member, {*parted, *(move.peer for move in moves)}, evicted, leader)
            if other is not None:
                why = f"{member.peer} parts from its stage's other: {parted[member.peer]}"
                to = f"and downloads the state of stage {other.stage}"
                moves.append(Move(member.peer, member.stage, other.stage, now, f"{why}, {to}"))
                place = f"{other.peer} takes its place in stage {member.stage}"
                moves.append(Move(other.peer, other.stage, member.stage, now, place))
    return tuple(moves)


def _other(view: View, member: Member, taken: Container[Peer], evicted: Container[Peer], leader: Peer) -> Member | None:
    """The newest of the other stage that has most replicas, one of which stays."""
    staying = [one for one in view.members if one.peer not in evicted and one.peer not in taken]
    replicas = Counter(one.stage for one in staying if one.stage != member.stage)
    able = [one for one in staying if replicas[one.stage] > 1 and one.peer != leader]
    return max(able, key=lambda one: (replicas[one.stage], one.since, one.peer), default=None)

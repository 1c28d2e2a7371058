"""Rebalancing: what is known of the fleet when a rule decides who moves, and moves before a first step and to the stage of a leaver.

Two replicas that differ again part, as nobody can tell which of the two lies: one changes places with a third peer. Whoever stays meets
another, and whoever goes meets several; the one that lies differs again, with a second one, and is evicted for it (evictions.py).
Both download the state of their new stage; nobody is evicted on one peer's word. docs/design/2026-11-24-jams.md.

The algorithm is rebalance.py's. The rules that remove members (removal.py) and that commit a step (commit.py) ask it, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping

import msgspec

from shoal.core.leader.facts import Facts
from shoal.core.leader.rebalance import Fleet, Move, rebalance
from shoal.core.leader.rules.lines import measured
from shoal.core.leader.rules.proposal import Proposal, successor
from shoal.core.leader.rules.recovery import lost_stages
from shoal.core.messages import Member, Peer, Settings, View
from shoal.core.planned import NOWHERE


def fleet(
    members: tuple[Member, ...], loading: tuple[Member, ...], facts: Facts, settings: Settings, now: float
) -> Fleet:
    """These members and joiners; how long the run lasts, and how much of the step is booked, is the caller's to add."""
    seconds, speeds, lines = measured((*members, *loading), facts, settings)
    step_s = facts.history.step_s
    return Fleet(
        members=members,
        stages=settings.stages,
        seconds=seconds,
        speeds=speeds,
        lines=lines,
        loading=loading,
        recent=facts.history.moves,
        now=now,
        move_s=facts.evidence.progress.loads.value,
        step_s=step_s if step_s < math.inf else 0.0,
    )


def left_s(step: int, facts: Facts, settings: Settings) -> float:
    """Seconds until the run's end, from that step on, as long as steps take what the last one took."""
    return (settings.steps - step) * facts.history.step_s


def restage(view: View, facts: Facts, settings: Settings, now: float) -> Proposal | None:
    """Before a first step, a stage without anybody gets a peer of the stage that can best spare one."""
    everyone = view.members + view.joining
    if view.started or len(everyone) < max(settings.stages, 0 if view.epoch else settings.peers):
        return None
    if {member.stage for member in everyone} == set(range(settings.stages)) or lost_stages(view, settings.stages):
        return None
    moves = rebalance(fleet(everyone, (), facts, settings, now))
    if not moves:
        return None
    to = {move.peer: move.stage for move in moves}

    def moved(members: tuple[Member, ...]) -> tuple[Member, ...]:
        return tuple(
            msgspec.structs.replace(one, stage=to[one.peer], seat=NOWHERE) if one.peer in to else one for one in members
        )

    reasons = [move.reason for move in moves]
    return Proposal(successor(view, reasons, members=moved(view.members), joining=moved(view.joining)), moves)


def bare_stages(members: Iterable[Member], leaves: Container[Peer]) -> set[int]:
    """Stages that only leavers serve: the last of them stays until another peer does."""
    members = tuple(members)
    return {one.stage for one in members} - {one.stage for one in members if one.peer not in leaves}


def takeovers_of_leavers(
    members: tuple[Member, ...], joining: tuple[Member, ...], facts: Facts, settings: Settings, now: float
) -> tuple[Move, ...]:
    """Who moves to a stage that only leavers serve, from one that can spare it; none where a joiner is on its way there."""
    leaves = facts.requests.leaves
    bare = bare_stages(members, leaves)
    if not bare:
        return ()
    staying, coming = (tuple(one for one in each if one.peer not in leaves) for each in (members, joining))
    return tuple(move for move in rebalance(fleet(staying, coming, facts, settings, now)) if move.stage in bare)


def before_the_next_step(
    members: tuple[Member, ...], joining: tuple[Member, ...], view: View, facts: Facts, settings: Settings, now: float
) -> Fleet:
    """What is known of these at the end of the view's step."""
    known = fleet(members, joining, facts, settings, now)
    return msgspec.structs.replace(known, left_s=left_s(view.step + 1, facts, settings))


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

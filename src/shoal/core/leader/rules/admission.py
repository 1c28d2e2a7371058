"""Membership: which peers that ask to join become joiners, and which joiners become members in the middle of a step."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.core.leader.evictions import Misfit
from shoal.core.leader.facts import Facts
from shoal.core.leader.membership import arrived, counting
from shoal.core.leader.rebalance import place
from shoal.core.leader.rules.lines import by_pace, measured
from shoal.core.leader.rules.moves import bare_stages
from shoal.core.leader.rules.proposal import Proposal, successor
from shoal.core.leader.rules.recovery import empty_stages
from shoal.core.messages import Member, Peer, Settings, View
from shoal.core.names import invite_of, key_of, limit_of
from shoal.core.planned import planned_seat, planned_stage

ADMIT_BEATS = 0.9  # between two views that admit newcomers
ENTER_BEATS = 20  # that a step must still last for a joiner to serve from the middle of it: each is a new view for all
INCARNATIONS = 2  # of one key in a view


def may_admit(view: View, facts: Facts, settings: Settings, now: float) -> bool:
    """A round that is open lists every peer that receives its sums: nobody is added meanwhile."""
    return bool(facts.requests.joins) and not view.finished and facts.rounds.open is None


def admit(view: View, facts: Facts, settings: Settings, now: float) -> Proposal | None:
    """Give every new peer a stage to prepare: at once, but one view for all who come within a beat after the last.

    A view goes to everybody: one for each of n newcomers would be n * n messages (30,000 events at 100 peers)."""
    joining, reasons = list(view.joining), []
    pace = measured((*view.members, *view.joining), facts, settings)
    for peer, asked in facts.requests.joins.items():
        there = (*view.members, *joining)
        if not _welcome(peer, there, facts, now):
            continue
        taken = {member.seat for member in there}
        planned = planned_stage(settings, asked.seat, taken)
        stage, why = planned or place(
            (one for one in there if one.peer not in facts.requests.leaves), settings.stages, *pace
        )
        joining.append(Member(peer=peer, stage=stage, seat=planned_seat(settings, asked.seat, stage, taken)))
        reasons.append(f"{peer} joins stage {stage}: {why}")
    return Proposal(successor(view, reasons, joining=tuple(joining))) if reasons else None


def _welcome(peer: Peer, there: tuple[Member, ...], facts: Facts, now: float) -> bool:
    """It has no pause, and its invite and its key admit one more; a restarted process may join before the old one is removed."""
    others = [member.peer for member in there]
    if now < facts.requests.pauses.until(peer, [other for other in others if other in facts.serving]):
        return False
    of_invite = sum(invite_of(other) == invite_of(peer) for other in others)
    of_key = sum(key_of(other) == key_of(peer) for other in others)
    return of_invite < limit_of(peer) and of_key < INCARNATIONS


def misfits(view: View, facts: Facts, settings: Settings, now: float) -> Iterable[Misfit]:
    """Joiners with another state than their stage's members, before a rule would take them for ready. With delayed updates a round is open
    at nearly all times; joiners are no part of it."""
    if not view.joining:
        return ()
    if view.started:
        candidates = () if facts.rounds.open is not None and not view.ahead else _not_fenced(view)
    else:
        candidates = view.joining if view.epoch or len(facts.present) >= settings.peers else ()
    return [Misfit(member) for member in candidates if facts.misfit(member, view)]


def promote(view: View, facts: Facts, settings: Settings, now: float) -> Proposal | None:
    """Joiners that hold their stage become members in the middle of a step: at once where no other is left or stays, and where the
    end of the step is far. Else at its end."""
    if not view.started or not view.joining or facts.rounds.open is not None:
        return None
    empty = {*empty_stages(view, settings.stages), *bare_stages(view.members, facts.requests.leaves)}
    able = tuple(member for member in _not_fenced(view) if facts.ready(member, view))
    if facts.history.rest_s(facts.share(view), now) < ENTER_BEATS * settings.heartbeat_s:
        able = tuple(member for member in able if member.stage in empty)
    if not able:
        return None
    reasons = [
        f"{member.peer} serves stage {member.stage}"
        + (": no other replica stays" if member.stage in empty else " from the middle of the step")
        for member in able
    ]
    view = successor(
        view,
        reasons,
        members=by_pace(view.members + arrived(able, view.number + 1), facts, settings),
        joining=tuple(member for member in view.joining if member not in able),
        account=counting(view.account, able),
    )
    return Proposal(view)


def _not_fenced(view: View) -> tuple[Member, ...]:
    """Joiners that did not serve their stage in this step before: old books of theirs, reported late, would count there again."""
    void = {(member.peer, member.stage) for member in view.fenced}
    return tuple(member for member in view.joining if (member.peer, member.stage) not in void)

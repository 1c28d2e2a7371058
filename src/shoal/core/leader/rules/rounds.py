"""When a round is opened, with whom, and which of two members that booked the same microbatch is wrong."""

from __future__ import annotations

import msgspec

from shoal.core.leader.evictions import Misfit, Verdict
from shoal.core.leader.facts import Facts
from shoal.core.leader.ledger import Doubled
from shoal.core.leader.rules.lines import line_rates
from shoal.core.messages import Member, Peer, Round, Settings, Share, View
from shoal.core.names import key_of
from shoal.core.replica_state import owner_of

NEAR_BEATS = 8  # that steps wait for a joiner that is near, in all
OWNER_BEATS = 16  # for an owner to say whose gradient it got


class Opening(msgspec.Struct, frozen=True):
    """A round that is to be opened: shares and joiners by stage, joiners that it has waited for, and by stage the round whose exchange
    goes on (None: a new one)."""

    groups: tuple[tuple[Share, ...], ...]
    joiners: tuple[tuple[Peer, ...], ...]
    waited_for: tuple[Peer, ...]
    kept: tuple[int | None, ...]


class DoubleBooking(msgspec.Struct, frozen=True):
    """A verdict, or the owner to ask about `first`."""

    verdict: Verdict | None = None
    first: Doubled | None = None
    owner: Peer | None = None


def can_average(view: View, facts: Facts) -> bool:
    """The step with complete books can be averaged now: every member is alive, and with delayed updates the next step goes on first.

    A round that lists a dead member ends with it, and its bytes are in the way of the next."""
    if view.begun and not view.ahead:
        return False
    return all(facts.alive(member.peer) for member in view.members)


def misfits(view: View, facts: Facts) -> list[Misfit]:
    """Joiners with another state than their stage's members, those too that were removed in this step before."""
    return [Misfit(member) for member in view.joining if facts.misfit(member, view)]


def opening(view: View, facts: Facts, settings: Settings, complete_s: float) -> Opening | None:
    """The next round; None while it waits for joiners that are near. `complete_s`: how long the books have been complete."""
    alike = _alike(view, facts)
    ready = tuple(one for one in alike if facts.ready(one, view))
    near = tuple(one.peer for one in alike if one not in ready and facts.near(one, view))
    waited_s = facts.history.waited_s
    if any(waited_s.get(peer, 0.0) + complete_s < NEAR_BEATS * settings.heartbeat_s for peer in near):
        return None
    joiners = [one for one in view.joining if one not in ready and facts.confirmed(one.peer)]
    rates = line_rates(view.members + ready, facts, settings)
    groups = facts.ledger(view.step).groups(view.members, ready, rates)
    exchanges = _exchanges(facts.rounds.interrupted, view, groups, joiners)
    return Opening(
        groups=tuple(group for group, _, _ in exchanges),
        joiners=tuple(listed for _, listed, _ in exchanges),
        waited_for=near,
        kept=tuple(number for _, _, number in exchanges),
    )


Exchange = tuple[tuple[Share, ...], tuple[Peer, ...], int | None]  # group, joiners, and the round in which it began


def _exchanges(
    before: Round | None, view: View, groups: tuple[tuple[Share, ...], ...], joiners: list[Member]
) -> list[Exchange]:
    """By stage: what goes on from the round `before`, and what begins."""
    goes_on = before is not None and (before.epoch, before.step) == (view.epoch, view.step)
    exchanges: list[Exchange] = []
    for stage, group in enumerate(groups):
        listed = tuple(one.peer for one in joiners if one.stage == stage)
        exchanges.append(_exchange(before if goes_on else None, stage, group, listed))
    return exchanges


def _exchange(before: Round | None, stage: int, group: tuple[Share, ...], joiners: tuple[Peer, ...]) -> Exchange:
    """The group and joiners of a stage, and the round of its exchange if that goes on from the round `before`: its group is all there with
    the same books, and every joiner of today is one of its own. One that got ready meanwhile receives the sums like the others."""
    if before is None:
        return group, joiners, None
    listed, known = before.groups[stage], before.joiners[stage]
    peers = {share.peer for share in listed}
    bring = tuple(share for share in group if share.indices or share.peer in peers)
    rest = {share.peer for share in group if share not in bring} | set(joiners)
    same = [(one.peer, one.indices) for one in bring] == [(one.peer, one.indices) for one in listed]
    if not same or not rest <= set(known):  # the lines' rates may be known better by now: who owns which chunk stays
        return group, joiners, None
    return listed, tuple(peer for peer in known if peer in rest), before.round_of(stage)


def _alike(view: View, facts: Facts) -> list[Member]:
    """Joiners but those that differed from their stage in this step: they come in with the next one."""
    return [one for one in view.joining if key_of(one.peer) not in facts.evidence.conduct.differed_now]


def double_booking(view: View, facts: Facts, settings: Settings, now: float) -> DoubleBooking | None:
    """Two members report that they have booked one microbatch: its owner knows whose gradient it got, and is asked where it is neither of
    the two. Without its word a member at odds with several is convicted, or the one with fewer bookings, so that less is redone."""
    ledger = facts.ledger(view.step)
    doubled = ledger.doubled(view.members)
    if not doubled:
        return None
    odds: dict[Peer, set[Peer]] = {}
    for one in doubled:
        odds.setdefault(one.one, set()).add(one.two)
        odds.setdefault(one.two, set()).add(one.one)
    worst = max(odds, key=lambda peer: len(odds[peer]))
    others = (one for one in doubled if owner_of(view, one.index) not in (one.one, one.two))
    several, apart, asked = len(odds[worst]) > 1, next(others, None), facts.rounds.asked_owner
    first = apart or doubled[0]
    waited = now - asked[1] if asked is not None and asked[0] == first else 0.0
    owner = owner_of(view, first.index) if view.work == view.step else None
    if owner is not None and (apart or not several) and waited <= OWNER_BEATS * settings.heartbeat_s:
        return DoubleBooking(first=first, owner=owner)
    if several:
        return DoubleBooking((worst, f"booked what {' and '.join(sorted(odds[worst]))} had booked"), first)
    fewer = min((first.two, first.one), key=lambda peer: (peer == facts.name, len(ledger.books[peer])))
    other = first.one if fewer == first.two else first.two
    return DoubleBooking((fewer, f"booked microbatch {first.index}, which {other} had booked"), first)

"""When a round is opened, with whom, and which of two members that booked the same microbatch is wrong."""

from __future__ import annotations

import msgspec

from shoal.core.leader.evictions import Misfit, Verdict
from shoal.core.leader.facts import Facts
from shoal.core.leader.ledger import Doubled
from shoal.core.leader.rules.lines import line_rates
from shoal.core.messages import Member, Peer, Settings, Share, View
from shoal.core.names import key_of
from shoal.core.replica_state import owner_of

NEAR_BEATS = 8  # that steps wait for a joiner that is near, in all
OWNER_BEATS = 16  # for an owner to say whose gradient it got


class Opening(msgspec.Struct, frozen=True):
    """A round that is to be opened: shares and joiners by stage, and joiners that it has waited for."""

    groups: tuple[tuple[Share, ...], ...]
    joiners: tuple[tuple[Peer, ...], ...]
    waited_for: tuple[Peer, ...]


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
    return Opening(
        groups=facts.ledger(view.step).groups(view.members, ready, line_rates(view.members + ready, facts, settings)),
        joiners=tuple(tuple(one.peer for one in joiners if one.stage == stage) for stage in range(settings.stages)),
        waited_for=near,
    )


def _alike(view: View, facts: Facts) -> list[Member]:
    """Joiners but those that differed from their stage in this step: they come in with the next one."""
    return [one for one in view.joining if key_of(one.peer) not in facts.evidence.conduct.differed_now]


def double_booking(view: View, facts: Facts, settings: Settings, now: float) -> DoubleBooking | None:
    """Two members report that they have booked one microbatch: its owner knows whose gradient it got. A member at odds with several is
    convicted without an owner's word; if no owner answers, the one with fewer bookings is, so that less is redone."""
    ledger = facts.ledger(view.step)
    doubled = ledger.doubled(view.members)
    if not doubled:
        return None
    odds: dict[Peer, set[Peer]] = {}
    for one in doubled:
        odds.setdefault(one.one, set()).add(one.two)
        odds.setdefault(one.two, set()).add(one.one)
    worst = max(odds, key=lambda peer: len(odds[peer]))
    if len(odds[worst]) > 1:
        return DoubleBooking(verdict=(worst, f"booked what {' and '.join(sorted(odds[worst]))} had booked"))
    first, asked = doubled[0], facts.rounds.asked_owner
    waited = now - asked[1] if asked is not None and asked[0] == first else 0.0
    owner = owner_of(view, first.index) if view.work == view.step else None
    if owner is not None and waited <= OWNER_BEATS * settings.heartbeat_s:
        return DoubleBooking(first=first, owner=owner)
    fewer = min((first.two, first.one), key=lambda peer: (peer == facts.name, len(ledger.books[peer])))
    other = first.one if fewer == first.two else first.two
    return DoubleBooking((fewer, f"booked microbatch {first.index}, which {other} had booked"), first)

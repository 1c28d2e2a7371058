"""The view without members that are silent, convicted (evictions.py), hold a wrong state, or leave and cannot wait for the step's end;
others take over their work. Where what the convicted contributed is undone (leader/undo), all go back to a checkpoint in the same view."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable

import msgspec

from shoal.core.consensus.certificates import can_agree
from shoal.core.consensus.phases import ended
from shoal.core.leader.evictions import evicting
from shoal.core.leader.facts import Facts
from shoal.core.leader.membership import inherit, moving, on_probation, owned
from shoal.core.leader.rebalance import Move, rebalance
from shoal.core.leader.rules import overlap
from shoal.core.leader.rules.lines import too_narrow
from shoal.core.leader.rules.moves import fleet, left_s, part, takeovers_of_leavers
from shoal.core.leader.rules.proposal import Proposal, successor, together
from shoal.core.leader.rules.recovery import gone_back
from shoal.core.leader.undo.decision import Decision, decide
from shoal.core.leader.undo.unchecked import tracked
from shoal.core.messages import Account, Member, Peer, Settings, View

DOUBT_BEATS = 3  # a peer whose connections broke is dead, or sends a heartbeat within this many beats
MOVE_AT_ONCE_S = 5.0  # who is to take over a leaver's stage waits no longer for the step's end: it has to download
LEAVE_S = 20.0  # a peer that asks to leave waits no longer for the end of the step, which commit.py prefers: nothing is redone then


def removal_due(view: View, facts: Facts, settings: Settings, now: float) -> bool:
    """A peer is convicted, or silence and leavers are looked at now."""
    evidence = facts.evidence
    return bool(facts.scan or evidence.guilty or evidence.stale or evidence.unfit or evidence.parted)


def remove(view: View, facts: Facts, settings: Settings, now: float) -> Proposal | None:
    """Evict the silent, the guilty, those whose lines are too narrow, and joiners with a wrong state; members with a wrong state download
    it again. Where that leaves a stage too thin, others move there at once: the end of the step may be far."""
    narrow = too_narrow(view, facts, settings, now)
    evicted, leaving = _going(view, narrow, facts, settings, now)
    undo = _decided(view, evicted, facts, settings)
    if undo.back_to is not None:
        return Proposal(_undone(view, evicted, leaving, undo, undo.back_to, facts, settings))
    stale, parting = facts.evidence.stale, part(view, facts.evidence.parted, evicted, facts.name, now)
    again = _again(view, stale, evicted)
    members, joining = _left(view, evicted, again)
    moves = _moves(view, members, joining, facts, settings, now) if evicted else ()
    moves = parting or moves or _takeovers(view, members, joining, facts, settings, now)
    if not (evicted or again or moves):
        return None
    members, joining = moving(members, joining, moves)
    reasons = _reasons(evicted, again, moves, undo.words)
    void = {*evicted, *again, *(move.peer for move in moves)}  # peers whose books are void
    changes = {
        "members": members,
        "joining": joining,
        "owners": inherit(view, members, facts.ledger(view.work).open(members)),
        "fenced": view.fenced + _of(view.members, void),
        "account": _account(view, void, evicted.keys() - leaving.keys(), facts),
        "evicted": evicting(view.evicted, [peer for peer in evicted if peer in facts.evidence.guilty], narrow),
    }
    if opens_again(view, void, facts):
        changes |= overlap.opened_again(view)
        changes["owners"] = (
            owned(members, settings.count(view.step), (), on_probation(view), settings) if members else ()
        )
        reasons.append(f"step {view.step} is opened again")
    return Proposal(successor(view, reasons, **changes), moves)


def _going(
    view: View, narrow: dict[Peer, str], facts: Facts, settings: Settings, now: float
) -> tuple[dict[Peer, str], dict[Peer, str]]:
    """Who goes with one view and why, the convicted first; and those of them that leave."""
    evicted = _evicted(view, facts, settings, now) | narrow
    leaving = _leaving(view, evicted, facts, settings, now)
    evicted |= leaving
    gone = together(view, sorted(evicted, key=lambda peer: peer not in facts.evidence.guilty))
    return {peer: why for peer, why in evicted.items() if peer in gone}, {
        peer: why for peer, why in leaving.items() if peer in gone
    }


def _again(view: View, stale: dict[Peer, str], evicted: Container[Peer]) -> dict[Peer, str]:
    """Members that download their state again, and why."""
    return {one.peer: stale[one.peer] for one in view.members if one.peer in stale and one.peer not in evicted}


def _decided(view: View, evicted: Iterable[Peer], facts: Facts, settings: Settings) -> Decision:
    """What becomes of what those contributed that are evicted for false values."""
    false = [peer for peer in evicted if peer in facts.evidence.values.false]
    known = tracked(view, facts.evidence.values.passed, max(view.saved, facts.saving.published), settings)
    return decide(view, false, known, facts.history.step_s, settings)


def _undone(
    view: View,
    evicted: dict[Peer, str],
    leaving: Container[Peer],
    undo: Decision,
    back_to: int,
    facts: Facts,
    settings: Settings,
) -> View:
    """Without the evicted, and with it what they contributed: all go back to a checkpoint."""
    members, joining = _left(view, evicted, ())
    return gone_back(
        view,
        back_to,
        "; ".join(_reasons(evicted, {}, (), undo.words)),
        settings,
        members=members,
        joining=joining,
        account=_account(view, (), [peer for peer in evicted if peer not in leaving], facts),
        evicted=evicting(view.evicted, [peer for peer in evicted if peer in facts.evidence.guilty]),
        undoing=undo.undoing,
    )


def _reasons(evicted: dict[Peer, str], again: dict[Peer, str], moves: tuple[Move, ...], undo: str) -> list[str]:
    return [
        *(f"{peer} {why}" for peer, why in evicted.items()),
        *(f"{peer} downloads its state again: {why}" for peer, why in again.items()),
        *(move.reason for move in moves),
        *([undo] if undo else []),
    ]


def _of(members: tuple[Member, ...], peers: Container[Peer]) -> tuple[Member, ...]:
    return tuple(member for member in members if member.peer in peers)


def _left(
    view: View, evicted: Container[Peer], again: Container[Peer]
) -> tuple[tuple[Member, ...], tuple[Member, ...]]:
    """Members and joiners without the evicted ones; those with a wrong state join anew."""
    members = tuple(one for one in view.members if one.peer not in evicted and one.peer not in again)
    joining = tuple(one for one in view.joining if one.peer not in evicted)
    return members, joining + tuple(msgspec.structs.replace(one, back=True) for one in _of(view.members, again))


def _account(view: View, void: Iterable[Peer], evicted: Container[Peer], facts: Facts) -> Account:
    """With the bookings that are computed again, and the voters that are gone."""
    redone = sum(len(ledger.books.get(peer, ())) for ledger in facts.ledgers.values() for peer in void)
    killed = sum(peer in evicted for peer in view.voters)
    account = view.account
    return msgspec.structs.replace(account, redone=account.redone + redone, killed=account.killed + killed)


def opens_again(view: View, void: Iterable[Peer], facts: Facts) -> bool:
    """A step that is closed lacks books without these peers: it must be computed again before it can be averaged."""
    if not view.ahead:
        return False
    closed = facts.ledger(view.step)
    return not closed.complete(view.members) or any(closed.books.get(peer) for peer in void)


def _evicted(view: View, facts: Facts, settings: Settings, now: float) -> dict[Peer, str]:
    """Who is evicted, and why. A leader does not evict itself. Where the silent are so many that the others could agree on nothing, it may
    be the leader that is cut off."""
    evicted, silent = dict[Peer, str](), _silent(view, facts, settings, now)
    if not can_agree(view, [peer for peer in view.voters if peer not in silent]):
        silent = {}
    for peer in [member.peer for member in view.members + view.joining if member.peer != facts.name]:
        if peer in silent:
            evicted[peer] = silent[peer]
        elif peer in facts.evidence.guilty:
            evicted[peer] = facts.evidence.guilty[peer]
        elif peer in facts.evidence.parted and not part(view, {peer: ""}, evicted, facts.name, now):
            evicted[peer] = facts.evidence.parted[peer]  # it has nowhere to go
        elif peer in facts.evidence.unfit:
            evicted[peer] = facts.evidence.unfit[peer]
    return evicted


def _silent(view: View, facts: Facts, settings: Settings, now: float) -> dict[Peer, str]:
    silent: dict[Peer, str] = {}
    for peer in [member.peer for member in view.members + view.joining if member.peer != facts.name]:
        silence = now - facts.received_at.get(peer, now)
        if silence > settings.heartbeat_timeout_s:
            silent[peer] = f"silent for {silence:.1f} s"
        elif now - facts.doubted.get(peer, now) >= DOUBT_BEATS * settings.heartbeat_s:
            silent[peer] = f"cannot be reached, silent for {silence:.1f} s"
    return silent


def _leaving(view: View, evicted: Container[Peer], facts: Facts, settings: Settings, now: float) -> dict[Peer, str]:
    """Peers that asked to leave and go now, and why: joiners at once, members when the step's end is too far and their stage keeps
    another member."""
    leaves, leave_at = facts.requests.leaves, facts.requests.leave_at
    if ended(view, settings):  # the checkpoint needs the members, and then the run is over
        return {}
    leaving = {one.peer: f"leaves: {leaves[one.peer]}" for one in view.joining if one.peer in leaves}
    rest_s = facts.history.rest_s(facts.share(view), now)
    far = not view.started or (rest_s > LEAVE_S and LEAVE_S < facts.history.step_s < math.inf)
    replicas = Counter(one.stage for one in view.members if one.peer not in evicted)
    for one in view.members:
        due = one.peer in leaves and one.peer not in evicted and (far or now - leave_at[one.peer] >= LEAVE_S)
        if due and replicas[one.stage] > 1:
            replicas[one.stage] -= 1
            leaving[one.peer] = f"leaves in the middle of step {view.step}: {leaves[one.peer]}"
    return leaving


def _takeovers(
    view: View, members: tuple[Member, ...], joining: tuple[Member, ...], facts: Facts, settings: Settings, now: float
) -> tuple[Move, ...]:
    """Who moves to a leaver's stage in the middle of the step, since its end is far; else commit.py moves it, with nothing redone."""
    far = facts.history.rest_s(facts.share(view), now) > MOVE_AT_ONCE_S
    if not (view.started and far and not ended(view, settings) and facts.rounds.open is None):
        return ()
    return takeovers_of_leavers(members, joining, facts, settings, now)


def _moves(
    view: View,
    members: tuple[Member, ...],
    joining: tuple[Member, ...],
    facts: Facts,
    settings: Settings,
    now: float,
) -> tuple[Move, ...]:
    """Who moves in the middle of the step, with only these left. A stage without members is recovery's."""
    if not view.started or len({member.stage for member in members}) < settings.stages:
        return ()
    known = fleet(members, joining, facts, settings, now)
    known = msgspec.structs.replace(known, left_s=left_s(view.step, facts, settings), passed=facts.share(view))
    return rebalance(known)

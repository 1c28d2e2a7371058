"""Evictions: the view without members that are silent, convicted (evictions.py) or hold a wrong state; others take over their work."""

from __future__ import annotations

import msgspec

from shoal.core.leader.evictions import evicting
from shoal.core.leader.facts import Facts
from shoal.core.leader.membership import inherit, moving, owners_of
from shoal.core.leader.rebalance import Move, rebalance
from shoal.core.leader.rules import overlap
from shoal.core.leader.rules.moves import fleet, left_s
from shoal.core.leader.rules.proposal import Proposal, successor
from shoal.core.messages import Member, Peer, Settings, View

DOUBT_BEATS = 3  # a peer whose connections broke is dead, or sends a heartbeat within this many beats


def remove(view: View, facts: Facts, settings: Settings, now: float) -> Proposal | None:
    """Evict the silent, the guilty and joiners with a wrong state; members with a wrong state download it again. Where that leaves a
    stage too thin, others move there at once: the end of the step may be far."""
    evidence = facts.evidence
    if not (facts.scan or evidence.guilty or evidence.stale or evidence.unfit):
        return None
    evicted = _evicted(view, facts, settings, now)
    again = [one for one in view.members if one.peer in evidence.stale and one.peer not in evicted]
    if not evicted and not again:
        return None
    reasons = [f"{peer} {why}" for peer, why in evicted.items()]
    reasons += [f"{member.peer} downloads its state again: {evidence.stale[member.peer]}" for member in again]
    left = set(evicted) | {member.peer for member in again}
    members = tuple(member for member in view.members if member.peer not in left)
    joining = tuple(member for member in view.joining if member.peer not in left)
    joining += tuple(msgspec.structs.replace(member, back=True) for member in again)
    moves = _moves(view, members, joining, facts, settings, now) if evicted else ()
    members, joining = moving(members, joining, moves)
    reasons += [move.reason for move in moves]
    left |= {move.peer for move in moves}
    redone = sum(len(ledger.books.get(peer, ())) for ledger in facts.ledgers.values() for peer in left)
    killed = sum(peer in evicted for peer in view.voters)
    account = view.account
    changes = {
        "members": members,
        "joining": joining,
        "owners": inherit(view, members, facts.ledger(view.work).open(members)),
        "fenced": (*view.fenced, *(member for member in view.members if member.peer in left)),
        "account": msgspec.structs.replace(account, redone=account.redone + redone, killed=account.killed + killed),
        "evicted": evicting(view.evicted, [peer for peer in evicted if peer in evidence.guilty]),
    }
    if view.ahead and opens_again(view, left, facts):
        changes |= overlap.opened_again(view)
        changes["owners"] = owners_of(members, settings.microbatches) if members else ()
        reasons.append(f"step {view.step} is opened again")
    return Proposal(successor(view, reasons, **changes), moves)


def opens_again(view: View, left: set[Peer], facts: Facts) -> bool:
    """The closed step lacks books without these peers: it must be computed again before it can be averaged."""
    closed = facts.ledger(view.step)
    return not closed.complete(view.members) or any(bool(closed.books.get(peer)) for peer in left)


def _evicted(view: View, facts: Facts, settings: Settings, now: float) -> dict[Peer, str]:
    """Who is evicted, and why. A leader does not evict itself."""
    evicted: dict[Peer, str] = {}
    for peer in [member.peer for member in view.members + view.joining if member.peer != facts.name]:
        silence = now - facts.heard.get(peer, now)
        if silence > settings.silence_s:
            evicted[peer] = f"silent for {silence:.1f} s"
        elif now - facts.doubted.get(peer, now) >= DOUBT_BEATS * settings.beat_s:
            evicted[peer] = f"cannot be reached, silent for {silence:.1f} s"
        elif peer in facts.evidence.guilty:
            evicted[peer] = facts.evidence.guilty[peer]
        elif peer in facts.evidence.unfit:
            evicted[peer] = facts.evidence.unfit[peer]
    return evicted


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

"""Lists of a view's members: how they change when peers join, leave and move, and which member owns which microbatch.

For the rules (rules/), which make the next view.
"""

from __future__ import annotations

from collections.abc import Collection
from heapq import heapify, heapreplace

import msgspec

from shoal.core.leader.rebalance import Move
from shoal.core.messages import Account, Member, Newcomer, Peer, Settings, View
from shoal.core.names import THIRD, invite_of, key_of

FEW_REST = 2  # members that may rest in any case


def moving(
    members: tuple[Member, ...], joining: tuple[Member, ...], moves: tuple[Move, ...]
) -> tuple[tuple[Member, ...], tuple[Member, ...]]:
    """Members and joiners after these moves: a peer that moves joins its new stage and downloads its state."""
    going = {move.peer for move in moves}
    stay = tuple(member for member in members if member.peer not in going)
    return stay, joining + tuple(Member(peer=move.peer, stage=move.stage, back=True) for move in moves)


def arrived(joiners: tuple[Member, ...], number: int) -> tuple[Member, ...]:
    """These joiners as members, from the view of that number on."""
    return tuple(msgspec.structs.replace(member, back=False, since=number) for member in joiners)


def counting(account: Account, joiners: tuple[Member, ...], issued: int = 0) -> Account:
    """The account with so many more microbatches issued, and with the joiners that have never been members."""
    new = sum(not member.back for member in joiners)
    return msgspec.structs.replace(account, issued=account.issued + issued, joined=account.joined + new)


def names(members: tuple[Member, ...]) -> set[Peer]:
    return {member.peer for member in members}


def newcomers(before: View, after: View, settings: Settings) -> tuple[Newcomer, ...]:
    """Keys on probation in `after`, the next view. Whoever is there when the run begins is none, nor who came by the founder's invite."""
    if not settings.probation:
        return ()
    known = {one.key: min(one.since, after.step) for one in before.newcomers}
    there = {key_of(one.peer) for one in before.members + before.joining}
    serving = {key_of(one.peer) for one in after.members}
    since: dict[str, int] = {}
    for one in after.members + after.joining:
        key = key_of(one.peer)
        new = (before.started or before.epoch > 0) and key not in there and invite_of(one.peer) != after.founder
        if new or key in known:
            since[key] = known.get(key, after.step) if key in serving else after.step
    return tuple(Newcomer(key, step) for key, step in since.items() if after.step - step < settings.probation)


def on_probation(view: View) -> set[Peer]:
    """Members and joiners with a new key."""
    keys = {one.key for one in view.newcomers}
    return {one.peer for one in view.members + view.joining if keys and key_of(one.peer) in keys}


def most_resting(members: int) -> int:
    """Of so many: where others took over from more, the fault is not theirs, and followers doubt a leader that lets more rest."""
    return max(FEW_REST, members // THIRD)


def owners_of(
    members: tuple[Member, ...], microbatches: int, rest: Collection[Peer] = (), few: Collection[Peer] = ()
) -> tuple[int, ...]:
    """Microbatch i is owned by member i modulo their number; members with a seat in the plan come first, by seat. Those that `rest` own
    nothing, and the `few` together every THIRD microbatch at most, unless nobody else is there."""
    turn = _turn(members)
    at = [i for i in turn if members[i].peer not in rest] or turn
    most = [i for i in at if members[i].peer not in few]
    if not most or THIRD * (len(at) - len(most)) <= len(at):
        return tuple(at[i % len(at)] for i in range(microbatches))
    new = [i for i in at if members[i].peer in few]
    return tuple(new[i // THIRD % len(new)] if i % THIRD == 0 else most[i % len(most)] for i in range(microbatches))


def _turn(members: tuple[Member, ...]) -> list[int]:
    """Whose turn it is to own one, after whom."""
    return sorted(range(len(members)), key=lambda i: (members[i].seat < 0, members[i].seat, i))


def may_rest(view: View, new: Collection[Peer]) -> list[Collection[Peer]]:
    """Who may have rested, so that `view` has the owners that it has: all that own none; those that others were preferred to, where there
    are fewer microbatches than members; with `new` keys among them or without; nobody."""
    owns = set(view.owners)
    turn = _turn(view.members)
    idle = [view.members[i].peer for i in turn if i not in owns]
    last = max((at for at, i in enumerate(turn) if i in owns), default=0)
    passed = [view.members[i].peer for i in turn[:last] if i not in owns]
    known = [[peer for peer in peers if peer not in new] for peers in (idle, passed)]
    return [known[0], known[1], idle, passed, ()]


def owned(
    members: tuple[Member, ...], microbatches: int, rest: Collection[Peer], new: Collection[Peer], settings: Settings
) -> tuple[int, ...]:
    """Owners of a step. Whoever owns a microbatch chooses who serves it, so that peers with `new` keys own none; where owners serve
    what they own, a third together."""
    if settings.home:
        return owners_of(members, microbatches, rest, new)
    out = {*rest, *new}
    return owners_of(members, microbatches, out if any(one.peer not in out for one in members) else new)


def inherit(view: View, members: tuple[Member, ...], unfinished: Collection[int]) -> tuple[int, ...]:
    """Owners after some members left: the others keep their microbatches, and orphaned ones go to the members with the fewest unfinished.

    Dealt out in turn they would pile up at the view's first members: of 29 members two owned 21 of 60 unfinished microbatches."""
    if not members or not view.owners:
        return ()
    position = {member.peer: at for at, member in enumerate(members)}
    owners = [position.get(view.members[owner].peer, -1) for owner in view.owners]
    left = [0] * len(members)
    for index, at in enumerate(owners):
        if at >= 0:
            left[at] += index in unfinished
    new = on_probation(view)
    able = [at for at, member in enumerate(members) if member.peer not in new] or range(len(members))
    least = [(left[at], at) for at in able]
    heapify(least)
    for index, at in enumerate(owners):
        if at < 0:
            count, owners[index] = least[0]
            heapreplace(least, (count + (index in unfinished), owners[index]))
    return tuple(owners)

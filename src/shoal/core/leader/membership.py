"""Lists of a view's members: how they change when peers join, leave and move, and which member owns which microbatch.

For the rules (rules/), which make the next view.
"""

from __future__ import annotations

from collections.abc import Collection
from heapq import heapify, heapreplace

import msgspec

from shoal.core.leader.rebalance import Move
from shoal.core.messages import Account, Member, Peer, View


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


def owners_of(members: tuple[Member, ...], microbatches: int, rest: Collection[Peer] = ()) -> tuple[int, ...]:
    """Microbatch i is owned by member i modulo their number; members with a seat in the plan come first, by seat. Those that `rest` own
    nothing, unless all do."""
    able = [i for i, member in enumerate(members) if member.peer not in rest] or list(range(len(members)))
    at = sorted(able, key=lambda i: (members[i].seat < 0, members[i].seat, i))
    return tuple(at[i % len(at)] for i in range(microbatches))


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
    least = [(count, at) for at, count in enumerate(left)]
    heapify(least)
    for index, at in enumerate(owners):
        if at < 0:
            count, owners[index] = least[0]
            heapreplace(least, (count + (index in unfinished), owners[index]))
    return tuple(owners)

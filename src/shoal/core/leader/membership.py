"""Lists of a view's members: how they change when peers come, go and move, and who of them owns which microbatch.

For leader.py and recovery.py, whose rules make the next view.
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
    """Members and joiners once those have gone to download the state of their new stage."""
    going = {move.peer for move in moves}
    stay = tuple(member for member in members if member.peer not in going)
    return stay, joining + tuple(Member(peer=move.peer, stage=move.stage, back=True) for move in moves)


def arrived(joiners: tuple[Member, ...], number: int) -> tuple[Member, ...]:
    """As members, from the view of that number on."""
    return tuple(msgspec.structs.replace(member, back=False, since=number) for member in joiners)


def counting(account: Account, joiners: tuple[Member, ...], issued: int = 0) -> Account:
    """With so many microbatches more, and those of the new members that were none before."""
    new = sum(not member.back for member in joiners)
    return msgspec.structs.replace(account, issued=account.issued + issued, joined=account.joined + new)


def names(members: tuple[Member, ...]) -> set[Peer]:
    return {member.peer for member in members}


def owners_of(members: tuple[Member, ...], microbatches: int) -> tuple[int, ...]:
    """Microbatch i is owned by member i modulo their number; members with a seat in the plan come first, by seat."""
    at = sorted(range(len(members)), key=lambda i: (members[i].seat < 0, members[i].seat, i))
    return tuple(at[i % len(at)] for i in range(microbatches))


def inherit(view: View, members: tuple[Member, ...], unfinished: Collection[int]) -> tuple[int, ...]:
    """Owners after some members left: the others keep theirs, and what is orphaned goes to those who have least left to do.

    By turns it would pile up at the first of the view: 29 members of whom two owned 21 of 60 unfinished microbatches."""
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

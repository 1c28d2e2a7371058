"""How a stage's replicas add up their gradients: who owns which chunk of it, and whether a round may be taken part in.

For rounds.py, which exchanges the chunks, and for the coordinator, which may ask the same questions before it opens a round.
Pure arithmetic on what the round lists. A group of n replicas cuts the stage's flat gradient into n chunks, one owner each
(reduce-scatter, then all-gather), and every owner adds in group order, so that all replicas get the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from shoal.core.messages import Peer, Round, Share, View


class Chunks(msgspec.Struct, frozen=True):
    """Chunk c is values bounds[c] to bounds[c + 1]; owners[c] adds it up."""

    bounds: tuple[int, ...]
    owners: tuple[Peer, ...]

    def of(self, peer: Peer) -> int | None:
        """The chunk that `peer` owns; None when there are fewer values than replicas and it got none."""
        return self.owners.index(peer) if peer in self.owners else None


def split(length: int, group: Sequence[Peer]) -> Chunks:
    """Cut `length` values as evenly as whole values allow. Later replicas own nothing when length < len(group)."""
    assert group, "a group has at least one replica"
    count = max(1, min(length, len(group)))
    each, over = divmod(length, count)
    bounds = tuple(each * chunk + min(chunk, over) for chunk in range(count + 1))
    return Chunks(bounds, tuple(group[:count]))


def fenced(message: Round, view: View) -> Peer | None:
    """A peer the round lists although the agreed view has put it out, or has made it a joiner whose books are void."""
    serving = {(member.peer, member.stage) for member in view.members}
    joining = {(member.peer, member.stage) for member in view.joining}
    for stage, group in enumerate(message.groups):
        for share in group:
            seat = share.peer, stage
            if seat not in serving and (seat not in joining or share.indices):
                return share.peer
    return None


def objection(message: Round, view: View, me: Share) -> str:
    """Why `me` cannot take part in that round, in words; '' when nothing speaks against it.

    Refused here and not only by the leader: what enters an average cannot be taken out again. A peer that the agreed view does
    not know is fenced, whatever an older leader lists, and an index that two replicas bring would be counted twice."""
    outside = fenced(message, view)
    if outside is not None:
        return f"{outside} is listed, but view {view.number} has it not in that stage, or only joining"
    for stage, group in enumerate(message.groups):
        reason = _coverage(group, len(view.owners))
        if reason:
            return f"stage {stage}: {reason}"
        for share in group:
            if share.peer == me.peer and share.indices != me.indices:
                return f"the round lists {_few(share.indices)} for me, I booked {_few(me.indices)}"
    return ""


def _coverage(group: Sequence[Share], microbatches: int) -> str:
    """Every index exactly once, every replica once; else what is wrong."""
    peers = [share.peer for share in group]
    if len(set(peers)) != len(peers):
        return "a replica is listed twice"
    brought = [index for share in group for index in share.indices]
    if len(brought) == microbatches and set(brought) == set(range(microbatches)):
        return ""
    listed = sorted(brought)
    twice = [index for index, after in pairwise(listed) if index == after]
    if twice:
        return f"microbatches {_few(twice)} are brought twice"
    if listed != list(range(microbatches)):
        lacking = sorted(set(range(microbatches)) - set(listed))
        return (
            f"microbatches {_few(lacking)} are brought by nobody"
            if lacking
            else f"only {microbatches} microbatches exist"
        )
    return ""


def _few(indices: Sequence[int]) -> str:
    shown = ", ".join(str(index) for index in indices[:8])
    return f"[{shown}{', ...' if len(indices) > 8 else ''}]"

"""How a stage's replicas add up their gradients: who owns which chunk of it, and whether a round may be taken part in.

For rounds.py, which exchanges the chunks, and for the coordinator, which may ask the same questions before it opens a round.
Pure arithmetic on what the round lists. A stage's flat gradient is averaged piece by piece, so that memory for it has a bound;
most are one piece. A group of n replicas cuts a piece into n chunks, one owner each (reduce-scatter, then all-gather), and
every owner adds in group order, so that all replicas get the same bits, whatever the pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from shoal.core.messages import Peer, Round, Share, View

MOST_CHUNKS = 1 << 19  # in all pieces together: half of what a message can name


class Chunks(msgspec.Struct, frozen=True):
    """Of one piece: chunk number `first` + c is values bounds[c] to bounds[c + 1] of the gradient; owners[c] adds it up."""

    bounds: tuple[int, ...]
    owners: tuple[Peer, ...]
    first: int = 0
    last: bool = True  # no piece comes after this one

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + len(self.owners))

    def of(self, peer: Peer) -> int | None:
        """Number of the chunk that `peer` owns; None when there are fewer values than replicas and it got none."""
        return self.first + self.owners.index(peer) if peer in self.owners else None


def split(length: int, group: Sequence[Peer], most: int = 0, piece: int = 0) -> Chunks:
    """Cut `length` values into the fewest even pieces of at most `most` (0: one), and piece number `piece` into chunks, as evenly
    as whole values allow. Later replicas own nothing when a piece has fewer values than the group has replicas."""
    assert group, "a group has at least one replica"
    pieces = -(-length // max(most, len(group))) if most else 1
    pieces = max(1, min(pieces, MOST_CHUNKS // len(group)))
    start, stop = _cut(length, pieces, piece), _cut(length, pieces, piece + 1)
    count = max(1, min(stop - start, len(group)))
    bounds = tuple(start + _cut(stop - start, count, chunk) for chunk in range(count + 1))
    return Chunks(bounds, tuple(group[:count]), piece * len(group), piece + 1 == pieces)


def _cut(length: int, count: int, place: int) -> int:
    """Where part `place` of `count` even ones begins."""
    each, over = divmod(length, count)
    return each * place + min(place, over)


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

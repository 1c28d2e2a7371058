"""What peers ask the leader for, and whether a machine that asks to join computes what the leader's computes. For facts.py.

Its known answers are compared with the leader's own: a replica whose update has other bits would download its stage's state again and
again; it is refused before it downloads anything.
"""

from __future__ import annotations

from shoal.core.leader.evictions import Pauses
from shoal.core.messages import Join, KnownAnswers, Peer, Settings

TOLERANCE = {
    "float32": 1e-4,
    "bfloat16": 0.05,
}  # relative, of a network of a few layers whose sums machines order in other ways


class Requests:
    """Peers that ask to join or to leave, in the order in which they asked; and a launcher that asks for a checkpoint."""

    def __init__(self, settings: Settings) -> None:
        self.joins: dict[Peer, Join] = {}
        self.leaves: dict[Peer, str] = {}
        self.leave_at: dict[Peer, float] = {}  # when each of them asked
        self.save = False  # until a commit says that its checkpoint is saved
        self.pauses = Pauses(settings)
        self.joined_in: dict[Peer, int] = {}  # joiners: the view that made them so; what they reported before is void


def unfit(ours: KnownAnswers, theirs: KnownAnswers) -> str:
    """Why a machine with those answers does not fit, in words that say what to look at; '': it fits."""
    if theirs.dtype != ours.dtype:
        return f"it computes in {theirs.dtype or 'nothing'}, this run in {ours.dtype or 'nothing'} (train.dtype, device.executor)"
    if theirs.update != ours.update:
        return (
            "its optimizer step has other bits than the leader's: its replicas would never agree (shoal, torch, numba)"
        )
    if theirs.codes != ours.codes:
        return "it decodes known bytes to other values than the leader (shoal, torch)"
    tolerance = TOLERANCE.get(ours.dtype, 0.0)
    pairs = list(zip(ours.forward, theirs.forward, strict=False))
    near = all(abs(one - other) <= tolerance * max(1.0, abs(one)) for one, other in pairs)
    if len(theirs.forward) != len(ours.forward) or not near:
        return f"its forward pass of a known network gives {theirs.forward}, the leader's {ours.forward}"
    return ""

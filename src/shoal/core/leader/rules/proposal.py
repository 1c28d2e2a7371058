"""What a rule proposes: the view that is to follow the agreed one, with the reason in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from shoal.core.consensus.certificates import can_agree
from shoal.core.consensus.phases import transition
from shoal.core.leader.rebalance import Move
from shoal.core.messages import Peer, View
from shoal.core.replica_state import TEXT


class Proposal(msgspec.Struct, frozen=True):
    """`moves` and `norms` are what the leader remembers of its decision (history.py)."""

    view: View
    moves: tuple[Move, ...] = ()
    norms: tuple[float, ...] = ()

    @property
    def reason(self) -> str:
        return self.view.reason


def together(view: View, peers: Iterable[Peer]) -> set[Peer]:
    """As many of these, in their order, as may go with one view: those that are left are a quorum of its voters. Nobody accepts a view
    without one (member/judge.py): one that only some had accepted would stand in the way of every other. The rest go with a later view."""
    gone = set[Peer]()
    for peer in peers:
        if can_agree(view, [one for one in view.voters if one not in gone and one != peer]):
            gone.add(peer)
    return gone


def successor(view: View, reasons: Iterable[str], **changes: Any) -> View:
    """The view that follows `view`, with these changes and for these reasons. Every next view is made here,
    but not the first one, which follows none, nor an operator's (core/consensus/override.py), which keeps only what it names."""
    after = msgspec.structs.replace(view, number=view.number + 1, reason="; ".join(reasons)[:TEXT], **changes)
    assert transition(view, after) is not None, (view, after)
    return after

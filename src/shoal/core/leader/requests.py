"""What peers ask the leader for. For facts.py."""

from __future__ import annotations

from shoal.core.leader.evictions import Pauses
from shoal.core.messages import Join, Peer, Settings


class Requests:
    """Peers that ask to join or to leave, in the order in which they asked; and a launcher that asks for a checkpoint."""

    def __init__(self, settings: Settings) -> None:
        self.joins: dict[Peer, Join] = {}
        self.leaves: dict[Peer, str] = {}
        self.leave_at: dict[Peer, float] = {}  # when each of them asked
        self.save = False  # until a commit says that its checkpoint is saved
        self.pauses = Pauses(settings)
        self.joined_in: dict[Peer, int] = {}  # joiners: the view that made them so; what they reported before is void

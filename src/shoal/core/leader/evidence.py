"""What the leader holds against whom. For facts.py, which fills it, and the rules, which read it; forgotten with the leader."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.core.leader.evictions import Conduct
from shoal.core.leader.progress import Progress
from shoal.core.leader.stalls import Stalls, Takeovers
from shoal.core.leader.undo.unchecked import Values
from shoal.core.messages import Index, NonFinite, Peer, Settings, View

OF_WORK = ("work", "epoch", "since", "started")  # of a view: what is computed under it


class Evidence:
    """What is held against whom, and who is to be removed or to download its state again, with the reason."""

    def __init__(self, name: Peer, settings: Settings) -> None:
        self.conduct = Conduct()
        self.progress = Progress(name, settings)
        self.stalls = Stalls(settings)
        self.reassigning: dict[Index, str] = {}  # microbatches that need another owner
        self.takeovers: Takeovers | None = None  # who it is to be
        self.guilty: dict[Peer, str] = {}  # to be evicted
        self.values = Values()  # what checks of values have shown
        self.unfit: dict[Peer, str] = {}  # joiners that must begin anew
        self.stale: dict[Peer, str] = {}  # members that must download their state again
        self.resigns = ""  # why this peer should not lead
        # Of what is computed now, by step, stage and microbatch: by the replica's key.
        self.nonfinite: dict[tuple[int, int, Index], dict[str, NonFinite]] = {}

    def on_view(self, before: View | None, view: View, present: Iterable[Peer], now: float) -> None:
        self.progress.on_view(before, view, now)
        self.conduct.keep(present, (one.key for one in view.evicted))
        self.values.on_view(before, view, present)
        if before is None or any(getattr(before, name) != getattr(view, name) for name in OF_WORK):
            self.stalls.on_step(now, first=before is None)
        self.stalls.on_view(view)
        self.reassigning, self.takeovers = {}, None

"""What is held against whom, and who is to be removed or to download its state again, with the reason. For facts.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shoal.core.leader.audits.audits import Audits
from shoal.core.leader.evictions import Conduct
from shoal.core.leader.progress import Progress
from shoal.core.leader.stalls import Stalls, Takeovers
from shoal.core.messages import Index, NonFinite, Peer, Settings, View

Chance = Callable[[], float]  # numbers from 0 up to 1 that nobody else can foresee

OF_WORK = ("work", "epoch", "since", "started")  # of a view: what is computed under it


class Evidence:
    def __init__(self, name: Peer, settings: Settings, chance: Chance) -> None:
        self.conduct = Conduct()
        self.audits = Audits(settings, chance)
        self.progress = Progress(name, settings)
        self.stalls = Stalls(settings)
        self.reassigning: dict[Index, str] = {}  # microbatches that need another owner
        self.takeovers: Takeovers | None = None  # who it is to be
        self.guilty: dict[Peer, str] = {}  # to be evicted
        self.unfit: dict[Peer, str] = {}  # joiners that must begin anew
        self.stale: dict[Peer, str] = {}  # members that must download their state again
        self.resigns = ""  # why this peer should not lead
        # Of what is computed now, by step, stage and microbatch: by the replica's key.
        self.nonfinite: dict[tuple[int, int, Index], dict[str, NonFinite]] = {}

    def on_view(self, before: View | None, view: View, present: Iterable[Peer], now: float) -> None:
        self.progress.on_view(before, view, now)
        self.conduct.keep(present, (one.key for one in view.evicted))
        if before is None or any(getattr(before, name) != getattr(view, name) for name in OF_WORK):
            self.stalls.on_step(now, first=before is None)
        self.stalls.on_view(view)
        self.reassigning, self.takeovers = {}, None

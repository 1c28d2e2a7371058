"""What is held against whom: the parts that judge, and who is to go, or to download its state again. Of facts.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shoal.core.leader.audits.audits import Audits
from shoal.core.leader.books.jams import Jams
from shoal.core.leader.books.stalls import Stalls, Takeovers
from shoal.core.leader.books.tails import Tails
from shoal.core.leader.evictions import Conduct
from shoal.core.leader.progress import Progress
from shoal.core.leader.undo.unchecked import Values
from shoal.core.messages import Booker, Index, NonFinite, Peer, Settings, View

Chance = Callable[[], float]  # numbers from 0 up to 1 that nobody else can foresee

OF_WORK = ("work", "epoch", "since", "started")  # of a view: what is computed under it


class Evidence:
    """What is held against whom, and who is to be removed or to download its state again, with the reason."""

    def __init__(self, name: Peer, settings: Settings, chance: Chance) -> None:
        self.conduct = Conduct()
        self.audits = Audits(settings, chance)
        self.progress = Progress(name, settings)
        self.stalls, self.jams, self.tails = Stalls(settings), Jams(settings), Tails(settings)
        self.reassigning: dict[Index, str] = {}  # microbatches that need another owner
        self.takeovers: Takeovers | None = None  # who it is to be
        self.guilty: dict[Peer, str] = {}  # to be evicted
        self.values = Values()  # what checks of values have shown
        self.unfit: dict[Peer, str] = {}  # joiners that must begin anew
        self.stale: dict[Peer, str] = {}  # members that must download their state again
        self.parted: dict[Peer, str] = {}  # members that cannot go on beside their stage's only other one
        self.resigns = ""  # why this peer should not lead
        # Of what is computed now, by step, stage and microbatch: by the replica's key.
        self.nonfinite: dict[tuple[int, int, Index], dict[str, NonFinite]] = {}

    def on_view(self, before: View | None, view: View, present: Iterable[Peer], now: float) -> None:
        self.progress.on_view(before, view, now)
        present = list(present)
        self.conduct.keep(present, (one.key for one in view.evicted))
        self.values.on_view(before, view, present)
        if before is None or any(getattr(before, name) != getattr(view, name) for name in OF_WORK):
            self.stalls.on_step(now, first=before is None)
            self.jams.on_step(now)
        if before is None or (before.epoch, before.work, before.owners) != (view.epoch, view.work, view.owners):
            self.tails.begin(view, now)
        self.stalls.on_view(view)
        self.tails.keep(present)
        self.reassigning, self.takeovers = {}, None

    def forgive(self, gap_s: float, now: float) -> None:
        """This process was stopped for `gap_s`: what others sent meanwhile is still to be read."""
        self.progress.forgive(gap_s, now)
        self.stalls.forgive(now)
        self.jams.clear()
        self.tails.clear()
        self.reassigning = {}

    def on_answer(self, peer: Peer, answer: Booker, now: float) -> None:
        """An owner, or a server, says where a microbatch is."""
        self.stalls.on_answer(peer, answer, now)
        self.jams.on_answer(peer, answer, now)

"""Rounds of the step that is trained: the one that is open, and what became of those before it. For facts.py and leader.py.

A round averages the gradients of every stage's replicas (core/allreduce). The leader sends it, collects a Reduced from every
participant, and tries again with a longer pause when one gives up or sums differ. When a participant is lost, the next round is new for its
stage alone: the exchanges of the others go on.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from shoal.core.leader.ledger import Doubled
from shoal.core.leader.progress import RoundWatch
from shoal.core.messages import Peer, Reduced, Round, RoundFailed, RoundWaits, Settings, Stage

DISAGREEMENTS = 2  # rounds whose sums differ within a stage before the minority must download its state again
PAUSES = 2  # doublings of the pause before a round is tried again
ROUNDS_PER_TERM = 1 << 20  # round numbers are unique without asking: the leader's term, then its own count


class OpenRound(msgspec.Struct):
    """A round that was sent, and its participants' reports so far."""

    message: Round
    watch: RoundWatch
    sent_at: dict[Peer, float]  # by participant
    reduced: dict[Peer, Reduced] = {}

    @property
    def complete(self) -> bool:
        """Every participant has reported its reduced gradient."""
        return len(self.reduced) >= sum(len(group) for group in self.message.groups)

    def number_of(self, peer: Peer) -> int | None:
        """The round that the exchange of that participant's stage began in."""
        stages = (stage for stage, group in enumerate(self.message.groups) if any(one.peer == peer for one in group))
        return next((self.message.round_of(stage) for stage in stages), None)


class StepRounds:
    """`open` is None between two rounds. The rest is of the step that is trained, but for `count`, which is of the leader's term."""

    def __init__(self) -> None:
        self.open: OpenRound | None = None
        self.interrupted: Round | None = (
            None  # of the step; since then participants were lost, and it has not failed otherwise
        )
        self.count = 0
        self.failures: Counter[Peer | tuple[Peer, Peer]] = Counter()  # by who gave up, and by (who, because of whom)
        self.tries = 0  # rounds that had to be tried again
        self.not_before = float("-inf")  # no round is opened earlier: one has just failed
        self.disagreements = 0  # rounds in which replicas reported different sums or norms
        self.asked_owner: tuple[Doubled, float] | None = None  # an owner was asked who booked this, and since when
        self.differing: dict[Stage, float] = {}  # stages whose replicas hold different parameters, and since when

    def on_step(self) -> None:
        """A step begins."""
        self.interrupted = None
        self.failures.clear()
        self.differing.clear()
        self.tries, self.not_before, self.disagreements, self.asked_owner = 0, float("-inf"), 0, None

    def interrupt(self) -> None:
        """Close the round, since participants are lost: their stages repeat it."""
        if self.open is not None:
            self.interrupted = self.open.message
        self.open = None

    def retry(self, settings: Settings, now: float) -> None:
        """Close the round; all stages repeat it, after a pause that doubles."""
        self.open = self.interrupted = None
        self.not_before = now + settings.heartbeat_s * 2 ** min(self.tries, PAUSES)
        self.tries += 1

    def opened(self, message: Round, settings: Settings, now: float) -> None:
        peers = [share.peer for group in message.groups for share in group]
        self.open = OpenRound(message, RoundWatch(message, settings, now), dict.fromkeys(peers, now), {})

    def reporting(self, peer: Peer, message: Reduced | RoundFailed | RoundWaits) -> OpenRound | None:
        """The open round, if that is what its participant `peer` reports on."""
        if self.open is None or peer not in self.open.sent_at:
            return None
        of, number = self.open.message, self.open.number_of(peer)
        same = (of.epoch, of.step, number) == (message.epoch, message.step, message.round)
        return self.open if same else None

    def forgive(self, gap_s: float, now: float) -> None:
        """This process was stopped for `gap_s`: no peer is late for that time."""
        if self.open is not None:
            self.open.watch.forgive(gap_s, now)
        self.differing = {stage: min(now, since + gap_s) for stage, since in self.differing.items()}
        if self.asked_owner is not None:
            self.asked_owner = self.asked_owner[0], min(now, self.asked_owner[1] + gap_s)

"""How a replica waits for what is missing in a round: when it asks for it, when the leader learns of it, when that is withdrawn; and
when what others ask for is sent again. For rounds.py.

What is missing is asked for after the usual time of a round, then after three of them and after each further one. The sender
answers from the second time on, and not before its line should have passed what it sent: the first copy may be on its way. Nothing new
for several usual times is in vain: it is reported to the leader with every heartbeat, and asked for as often, since a message can be lost,
and its second copy too. Whatever arrives after all withdraws the report. Whoever is asked in vain for a sum reports at once whose part
it lacks itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import msgspec

from shoal.core.latency import COLD_Bps, Usual
from shoal.core.messages import Peer, Share

TELL = 4  # usual times of a round without anything new, before the leader learns whom I wait for,
TELL_BEATS = 12  # but not sooner: a peer may be busy with a long hop before it begins
LEAST = 0.5  # of min_request_timeout_s: nothing is asked for sooner, as asking costs nothing and a chunk may be lost
LEAST_Bps = 6e5  # a line is not believed to be narrower: the rate is what the leader says
FP32 = 4  # bytes of a value
NEWCOMER = 4  # times that a round may take longer with somebody new
LEFTOVERS = 3  # times that a round may take longer after abandoned ones, whose chunks are still on their way
QUICK, ASKS = 12, 6  # after so many times the pause between two doubles, as often as that,
SHARED = 1.5  # times that a line takes longer for a round than its bytes say: tensors and what goes to joiners have turns, too
VAIN = 4  # but not sooner than so many times after the leader has learned whom I wait for: it judges by what comes then


class Pace(msgspec.Struct, frozen=True, dict=True):
    """What a replica's waiting is measured in, seconds: a heartbeat, the least for any request, a usual round, one that takes longer for
    all that may lengthen it, and a piece of a usual one."""

    beat_s: float
    least_s: float
    usual_s: float
    slow_s: float
    piece_s: float

    @cached_property
    def patience_s(self) -> float:
        return max(LEAST * self.least_s, self.usual_s)

    @cached_property
    def vain_s(self) -> float:
        """Without anything new for so long a replica waits in vain."""
        return max(TELL * max(self.patience_s, self.slow_s), TELL_BEATS * self.beat_s)


class RoundTimes:
    """How long a round usually takes, from its beginning to its reduced gradient."""

    def __init__(self, beat_s: float, least_s: float) -> None:
        self._beat_s, self._least_s = beat_s, least_s
        self._usual: Usual | None = None
        self._length, self._narrow_Bps = 0, COLD_Bps
        self._group: set[Peer] = set()  # who was in the last round that was done,
        self._now: set[Peer] = set()  # and who is in this one
        self._abandoned = 0  # rounds in a row that ended early: what was sent in them may still fill the lines

    def begin(self, length: int, group: Sequence[Share]) -> None:
        """A round of so many values."""
        rates = [1e3 * share.line_rate for share in group if share.line_rate]
        self._length, self._narrow_Bps = length, min([COLD_Bps, *rates])
        self._now = {share.peer for share in group}

    def end(self, seconds: float | None, lost: bool) -> None:
        """A round took so long; None: it was abandoned. What is `lost` says nothing of the lines, and would make the next loss be asked for
        later and later."""
        if seconds is None:
            self._abandoned = min(self._abandoned + 1, LEFTOVERS)
            return
        self._abandoned, self._group = 0, self._now
        if not lost and len(self._now) > 1:
            self._usual = self._usual or Usual(self._cold_s(COLD_Bps))
            self._usual.add(seconds)

    def pace(self, values: int) -> Pace:
        """For a piece of so many values. Whoever is new in the group may have a narrower line than the others, though not narrower than is
        thought of a line that nobody knows."""
        narrow_s = self._cold_s(self._narrow_Bps)
        usual_s = slow_s = self._usual.value if self._usual is not None else self._cold_s(COLD_Bps)
        if self._usual is None:
            slow_s = narrow_s
        elif not self._now <= self._group:
            slow_s = max(usual_s, min(NEWCOMER * usual_s, narrow_s))
        piece_s = usual_s * values / max(1, self._length)
        return Pace(self._beat_s, self._least_s, usual_s, slow_s * (1 + self._abandoned), piece_s)

    def _cold_s(self, rate_Bps: float) -> float:
        return FP32 * self._length / rate_Bps


class Waiting(msgspec.Struct):
    """Of one round, and the piece of it that is under way."""

    ask_at: float
    last_new: float  # when a chunk last arrived, or the piece began
    asks: int = 0  # of this piece
    reported_at: float | None = None  # when the leader last learned whom I wait for; None: nobody, as far as it knows

    def report_at(self, pace: Pace) -> float:
        return self.last_new + pace.vain_s if self.reported_at is None else self.reported_at + pace.beat_s

    def on_new(self, now: float) -> bool:
        """Something arrived. Returns whether a report is to be withdrawn."""
        reported, self.last_new, self.reported_at = self.reported_at is not None, now, None
        return reported

    def on_piece(self, pace: Pace, now: float) -> bool:
        """The next piece begins. Returns whether a report is to be withdrawn."""
        self.asks, self.ask_at = 0, now + pace.patience_s
        return self.on_new(now)

    def on_report(self, now: float) -> None:
        """The leader learns now whom I wait for; with the first report what is missing is asked for, too."""
        if self.reported_at is None:
            self.ask_at, self.asks = now, min(self.asks, QUICK - VAIN)
        self.reported_at = now

    def in_vain(self, pace: Pace, now: float) -> bool:
        return now >= self.last_new + pace.vain_s

    def on_asking(self, pace: Pace, now: float) -> None:
        """What is missing is asked for now."""
        self.asks += 1
        if self.reported_at is not None:
            pause_s = max(pace.beat_s, pace.piece_s)
        else:
            pause_s = 2 * pace.patience_s if self.asks == 1 else max(pace.beat_s, pace.patience_s)
        self.ask_at = now + pause_s * 2 ** min(max(0, self.asks - QUICK), ASKS)


NEVER = float("-inf")
Chunk = tuple[Peer, int, bool]  # to whom, which, and whether it is a sum


class Copy(msgspec.Struct):
    """The newest copy of a chunk that was sent, when my line should have passed it, how many there were before, and whether it has been
    asked for since the first."""

    at: float = NEVER
    left_at: float = NEVER
    before: int = 0
    asked: bool = False


class Copies:
    """What was sent in a round. It may be on its way, where another copy would only make that longer. `line_rate`: of my line, kB/s.
    `free_at`: when that should have passed what was sent in rounds before."""

    def __init__(self, line_rate: int = 0, free_at: float = NEVER) -> None:
        self._sent: dict[Chunk, Copy] = {}
        self._line_Bps = max(1e3 * line_rate, LEAST_Bps) if line_rate else COLD_Bps
        self.free_at = free_at  # when my line should have passed all that was sent

    def add(self, chunk: Chunk, values: int, now: float) -> None:
        self._sent[chunk] = Copy(left_at=self.take(values, now))

    def keep(self, wanted: Callable[[Chunk], bool]) -> None:
        self._sent = {chunk: copy for chunk, copy in self._sent.items() if wanted(chunk)}

    def again(self, chunk: Chunk, values: int, vain: bool, now: float) -> bool:
        """Asked for a chunk of so many values: whether it is sent again now. When it was asked for twice, or in vain, and should have left
        my line; and a long one less and less often."""
        copy = self._sent.setdefault(chunk, Copy(asked=True))
        asked, copy.asked = copy.asked or vain, True
        pause_s = FP32 * values / COLD_Bps * 2**copy.before
        if not asked or now < copy.left_at or now - copy.at < pause_s:
            return False
        copy.at, copy.left_at, copy.before = now, self.take(values, now), min(copy.before + 1, ASKS)
        return True

    def take(self, values: int, now: float) -> float:
        """So many are sent: when my line should have passed them."""
        self.free_at = max(self.free_at, now) + SHARED * FP32 * values / self._line_Bps
        return self.free_at

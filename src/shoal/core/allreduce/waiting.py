"""How a replica waits for what is missing in a round: when it asks for it, when the leader learns of it, when that is withdrawn.
For rounds.py.

What is missing is asked for after the usual time of a round, then after three of them and after each further one. The sender
answers from the second time on: the first copy may be on its way. Nothing new for several usual times is in vain: it is reported to the
leader with every heartbeat, and asked for as often, since a message can be lost, and its second copy too. Whatever arrives after all
withdraws the report. Whoever is asked in vain for a sum reports at once whose part it lacks itself.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from shoal.core.latency import Usual

TELL = 4  # usual times of a round without anything new, before the leader learns whom I wait for,
TELL_BEATS = 12  # but not sooner: a peer may be busy with a long hop before it begins
COLD_Bps = 5e6  # what a replica is thought to send and receive before a round has shown it, unless its line is planned
FP32 = 4  # bytes of a value
LEFTOVERS = 3  # abandoned rounds whose chunks may still be on their way
QUICK, ASKS = 12, 6  # after so many times the pause between two doubles, as often as that


class Pace(msgspec.Struct, frozen=True):
    """What a replica's waiting is measured in, seconds: a heartbeat, the least for any request, a usual round and a piece of it."""

    beat_s: float
    least_s: float
    usual_s: float
    piece_s: float

    @property
    def patience_s(self) -> float:
        return max(self.least_s, self.usual_s)

    @property
    def vain_s(self) -> float:
        """Without anything new for so long a replica waits in vain."""
        return max(TELL * self.patience_s, TELL_BEATS * self.beat_s)


class RoundTimes:
    """How long a round usually takes, from its beginning to its reduced gradient."""

    def __init__(self, beat_s: float, least_s: float) -> None:
        self._beat_s, self._least_s = beat_s, least_s
        self._usual: Usual | None = None
        self._length, self._cold_s = 0, 0.0
        self._abandoned = 0  # rounds in a row that ended early: what was sent in them may still fill the lines

    def begin(self, length: int, line_rates: Iterable[int]) -> None:
        """A round of so many values, in a group with these lines (kB/s, 0: not known)."""
        self._length = length
        self._cold_s = FP32 * length / min([COLD_Bps, *(1e3 * rate for rate in line_rates if rate)])

    def end(self, seconds: float | None, patient: bool) -> None:
        """A round took so long; None: it was abandoned. `patient`: nothing had to be sent again. What was lost says nothing of the
        lines, and the next loss would be asked for later and later."""
        self._abandoned = self._abandoned + 1 if seconds is None else 0
        if seconds is not None and patient:
            self._usual = self._usual or Usual(self._cold_s)
            self._usual.add(seconds)

    def pace(self, values: int) -> Pace:
        """For a piece of so many values."""
        usual_s = self._usual.value if self._usual is not None else self._cold_s
        piece_s = usual_s * values / max(1, self._length)
        return Pace(self._beat_s, self._least_s, usual_s * (1 + min(self._abandoned, LEFTOVERS)), piece_s)


class Waiting(msgspec.Struct):
    """Of one round, and the piece of it that is under way."""

    ask_at: float
    last_new: float  # when a chunk last arrived, or the piece began
    asks: int = 0  # of this piece
    again: bool = False  # something of this round was asked for more than once, so that it came a second time
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
            self.ask_at = now
        self.reported_at = now

    def in_vain(self, pace: Pace, now: float) -> bool:
        return now >= self.last_new + pace.vain_s

    def on_asking(self, pace: Pace, now: float) -> None:
        """What is missing is asked for now."""
        self.asks += 1
        self.again |= self.asks > 1
        if self.reported_at is not None:
            pause_s = max(pace.beat_s, pace.piece_s)
        else:
            pause_s = 2 * pace.patience_s if self.asks == 1 else max(pace.beat_s, pace.patience_s)
        self.ask_at = now + pause_s * 2 ** min(max(0, self.asks - QUICK), ASKS)

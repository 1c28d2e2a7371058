"""How this machine's peers stand: who serves, loads, is slow or silent, and who has ended lately. For watch.py.

Fed with the same lines as watch.py, and with the ends of processes; `now` is of one monotonic clock.
"""

from __future__ import annotations

import msgspec

from shoal.dashboard.terminal import PeerLine
from shoal.runtime.records.report import PeerProgress
from shoal.units import duration

SILENT_S = 3.0  # six reports that a process of this machine should have written
SLOW_RATIO = 0.5  # of the fastest replica's rate in the same stage
SHOWN_S = 120.0  # that an ended peer is still shown


class Presence:
    """Times of the local peers, by label."""

    def __init__(self) -> None:
        self._started_s: dict[str, float] = {}
        self._join_s: dict[str, float] = {}  # from the first line of its process until it was first ready
        self._reported_s: dict[str, float] = {}
        self._ended: dict[str, tuple[float, PeerLine]] = {}

    def listening(self, label: str, now: float) -> None:
        self._started_s.setdefault(label, now)

    def reported(self, label: str, progress: PeerProgress, now: float) -> None:
        self._reported_s[label] = now
        if progress.ready and label in self._started_s:
            self._join_s.setdefault(label, now - self._started_s[label])

    def ended(self, label: str, progress: PeerProgress | None, now: float, *, well: bool) -> None:
        """`progress`: its last; None: it never reported."""
        if progress is not None:
            line = self._line(label, progress, now)
            line = msgspec.structs.replace(line, ready=False, leading=False, ended="left" if well else "gone")
            self._ended[label] = now, line

    def lines(self, standing: dict[str, PeerProgress], now: float) -> list[PeerLine]:
        """Living peers in the order of their numbers."""
        lines = [self._line(label, standing[label], now) for label in sorted(standing, key=natural)]
        fastest: dict[int | None, PeerLine] = {}
        for line in lines:
            if line.ready and (line.stage not in fastest or line.rate > fastest[line.stage].rate):
                fastest[line.stage] = line
        return [self._judged(line, fastest.get(line.stage)) for line in lines]

    def ended_lately(self, now: float) -> list[PeerLine]:
        """Peers that ended within the last SHOWN_S, the newest first."""
        self._ended = {label: each for label, each in self._ended.items() if now - each[0] < SHOWN_S}
        newest = sorted(self._ended.values(), key=lambda each: -each[0])
        return [msgspec.structs.replace(line, silent_s=now - ended_s) for ended_s, line in newest]

    def _line(self, label: str, progress: PeerProgress, now: float) -> PeerLine:
        return PeerLine(
            label=label,
            stage=progress.stage,
            ready=progress.ready,
            leading=progress.leading,
            queue_s=progress.queue_s,
            rate=progress.rate,
            sent=progress.sent,
            received=progress.received,
            kept=progress.kept,
            silent_s=now - self._reported_s.get(label, now),
            join_s=self._join_s.get(label, 0.0),
        )

    def _judged(self, line: PeerLine, fastest: PeerLine | None) -> PeerLine:
        if line.silent_s >= SILENT_S:
            slow = f"its process has reported nothing for {duration(line.silent_s)}"
        elif line.ready and fastest is not None and 0 < line.rate < SLOW_RATIO * fastest.rate:
            slow = f"{line.rate:.2g} microbatches/s, where {fastest.label} of its stage has {fastest.rate:.2g}"
        else:
            return line
        return msgspec.structs.replace(line, slow=slow)


def natural(label: str) -> tuple[int, str]:
    """p2 before p10."""
    digits = "".join(filter(str.isdigit, label))
    return (int(digits) if digits else 0, label)

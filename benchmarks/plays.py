"""Several plays of one run with every message, with other delays of messages: how far each is from the others.

For forecast_check.py and forecast_kills.py. A message that comes later can make a leader move another peer, so that a single play is no
measure for a forecast: it is compared with the median of several, and no forecast can be nearer to one play than the plays are to one
another.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def from_others(plays: Sequence[float]) -> list[float]:
    """By how many percent each differs from the median of the others; none of one."""
    rest = [statistics.median([*plays[:at], *plays[at + 1 :]]) for at in range(len(plays))] if len(plays) > 1 else []
    return [abs(100 * (one / other - 1)) for one, other in zip(plays, rest, strict=False)]


def spread(apart: Sequence[float]) -> list[float]:
    """The median and the worst of those percents, for a report."""
    return [round(statistics.median(apart), 2), round(max(apart), 2)] if apart else []


def print_spread(apart: Sequence[float]) -> None:
    if apart:
        middle, worst = statistics.median(apart), max(apart)
        print(f"one play from the median of the others: median {middle:.1f} %, worst {worst:.1f} %")

"""What TCP connections carry of lines that they share, for clusters whose lines are real ones (`tcp = true` in a cluster file).

The model of a line (prediction/lines.py) passes one tensor after another at the line's rate. Real connections begin each tensor anew and
share a receiver's line by what each has measured of it, which follows others' pauses within round trips; of unlike round trips the short
ones take more than their part. A line is idle meanwhile, though bytes wait for it. docs/design/2026-11-24-lines-under-tcp.md
"""

from __future__ import annotations

import numpy as np

from shoal.planner.costs.arrays import Floats

# Seconds in which a line is idle beside a second of its bytes. From benchmarks/wan_hops.py (docs/wan.md): six hosts 50 ms apart reach 0.89
# of what lines without loss would give (9 runs, 0.85 to 0.92); eight regions, whose round trips vary by 0.45 of their mean, 0.765 (2 runs)
SHARED = 0.11
TRIP_S = 0.1  # round trips for which that was measured; of shorter ones as much less is taken, of longer ones no more
UNLIKE = 0.51  # times the standard deviation of a machine's round trips over their mean


def carried_part(delay_s: Floats) -> Floats:
    """Of each machine's lines, what connections in bursts carry. `delay_s`: one way, from each (row) to each other (column)."""
    return np.array([1 / (1 + _idle(np.delete(trips_s, at))) for at, trips_s in enumerate(delay_s + delay_s.T)])


def _idle(trips_s: Floats) -> float:
    """How long a line is idle beside a second of bytes: of a machine with these round trips to the others."""
    mean_s = float(trips_s.mean()) if trips_s.size else 0.0
    if mean_s <= 0.0:
        return 0.0
    return (SHARED + UNLIKE * float(trips_s.std()) / mean_s) * min(1.0, mean_s / TRIP_S)

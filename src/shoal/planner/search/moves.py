"""The local search of dtfm.py, compiled: one cycle of moves, and the gains that steer it.

The baseline spends most of its time here: gains are computed anew after every move. Sums run over the devices in their order, so
that a seed gives the same placement on every machine. numba compiles this once per machine, as swaps.py.
"""

from __future__ import annotations

import numpy as np

from shoal.compiled import compiled
from shoal.planner.costs.arrays import Floats, Ints


@compiled
def cycle(hop: Floats, labels: Ints, locked: Ints, marked: Ints) -> float:
    """A chain of moves out of the stage with the highest gain and back into it, made in `labels`, (N,). Devices that have moved are
    marked in `locked`, (N,), stages that got one in `marked`, (S,). What it gains in seconds; -1 when nothing can move."""
    devices, stages = len(labels), len(marked)
    movers, between, highest = np.empty(stages, dtype=np.int64), np.empty((stages, stages)), np.empty(stages)
    gains(hop, labels, locked, movers, between, highest)
    home = stage = int(highest.argmax())
    if movers[home] < 0:
        return -1.0
    moved, came_from = np.empty(devices, dtype=np.int64), np.empty(devices, dtype=np.int64)
    gained, back = np.empty(devices), np.empty(devices)
    count = 0
    while count < devices:
        device, target = movers[stage], int(between[stage].argmax())
        if device < 0:
            device, target = moved[count - 1], home
        moved[count], came_from[count] = device, stage
        gained[count], back[count] = highest[stage], between[stage, home]
        count += 1
        labels[device] = target
        locked[device] = marked[target] = 1
        stage = target
        if stage == home:
            break
        gains(hop, labels, locked, movers, between, highest)
    best, kept, total = 0.0, 0, 0.0
    for move in range(1, count):
        total += gained[move - 1]
        if total + back[move] > best:
            best, kept = total + back[move], move
    for move in range(count - 1, kept, -1):
        labels[moved[move]] = came_from[move]
    labels[moved[kept]] = home
    return best


@compiled
def gains(hop: Floats, labels: Ints, locked: Ints, movers: Ints, between: Floats, highest: Floats) -> None:
    """Fills per stage the device that would leave it (-1: none may), what its move to each other stage gains, (S, S), and the most
    of these: mean time to the other stage's devices minus the time to the nearest one of the own."""
    devices, stages = len(labels), len(movers)
    least, counts = np.full(stages, np.inf), np.zeros(stages)
    movers[:] = -1
    for device in range(devices):
        stage = labels[device]
        counts[stage] += 1
        if locked[device]:
            continue
        nearest = np.inf
        for other in range(devices):
            if labels[other] == stage and other != device:
                nearest = min(nearest, hop[device, other])
        if nearest < least[stage]:
            least[stage], movers[stage] = nearest, device
    between[:] = 0.0
    for stage in range(stages):
        highest[stage] = -np.inf
        if movers[stage] < 0:
            between[stage] = -np.inf
            continue
        for other in range(devices):
            between[stage, labels[other]] += hop[movers[stage], other]
        for target in range(stages):
            gain = between[stage, target] / max(counts[target], 1.0) - least[stage]
            between[stage, target] = -np.inf if target == stage else gain
            highest[stage] = max(highest[stage], between[stage, target])

"""Sketches of sums and parts in symbols (core/allreduce/checked.py). For task_runner.py."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache

from shoal.core import messages as m
from shoal.sim.tasks.oddities import LONG, LONG_TIMES
from shoal.sim.tasks.storage import Blob, short


def checks_of(sums: Sequence[Blob], parts: Sequence[Blob], own: Sequence[str]) -> m.Result:
    """What a replica says of each sum that it has received, and of its own part of it."""
    if not own:
        return m.Result()
    held = iter(parts)
    sketches = [
        sketch
        for total, name in zip(sums, own, strict=True)
        for sketch in (sketch_of(total), sketch_of(next(held)) if name else m.Sketch())
    ]
    return m.Result(digests=tuple(short(total) for total in sums), sketches=tuple(sketches))


def sketch_of(part: Blob) -> m.Sketch:
    """Each thing that was added is a number of its own, and they add up."""
    return sketch_of_all(part[4], low=part[2], high=part[3]) if part[:1] == ("part",) else m.Sketch()


def sketch_of_all(added: Sequence[Blob], rounding: float = 0.0, low: int = 0, high: int = 1) -> m.Sketch:
    """Of what was added to the values from `low` to `high`, each of norm 1; `rounding`: by which it is off, as a share."""
    factor = (1.0 + rounding) * math.sqrt(high - low)
    numbers = [_numbers(one, low) for one in added]
    a, b, c, d = (math.fsum(each) * factor for each in zip(*numbers, strict=True)) if added else (0.0,) * 4
    return m.Sketch((a, b, c, d), math.fsum(_times(one) ** 2 for one in added) * (high - low))


@lru_cache(1 << 18)
def _numbers(one: Blob, low: int) -> tuple[float, ...]:
    """Products of a vector of norm 1 with four vectors of signs: normal, as sums of uniform numbers are. Each chunk has signs of its own:
    with the same for all, products of pieces would add up as if they were one."""
    bits = hashlib.sha256(repr((one, low)).encode()).digest()
    times = _times(one) / (8 / 12) ** 0.5
    return tuple(sum(byte / 255.0 - 0.5 for byte in bits[8 * at : 8 * at + 8]) * times for at in range(4))


def _times(one: Blob) -> float:
    return LONG_TIMES if one[5:] == (LONG,) else 1.0

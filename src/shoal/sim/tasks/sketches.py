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
    return sketch_of_all(part[4], values=part[3] - part[2]) if part[:1] == ("part",) else m.Sketch()


def sketch_of_all(added: Sequence[Blob], rounding: float = 0.0, values: int = 1) -> m.Sketch:
    """Of what was added to so many values, each of norm 1; `rounding`: by which it is off, as a share."""
    factor = (1.0 + rounding) * math.sqrt(values)
    a, b, c, d = (
        (math.fsum(numbers) * factor for numbers in zip(*map(_numbers, added), strict=True)) if added else (0.0,) * 4
    )
    return m.Sketch((a, b, c, d), math.fsum(_times(one) ** 2 for one in added) * values)


@lru_cache(1 << 16)
def _numbers(one: Blob) -> tuple[float, ...]:
    """Products of a vector of norm 1 with four vectors of signs: normal, as sums of uniform numbers are."""
    bits = hashlib.sha256(repr(one).encode()).digest()
    times = _times(one) / (8 / 12) ** 0.5
    return tuple(sum(byte / 255.0 - 0.5 for byte in bits[8 * at : 8 * at + 8]) * times for at in range(4))


def _times(one: Blob) -> float:
    return LONG_TIMES if one[5:] == (LONG,) else 1.0

"""Sketches of sums and parts in symbols (core/allreduce/checked.py). For task_runner.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from shoal.core import messages as m
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
    total = sum(_number(one) for one in part[4]) if part[:1] == ("part",) else 0.0
    return m.Sketch((total, total, total, total), float(len(part[4])) if part[:1] == ("part",) else 0.0)


@lru_cache(1 << 16)
def _number(one: Blob) -> float:
    return 1.0 + int(short(one), 16) / 2.0**64

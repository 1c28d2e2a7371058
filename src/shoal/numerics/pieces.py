"""Arithmetic over flat CPU tensors, cut into pieces for as many threads as torch has (device.threads). For rounds, the norm and digests.

NumPy's and numba's loops run outside the interpreter's lock. Bits depend neither on the threads nor on the cut.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

PIECE = 1 << 18  # values worth another thread: 0.1 ms of work, and 1 MiB of a core's cache

T = TypeVar("T")


def each(work: Callable[..., T], *columns: Sequence[Any]) -> list[T]:
    """`work` of the first of every column, of the second and so on; the results in that order."""
    threads = torch.get_num_threads()
    if min(threads, len(columns[0])) <= 1:
        return list(map(work, *columns))
    return list(_threads(threads).map(work, *columns))


def copy_(into: Tensor, source: Tensor) -> None:
    """Flat, of the same type and length. A copy from a device is the device's."""
    if source.device.type != "cpu":
        into.copy_(source)
    else:
        each(np.copyto, *_cut([into, source]))


def copied(source: Tensor) -> Tensor:
    """A copy on the CPU."""
    copy = torch.empty(source.shape, dtype=source.dtype)
    copy_(copy, source)
    return copy


def sum_of(parts: Sequence[Tensor]) -> Tensor:
    """`parts` (n,) fp32 added in this order."""
    total = torch.empty_like(parts[0])
    each(_add, *_cut([total, *parts]))
    return total


def _add(total: Any, first: Any, *others: Any) -> None:
    before = first
    for part in others:
        np.add(before, part, out=total)
        before = total
    if not others:
        np.copyto(total, first)


def _cut(tensors: Iterable[Tensor]) -> list[list[Any]]:
    """Every tensor as arrays of a PIECE."""
    return [[part.numpy() for part in torch.split(tensor.detach(), PIECE)] for tensor in tensors]


@functools.cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "shoal-pieces")

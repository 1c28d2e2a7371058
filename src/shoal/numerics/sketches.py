"""Sketches of flat fp32 tensors, by which the sums of a round are compared with their parts. The same bits on every machine."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from shoal.numerics import pieces


def hashed(values: Tensor) -> str:
    """SHA-256 of the values: an owner must not be able to choose a sum by its digest."""
    return hashlib.sha256(values.detach().contiguous().numpy().data).hexdigest()


def load() -> None:
    """The compiled loop: half a second, and several where nobody has compiled it yet, for which a round's partners would wait."""
    sketch(torch.zeros(1), "0")


def sketch(values: Tensor, digest: str) -> tuple[tuple[float, float, float, float], float]:
    """The products of `values` (n,) fp32 with four vectors of signs that follow from `digest`, and its squared norm."""
    from shoal.numerics.loops import LANES  # numba: half a second that only those who train pay
    from shoal.numerics.loops import sketch as loop

    flat = values.detach().numpy()
    whole = len(flat) - len(flat) % LANES
    parts = [flat[at : min(at + pieces.PIECE, whole)] for at in range(0, whole, pieces.PIECE)]
    firsts = [at * pieces.PIECE for at in range(len(parts))]
    if whole < len(flat):
        parts.append(np.concatenate([flat[whole:], np.zeros(LANES - len(flat) + whole, np.float32)]))
        firsts.append(whole)
    sums, seed = [np.zeros(5) for _ in parts], int(digest[:15], 16)  # 60 bits: numba's int64
    pieces.each(loop, parts, [seed] * len(parts), firsts, sums)
    a, b, c, d, squares = (math.fsum(float(one[k]) for one in sums) for k in range(5))
    return (a, b, c, d), squares

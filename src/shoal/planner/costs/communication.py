"""What a placement costs by DT-FM's formal model: seconds of communication per iteration. For the searches.

Paper: "Decentralized training of foundation models in heterogeneous environments" (arXiv 2206.01288). Claim: give every
pipeline stage a group of devices; the time of an iteration is the slowest group's gradient exchange plus the
cheapest path through the groups, and both follow from delays and bandwidths alone.

    t(d, e, c)   = a(d, e) + c / b(d, e)                                              `transfer_s`
    DataP(C)     = max over d in C of  sum over e in C, e != d, of 2 t(d, e, c_dp / |C|)       eq. 1, `data_parallel_s`
    DataP        = max over the stages' groups of DataP(C)                                     eq. 2
    w(C, C')     = min over perfect matchings of  max over matched (d, e) of t(d, e, c_pp)     eq. 3, `hop_s`
    PipeP        = 2 * the cheapest Hamiltonian path over the groups by w, both ends free      eq. 4, `path`
    Cost         = DataP + PipeP                                                               eq. 5, `cost`

The equations are numbered here, in the order in which the paper's sections 3.1 and 3.2 state them.

What we corrected against the published program: its activation size holds two slips (2024 for 2048, GiB taken as GB), so
that hops are 8 % too cheap. `PUBLISHED` keeps them, to compare with published numbers; `GPT3_XL` is right. Directions
that differ are averaged, as in the paper. Its limits stand: transfers one after another, no overlap, no compute;
step.py predicts what a step of this program takes.

Groups of equal size are an (S, n) array of device numbers. The slow parts are compiled: matching.py, paths.py.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np

from shoal.planner.costs.arrays import Floats, Ints

EXACT_PATH_MOST = 12  # stages up to which the path is exact: 2^12 * 12 partial paths


class Sizes(msgspec.Struct, frozen=True):
    """Bytes that one iteration moves."""

    activation_bytes: float  # c_pp: one pipeline's whole share, over one hop, one way
    gradient_bytes: float  # c_dp: the gradients of one stage


# GPT3-XL on 8 x 8 devices: 3 of 24 layers of 1.3e9 parameters in fp32; 61.035 sequences of 2048 x 2048 fp16 values.
GPT3_XL = Sizes(activation_bytes=2048 * 2048 * 2 * 1e6 / 2048 / 8, gradient_bytes=0.65e9)
PUBLISHED = Sizes(activation_bytes=2024 * 2048 * 2 * (1e6 / 2048 / 8) / 2**30 * 1e9, gradient_bytes=0.65e9)


class Cost(NamedTuple):
    total_s: float
    data_parallel_s: float
    pipeline_s: float
    order: tuple[int, ...]  # the groups along the path


def transfer_s(delay_s: Floats, bandwidth_Bps: Floats, nbytes: float) -> Floats:
    """t(d, e, c) for all pairs, the mean of both directions; nothing for a device and itself."""
    seconds = delay_s + nbytes / bandwidth_Bps
    seconds = (seconds + seconds.T) / 2
    np.fill_diagonal(seconds, 0.0)
    return seconds


class Model:
    """The cost of any placement of N = S * n devices on S stages of n."""

    def __init__(self, delay_s: Floats, bandwidth_Bps: Floats, stages: int, sizes: Sizes) -> None:
        devices = len(delay_s)
        if stages < 1 or devices % stages:
            fit = [str(count) for count in range(1, devices + 1) if devices % count == 0]
            raise ValueError(
                f"{devices} devices do not divide into {stages} stages of equal size; try {', '.join(fit[:8])}"
            )
        self.devices, self.stages, self.size = devices, stages, devices // stages
        self.hop = transfer_s(delay_s, bandwidth_Bps, sizes.activation_bytes)
        self.share = 2 * transfer_s(delay_s, bandwidth_Bps, sizes.gradient_bytes / self.size)

    def cost(self, groups: Ints) -> Cost:
        """Eq. 5."""
        hops = self.hops(groups)
        length, order = path(hops)
        shares = float(self.data_parallel_s(groups).max())
        return Cost(shares + 2 * length, shares, 2 * length, order)

    def data_parallel_s(self, groups: Ints) -> Floats:
        """Eq. 1 for every group, (..., n) -> (...)."""
        return np.asarray(self.share[groups[..., :, None], groups[..., None, :]].sum(axis=-1).max(axis=-1))

    def hops(self, groups: Ints) -> Floats:
        """Eq. 3 for every pair of groups, (S, n) -> (S, S)."""
        from shoal.planner.costs import matching  # numba: half a second that only searches pay

        return np.asarray(matching.hops(self.hop, groups))

    def totals_s(self, groups: Ints) -> Floats:
        """Eq. 5 for a batch of placements, (B, S, n) -> (B,)."""
        lengths = np.array([path_length(self.hops(each)) for each in groups])
        return np.asarray(self.data_parallel_s(groups).max(axis=1) + 2 * lengths)

    def lower_bound_s(self) -> float:
        """No placement costs less.

        A device exchanges at least with its n - 1 nearest ones. A device's hops cost at least its fastest link; at best the
        devices with the slowest ones share stages, so the k-th worst stage is at least as bad as device k*n of the list
        sorted by that, and a path costs at least its stages' values but the smallest one."""
        far = self.share + np.diag(np.full(self.devices, np.inf))
        exchange_s = float(np.sort(far, axis=1)[:, : self.size - 1].sum(axis=1).max())
        links = self.hop + np.diag(np.full(self.devices, np.inf))
        slowest = np.sort(links.min(axis=1))[::-1] if self.devices > 1 else np.zeros(1)
        return exchange_s + 2 * float(slowest[:: self.size][: self.stages - 1].sum())


# ------------------------------------------------------------------------------------------------- matching (eq. 3)


def bottleneck(matrix: Floats) -> float:
    """The same for one matrix of any size."""
    return matched(matrix)[0]


def matched(matrix: Floats) -> tuple[float, tuple[int, ...]]:
    """A perfect matching with the least possible largest entry: that entry, and the column of each row.

    The threshold starts at what no matching can undercut, the worst row's or column's least entry, and rises only when what is
    below it cannot match a row: the rows that were seen then reach too few columns, whatever else is done, so it must
    rise to the least entry that leads them out."""
    threshold = float(max(matrix.min(axis=1).max(), matrix.min(axis=0).max()))
    nearest = [np.argsort(row, kind="stable").tolist() for row in matrix]
    values = matrix.tolist()
    row_of: dict[int, int] = {}
    column_of: dict[int, int] = {}
    for start in range(len(values)):
        free, came_from, seen = _reached(start, nearest, values, row_of, threshold)
        while free < 0:
            threshold = min(values[row][column] for row in seen for column in nearest[row] if column not in came_from)
            free, came_from, seen = _reached(start, nearest, values, row_of, threshold)
        while free >= 0:  # turn the alternating path over
            row = came_from[free]
            row_of[free] = row
            column_of[row], free = free, column_of.get(row, -1)
    return threshold, tuple(column_of[row] for row in range(len(values)))


def _reached(
    start: int, nearest: list[list[int]], values: list[list[float]], row_of: dict[int, int], threshold: float
) -> tuple[int, dict[int, int], list[int]]:
    """A free column that entries up to `threshold` lead to, or -1; from which row each column was reached; the rows seen."""
    came_from: dict[int, int] = {}
    stack, seen = [start], [start]
    while stack:
        row = stack.pop()
        for column in nearest[row]:
            if values[row][column] > threshold:
                break
            if column in came_from:
                continue
            came_from[column] = row
            if column not in row_of:
                return column, came_from, seen
            seen.append(row_of[column])
            stack.append(row_of[column])
    return -1, came_from, seen


# ----------------------------------------------------------------------------------------------------- path (eq. 4)


def path(weights: Floats) -> tuple[float, tuple[int, ...]]:
    """The cheapest path through all nodes, ends free, and its length. Exact up to EXACT_PATH_MOST nodes, improved beyond."""
    from shoal.planner.costs import paths  # numba, as above

    nodes = len(weights)
    if nodes > EXACT_PATH_MOST:
        order = paths.improved(weights).tolist()
        return float(sum(weights[a, b] for a, b in pairwise(order))), tuple(order)
    table = paths.partial_paths(weights)
    mask, last = (1 << nodes) - 1, int(table[-1].argmin())
    order, length = [last], float(table[mask, last])
    while len(order) < nodes:
        mask ^= 1 << last
        last = int((table[mask] + weights[:, last]).argmin())
        order.append(last)
    return length, tuple(reversed(order))


def path_length(weights: Floats) -> float:
    """Its length alone."""
    from shoal.planner.costs import paths  # numba, as above

    if len(weights) > EXACT_PATH_MOST:
        return path(weights)[0]
    return float(paths.partial_paths(weights)[-1].min())

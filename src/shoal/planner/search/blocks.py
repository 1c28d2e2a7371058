"""Placements in blocks of stages, drawn at random: where anneal.py starts.

On uneven networks good placements fall into one to three blocks of stages that follow one another. Within a block every pipeline
stays among devices that are near each other, so that its hops are cheap; a dear hop is paid once, between blocks. How many stages
a block has and which regions are in it is what a chain of swaps hardly changes: in between, every hop of the block is dear.
Drawn and priced, a thousand of them take less than a tenth of a second for 64 devices.
"""

from __future__ import annotations

import numpy as np

from shoal.planner.costs.arrays import Ints
from shoal.planner.costs.communication import Model

BLOCKS = 3  # at most
NOISE = 0.5  # at most: by how much what is far may pass for near


def draw(model: Model, rng: np.random.Generator) -> tuple[tuple[int, ...], Ints]:
    """How many stages each block has, sorted, and the placement, (S, n)."""
    from shoal.planner.search import swaps  # numba: half a second that only searches pay

    many = 1 + int(rng.integers(min(BLOCKS, model.stages)))
    cuts = np.sort(rng.choice(np.arange(1, model.stages), size=many - 1, replace=False))
    lengths = np.diff(np.concatenate([[0], cuts, [model.stages]])).astype(np.int64)
    luck = rng.random((many * model.size, model.devices))
    groups = swaps.in_blocks(model.share, model.hop, lengths, luck, NOISE * float(rng.random()))
    return tuple(sorted(lengths.tolist())), np.asarray(groups)

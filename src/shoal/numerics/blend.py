"""A lost stage blended from its two neighbours: CheckFree (arXiv 2506.15461), for `run.lost_stage = "neighbours"`.

Each block is a weighted mean of the neighbours' blocks at the same relative depth, a better start for a residual network than
random weights. Adam's moments are blended alike. For runtime/tasks/task_runner.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from torch import Tensor

State = Mapping[str, Tensor]
BLOCK = re.compile(r"(?<=\.)\d+(?=\.)")  # the first number in a name such as model/model.layers.4.mlp.up_proj.weight


def blend(names: Iterable[str], below: State, above: State, share: float) -> dict[str, Tensor]:
    """The state with those names: `share` of `below` plus the rest of `above`, tensor by tensor, in fp32.

    ValueError when a neighbour has no tensor of that kind and shape: stages with an embedding or a head cannot be blended."""
    names = list(names)
    sources = [_counterpart(names, state, which) for state, which in ((below, "below"), (above, "above"))]
    blended: dict[str, Tensor] = {}
    for name in names:
        lower, upper = sources[0][name], sources[1][name]
        if lower.shape != upper.shape:
            raise ValueError(
                f"{name}: shapes {tuple(lower.shape)} below and {tuple(upper.shape)} above cannot be blended"
            )
        blended[name] = lower * share + upper * (1.0 - share)
    return blended


def _counterpart(names: list[str], state: State, which: str) -> dict[str, Tensor]:
    """For each name the neighbour's tensor of the same kind, in its block of the same relative depth."""
    own, theirs = _blocks(names), _blocks(state)
    partner = {block: theirs[at * len(theirs) // len(own)] for at, block in enumerate(own)} if theirs else {}
    tensors: dict[str, Tensor] = {}
    for name in names:
        block = BLOCK.search(name)
        source_name = name
        if block is not None and partner:
            source_name = f"{name[: block.start()]}{partner[int(block.group())]}{name[block.end() :]}"
        if source_name not in state:
            raise ValueError(
                f"the stage {which} has no {source_name}: this stage cannot be blended from its neighbours"
            )
        tensors[name] = state[source_name]
    return tensors


def _blocks(names: Iterable[str]) -> list[int]:
    return sorted({int(block.group()) for name in names if (block := BLOCK.search(name)) is not None})

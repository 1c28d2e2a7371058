"""A lost stage made from its two neighbours: CheckFree (arXiv 2506.15461), for runs that would rather not go back.

Its blocks are weighted means of the neighbours' blocks at the same relative depth, which residual networks forgive better than a
random start. Adam's moments are blended alike, so that the first steps are not taken blindly. For runtime/tasks/task_runner.py.
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
    found = [_counterpart(names, state, which) for state, which in ((below, "below"), (above, "above"))]
    blended: dict[str, Tensor] = {}
    for name in names:
        one, other = found[0][name], found[1][name]
        if one.shape != other.shape:
            raise ValueError(
                f"{name}: shapes {tuple(one.shape)} below and {tuple(other.shape)} above cannot be blended"
            )
        blended[name] = one * share + other * (1.0 - share)
    return blended


def _counterpart(names: list[str], state: State, which: str) -> dict[str, Tensor]:
    """For each name the neighbour's tensor of the same kind, in its block of the same relative depth."""
    own, theirs = _blocks(names), _blocks(state)
    partner = {block: theirs[at * len(theirs) // len(own)] for at, block in enumerate(own)} if theirs else {}
    found: dict[str, Tensor] = {}
    for name in names:
        block = BLOCK.search(name)
        wanted = name
        if block is not None and partner:
            wanted = f"{name[: block.start()]}{partner[int(block.group())]}{name[block.end() :]}"
        if wanted not in state:
            raise ValueError(f"the stage {which} has no {wanted}: this stage cannot be made from its neighbours")
        found[name] = state[wanted]
    return found


def _blocks(names: Iterable[str]) -> list[int]:
    return sorted({int(block.group()) for name in names if (block := BLOCK.search(name)) is not None})

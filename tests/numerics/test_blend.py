"""A stage made from its neighbours: every tensor a weighted mean of the ones at the same depth, or a refusal in words."""

from __future__ import annotations

import pytest
import torch

from shoal.numerics.blend import blend


def a_stage(blocks: range, value: float, **others: torch.Tensor) -> dict[str, torch.Tensor]:
    return {f"model/layers.{block}.up.weight": torch.full((2, 3), value + block) for block in blocks} | others


def test_blocks_are_means_of_those_at_the_same_depth() -> None:
    blended = blend(a_stage(range(2, 4), 0.0), a_stage(range(2), 10.0), a_stage(range(4, 6), 100.0), 0.75)
    assert blended.keys() == a_stage(range(2, 4), 0.0).keys()
    assert torch.equal(blended["model/layers.2.up.weight"], torch.full((2, 3), 0.75 * 10 + 0.25 * 104))
    assert torch.equal(blended["model/layers.3.up.weight"], torch.full((2, 3), 0.75 * 11 + 0.25 * 105))


def test_neighbours_of_another_length_are_stretched() -> None:
    blended = blend(a_stage(range(2, 6), 0.0), a_stage(range(2), 0.0), a_stage(range(6, 7), 0.0), 1.0)
    assert [float(blended[f"model/layers.{block}.up.weight"][0, 0]) for block in range(2, 6)] == [0.0, 0.0, 1.0, 1.0]


def test_a_stage_with_an_embedding_of_its_own_is_refused() -> None:
    own = a_stage(range(2), 0.0, **{"model/embed.weight": torch.zeros(4)})
    with pytest.raises(ValueError, match=r"the stage below has no model/embed\.weight"):
        blend(own, a_stage(range(2, 4), 0.0), a_stage(range(4, 6), 0.0), 0.5)


def test_other_shapes_are_refused() -> None:
    above = {"model/layers.4.up.weight": torch.zeros(5), "model/layers.5.up.weight": torch.zeros(5)}
    with pytest.raises(ValueError, match=r"shapes \(2, 3\) below and \(5,\) above"):
        blend(a_stage(range(2, 4), 0.0), a_stage(range(2), 0.0), above, 0.5)

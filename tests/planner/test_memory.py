"""The planned memory of a stage against the measured, in shapes drawn from a seed: never below it, and at most 5 % above."""

from __future__ import annotations

import pytest
from tests import memory_shapes


def assert_as_planned(seed: int) -> None:
    for figure in memory_shapes.figures(memory_shapes.drawn(seed)):
        assert figure.measured <= figure.planned <= (1 + memory_shapes.ABOVE) * figure.measured, (
            f"seed {seed}: {figure}"
        )


@pytest.mark.parametrize("seed", [40, 44])
def test_a_stage_takes_what_is_planned(seed: int) -> None:
    assert_as_planned(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(memory_shapes.SEEDS))
def test_a_stage_takes_what_is_planned_in_a_hundred_drawn_shapes(seed: int) -> None:
    assert_as_planned(seed)

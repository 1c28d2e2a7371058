"""The loss curve keeps to its room, whatever is drawn."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.dashboard import plot

LOSSES = st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=300)


@given(LOSSES, st.integers(0, 120), st.integers(0, 20))
def test_the_curve_never_overflows_its_width_or_height(losses: list[float], width: int, height: int) -> None:
    rows = plot.curve(losses, width, height).splitlines()
    assert len(rows) <= height
    assert all(len(row) <= width for row in rows)


def test_a_falling_loss_falls_from_left_to_right() -> None:
    rows = plot.curve([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0], width=12, height=4).splitlines()
    assert rows[0].startswith("8 │█")
    assert rows[-1].startswith("1 │")
    filled = [row.partition("│")[2] for row in rows]
    tops = [sum(len(row) > column and row[column] != " " for row in filled) for column in range(8)]
    assert tops == sorted(tops, reverse=True)
    assert tops[0] == 4
    assert tops[-1] == 1


def test_nothing_finite_draws_nothing() -> None:
    assert plot.curve([], 40, 5) == ""
    assert plot.curve([math.nan, math.inf], 40, 5) == ""


@pytest.mark.parametrize("losses", [[], [3.0], [3.0, math.nan, 2.0], [1.0] * 50])
def test_the_picture_is_a_png_put_in_place_whole(tmp_path: Path, losses: list[float]) -> None:
    plot.save(losses, tmp_path / "loss.png", "a run")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


def test_a_loss_far_above_those_before_it_is_a_spike_and_a_noisy_or_falling_one_is_not() -> None:
    falling = [4.0 - 0.1 * step for step in range(20)]
    assert not plot.spike(falling)
    assert "rises to 7, where the mean of the 16 steps before is 2.85" in plot.spike([*falling, 7.0])
    noisy = [3.0 + (step % 2) for step in range(20)]
    assert not plot.spike([*noisy, 4.1])
    assert not plot.spike([1.0] * 16), "too few to compare with"

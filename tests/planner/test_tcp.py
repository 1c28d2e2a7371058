"""What is expected of real lines: less than their rates, by their round trips and by how unlike these are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shoal.planner.inputs.cluster import Device, from_matrices, read
from shoal.planner.inputs.tcp import SHARED, carried_part


def delays(*rows: tuple[float, ...]) -> np.ndarray:
    return np.array(rows)


def even(trip_s: float, machines: int = 4) -> np.ndarray:
    return np.full((machines, machines), trip_s / 2)


def test_lines_without_delay_carry_their_rate() -> None:
    assert carried_part(even(0.0)).tolist() == [1.0] * 4
    assert carried_part(even(0.1, machines=1)).tolist() == [1.0]


def test_far_lines_carry_less_and_not_ever_less() -> None:
    near, usual, far = (carried_part(even(trip_s))[0] for trip_s in (0.01, 0.1, 0.3))
    assert near > usual == far == pytest.approx(1 / (1 + SHARED))


def test_a_machine_with_unlike_round_trips_carries_less_than_one_with_the_same_mean() -> None:
    unlike = np.array([[0.0, 0.01, 0.09], [0.01, 0.0, 0.05], [0.09, 0.05, 0.0]])
    assert carried_part(unlike)[0] < carried_part(even(0.1, 3))[0] < 1.0


def test_a_cluster_file_says_that_its_lines_are_real(tmp_path: Path) -> None:
    text = """
    [link]
    delay_s = "50 ms"
    bandwidth_Bps = "200 Mbit/s"
    [[device]]
    name = "gpu"
    count = 3
    flops = "1 TFLOP/s"
    up_Bps = "80 Mbit/s"
    """
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    assert read(file).devices[0].up_Bps == 10e6
    file.write_text("tcp = true\n" + text)
    assert read(file).devices[0].up_Bps == pytest.approx(10e6 / (1 + SHARED)) and read(file).devices[0].down_Bps == 0.0
    file.write_text("tcp = 'yes'\n" + text)
    with pytest.raises(ValueError, match="tcp = 'yes' must be true"):
        read(file)


def test_a_cluster_of_its_own_is_left_as_it_is() -> None:
    machines = tuple(Device(name=name, flops=1.0, up_Bps=1e6) for name in "ab")
    cluster = from_matrices(machines, even(0.1, 2), np.full((2, 2), 1e9))
    assert cluster.over_tcp().devices[0].up_Bps < 1e6 == cluster.devices[0].up_Bps

"""What `shoal probe` writes is what `shoal plan` reads."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from shoal.planner.inputs import cluster
from shoal.planner.inputs.cluster import Device
from shoal.planner.inputs.measured import Machine, MeasuredLink, cluster_text, device_from, device_text, named

GPU = Device(
    name="lab",
    flops=35.2e12,
    memory_bytes=24e9,
    host_memory_bytes=64e9,
    host_Bps=2.5e10,
    disk_Bps=1e9,
    update_rate=2e9,
    host_update_rate=1.5e9,
    basis="measured: bfloat16",
)


def test_a_device_is_the_same_after_its_file() -> None:
    assert device_from(device_text(GPU, ("measured today",))) == GPU
    four = msgspec.structs.replace(GPU, cards=4).together()
    assert device_from(device_text(four)) == four and four.memory_bytes == 4 * GPU.memory_bytes
    assert device_from("  ") is None
    for text in ("[[device", "[device]\nname = 'a'", "x = 1"):
        with pytest.raises(ValueError, match="not"):
            device_from(text)


def test_a_name_from_another_machine_cannot_break_out_of_the_file(tmp_path: Path) -> None:
    odd = Device(name="a", flops=1e9, basis='"\n[[device]]\nname = "b"')
    (tmp_path / "cluster.toml").write_text(device_text(odd))
    assert len(cluster.read(tmp_path / "cluster.toml").devices) == 1


def test_peers_of_one_machine_are_numbered_and_unknown_ones_too() -> None:
    other = Device(name="other", flops=1.0)
    assert named([GPU, other, GPU, None]) == ["lab-0", "other", "lab-1", "peer-0"]


def test_a_measured_cluster_is_read_back_with_each_direction_of_its_own(tmp_path: Path) -> None:
    machines = [Machine("lab-0", GPU, 1.25e6, 2.5e6), Machine("lab-1", GPU)]
    links = [MeasuredLink("lab-0", "lab-1", 0.02, 1e6), MeasuredLink("lab-1", "lab-0", 0.03, 2e6)]
    file = tmp_path / "cluster.toml"
    text = cluster_text(machines, links, ("measured",))
    assert "\ntcp = true" in text, "these are real lines"
    file.write_text(text.replace("tcp = true", "tcp = false"))
    read_back = cluster.read(file)
    assert [device.name for device in read_back.devices] == ["lab-0", "lab-1"]
    assert (read_back.devices[0].up_Bps, read_back.devices[0].down_Bps, read_back.devices[1].up_Bps) == (
        1.25e6,
        2.5e6,
        0.0,
    )
    assert read_back.devices[0].flops == GPU.flops and read_back.devices[0].basis == GPU.basis
    assert read_back.delay_s[0, 1] == pytest.approx(0.02) and read_back.delay_s[1, 0] == pytest.approx(0.03)
    assert read_back.bandwidth_Bps[0, 1] == pytest.approx(1e6) and read_back.bandwidth_Bps[1, 0] == pytest.approx(2e6)


def test_what_could_not_be_measured_is_not_made_up(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    good, lost = MeasuredLink("a", "b", 0.02, 1e6), MeasuredLink("b", "a", 0.0, 0.0, "no answer\nwithin 10 s")
    device = Device(name="", flops=1e9)
    file.write_text(cluster_text([Machine("a", device), Machine("b", device)], [good, lost]))
    with pytest.raises(ValueError, match="no bandwidth from b to a"):
        cluster.read(file)
    file.write_text(cluster_text([Machine("a", device), Machine("b", None)], [good, MeasuredLink("b", "a", 0.02, 1e6)]))
    with pytest.raises(ValueError, match="device 2 lacks flops"):
        cluster.read(file)


def test_a_cluster_takes_in_the_device_files_of_its_machines(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "device.toml").write_text(device_text(Device(name=name, flops=1e9)))
    text = 'devices = ["a/device.toml", "b/device.toml"]\n[link]\nbandwidth_Bps = "1 Gbit/s"\n'
    (tmp_path / "cluster.toml").write_text(text)
    assert [device.name for device in cluster.read(tmp_path / "cluster.toml").devices] == ["a", "b"]
    assert [device.name for device in cluster.read(tmp_path / "a" / "device.toml").devices] == [
        "a"
    ]  # one needs no link


def test_matrices_may_be_csv_and_must_be_square_numbers(tmp_path: Path) -> None:
    text = 'matrices = ["delay_ms.csv", "gbps.csv"]\n[[device]]\nname = "p"\ncount = 2\nflops = "1 TFLOP/s"\n'
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    (tmp_path / "gbps.csv").write_text("0,0.8\n1.6,0\n")
    (tmp_path / "delay_ms.csv").write_text("0,20\n30,0\n")
    read_back = cluster.read(file)
    assert np.allclose(read_back.delay_s, [[0, 0.02], [0.03, 0]])
    assert np.allclose(read_back.bandwidth_Bps, [[0, 1e8], [2e8, 0]])
    (tmp_path / "delay_ms.csv").write_text("0,20,1\n30,0,1\n")
    with pytest.raises(ValueError, match=r"delay_ms.csv is 2 x 3 and gbps.csv 2 x 2; both must be N x N"):
        cluster.read(file)
    (tmp_path / "delay_ms.csv").write_text("0,far\n30,0\n")
    with pytest.raises(ValueError, match="is no matrix of numbers"):
        cluster.read(file)

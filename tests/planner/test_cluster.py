"""Cluster files: what they mean, and what is said of a bad one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shoal.planner.inputs import cluster
from shoal.planner.inputs.cluster import NETWORKS, Device, from_matrices, network, read, read_matrices

GOOD = """
[link]
delay_s = "20 ms"
bandwidth_Bps = "200 Mbit/s"

[[device]]
name = "gpu"
count = 2
flops = "35 TFLOP/s"
memory_bytes = "24 GB"
region = "ohio"

[[device]]
name = "laptop"
flops = "500 GFLOP/s"
up_Bps = "10 Mbit/s"
price_per_h = 0.1

[[links]]
from = "ohio"
to = "laptop"
delay_s = "80 ms"
bandwidth_Bps = "20 Mbit/s"
one_way = true
"""


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    return file


def test_a_file_names_devices_and_links_by_region_or_name(tmp_path: Path) -> None:
    machines = read(written(tmp_path, GOOD))
    assert [device.name for device in machines.devices] == ["gpu-0", "gpu-1", "laptop"]
    assert machines.devices[0] == Device(name="gpu-0", flops=35e12, memory_bytes=24e9, region="ohio")
    assert machines.devices[2].up_Bps == 1.25e6
    assert machines.delay_s[0, 1] == 0.02 and machines.delay_s[0, 2] == 0.08 and machines.delay_s[2, 0] == 0.02
    assert machines.bandwidth_Bps[1, 2] == 2.5e6 and machines.bandwidth_Bps[2, 1] == 25e6


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"35 TFLOP/s"', "35", 'device 1.flops = 35 has no unit; write it as text, such as "35 TFLOP/s"'),
        ('"24 GB"', "24", "device 1.memory_bytes = 24 has no unit"),
        ('"24 GB"', '"24 GHz"', "device 1.memory_bytes: '24 GHz' has a unit that does not fit"),
        ('"35 TFLOP/s"', '"35 GB"', "device 1.flops: '35 GB' is not a speed"),
        ('"20 Mbit/s"', '"0 Mbit/s"', "no bandwidth from gpu-0 to laptop"),
        ('"200 Mbit/s"', '"0 bit/s"', "link.bandwidth_Bps = 0: nothing would ever arrive"),
        ("count = 2", "count = 0", "device 1.count = 0 is no number of machines"),
        ("memory_bytes", "memory", "device 1: memory is not known; did you mean memory_bytes?"),
        ('to = "laptop"', 'to = "labtop"', "links 1.to = 'labtop' is no device or region; did you mean laptop?"),
        ('name = "laptop"', 'name = "gpu-1"\nregion = "laptop"', "two devices are called gpu-1"),
        ('flops = "500 GFLOP/s"', "", "device 2 lacks flops"),
        ('bandwidth_Bps = "200 Mbit/s"', "", "[link] lacks bandwidth_Bps"),
        ('delay_s = "80 ms"', 'delay_s = "-80 ms"', "must be a number from 0 up"),
        ("[link]", "[lnk]", "lnk is not known; did you mean link?"),
        ("[link]", "[link", "is not TOML"),
        ("price_per_h = 0.1", 'price_per_h = "cheap"', "device 2.price_per_h = 'cheap'"),
    ],
)
def test_a_mistake_is_told_with_its_place(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert old in GOOD
    with pytest.raises(ValueError) as caught:
        read(written(tmp_path, GOOD.replace(old, new, 1)))
    assert words in str(caught.value)
    assert "cluster.toml" in str(caught.value)


def test_a_peer_of_several_cards_has_the_memory_and_speed_of_all(tmp_path: Path) -> None:
    table = '[[device]]\nname = "{}"\nflops = "2 TFLOP/s"\nmemory_bytes = "24 GB"\n{}'
    link = '[link]\nbandwidth_Bps = "1 Gbit/s"\n'
    one, four = read(written(tmp_path, table.format("one", "") + table.format("four", "cards = 4\n") + link)).devices
    assert (four.flops, four.memory_bytes, four.cards) == (4 * 0.8 * one.flops, 4 * one.memory_bytes, 4)
    rated = read(
        written(tmp_path, table.format("rated", "cards = 4\nupdate_rate = 2e9\nhost_update_rate = 1e9\n") + link)
    ).devices[0]
    assert (rated.update_rate, rated.host_update_rate) == (8e9, 1e9)
    assert rated.one_card().together() == rated
    (half,) = read(written(tmp_path, table.format("half", "cards = 4\ncards_efficiency = 0.5\n") + link)).devices
    assert half.flops == 2 * one.flops
    for wrong in ("cards = 0\n", "cards = 2\ncards_efficiency = 1.5\n"):
        with pytest.raises(ValueError, match=r"must be 1 or more, cards_efficiency = .* at most 1"):
            read(written(tmp_path, table.format("none", wrong) + link))


def test_matrices_that_are_not_square_or_of_other_devices_are_refused() -> None:
    devices = tuple(Device(name=name, flops=1.0) for name in "abc")
    with pytest.raises(ValueError, match="2 x 3, but there are 3 devices; it must be square"):
        from_matrices(devices, np.zeros((2, 3)), np.ones((3, 3)))
    with pytest.raises(ValueError, match="2 x 2, but there are 3 devices"):
        from_matrices(devices, np.zeros((3, 3)), np.ones((2, 2)))


def test_a_cluster_in_parts_is_told_its_parts_and_one_with_holes_its_pairs() -> None:
    devices = tuple(Device(name=name, flops=1.0) for name in "abcde")
    parts, holes = np.zeros((5, 5)), np.ones((5, 5))
    parts[:2, :2] = parts[2:, 2:] = 1e6
    with pytest.raises(ValueError, match=r"disconnected: no link joins a, b with c, d, e; .* from = 'a', to = 'c'"):
        from_matrices(devices, np.zeros((5, 5)), parts)
    holes[1, 2] = holes[3, 4] = holes[4, 3] = 0
    with pytest.raises(
        ValueError, match=r"no bandwidth from b to c, nor for 2 more pairs; .*a relay's bandwidth would do"
    ):
        from_matrices(devices, np.zeros((5, 5)), holes)
    with pytest.raises(ValueError, match="the delay from b to a is nan; it must be a number from 0 up"):
        from_matrices(devices[:2], np.array([[0, 1.0], [np.nan, 0]]), np.ones((2, 2)))


def test_a_file_may_take_its_links_from_measured_matrices(tmp_path: Path) -> None:
    text = 'matrices = "aws10"\n[[device]]\nname = "p"\ncount = 10\nflops = "1 TFLOP/s"\n'
    machines = read(written(tmp_path, text))
    delay_s, bandwidth_Bps, regions = read_matrices(network("aws10"))
    assert (machines.delay_s == delay_s).all() and (machines.bandwidth_Bps == bandwidth_Bps).all()
    assert tuple(device.region for device in machines.devices) == regions
    with pytest.raises(ValueError, match="10 x 10, but there are 9 devices"):
        read(written(tmp_path, text.replace("10\nflops", "9\nflops")))
    with pytest.raises(ValueError, match="both matrices and"):
        read(written(tmp_path, text + "[link]\n"))
    with pytest.raises(ValueError, match="comes along: aws10, datacenter"):
        read(written(tmp_path, text.replace("aws10", "aws11")))


@pytest.mark.parametrize("file", sorted(NETWORKS.glob("*.npz")), ids=lambda file: file.stem)
def test_every_network_that_comes_along_is_whole_and_says_where_it_is_from(file: Path) -> None:
    delay_s, bandwidth_Bps, regions = read_matrices(file)
    devices = tuple(Device(name=f"p{i}", flops=1.0, region=region) for i, region in enumerate(regions))
    assert from_matrices(devices, delay_s, bandwidth_Bps).devices == devices
    with np.load(file) as stored:
        assert "DS3Lab/DT-FM" in str(stored["source"]) or "gensyn-ai/skippipe" in str(stored["source"])


def test_a_grown_cluster_keeps_its_own_and_puts_copies_near_their_models() -> None:
    delay_s, bandwidth_Bps, regions = read_matrices(network("aws10"))
    devices = tuple(Device(name=region, flops=1.0) for region in regions)
    grown = cluster.Cluster(devices, delay_s, bandwidth_Bps).of_size(25)
    assert len({device.name for device in grown.devices}) == 25
    assert (grown.delay_s[:10, :10] == delay_s).all()
    assert grown.delay_s[0, 10] == np.delete(delay_s[0], 0).min()
    from_matrices(grown.devices, grown.delay_s, grown.bandwidth_Bps)
    assert cluster.Cluster(devices, delay_s, bandwidth_Bps).of_size(4).devices == devices[:4]

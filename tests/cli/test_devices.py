"""Local peers share this machine: a card each, the cores among them; a device that is not there is refused before anything starts."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.config import Config, Device, from_tree
from shoal.launcher import devices

CUDA, PLAIN = {"cuda": "13.0", "hip": None, "xpu": None}, {"cuda": None, "hip": None, "xpu": None}


def a_machine(root: Path, cards: int) -> Path:
    for card in range(cards):
        (root / devices.NVIDIA / f"0000:0{card}:00.0").mkdir(parents=True)
    if cards:
        (root / "dev").mkdir()
        (root / "dev/nvidiactl").touch()
    return root


def given(device: Device, here: int, inherited: dict[str, str], root: Path) -> list[dict[str, str]]:
    return [devices.environment(device, number, here, inherited, root) for number in range(here)]


@pytest.fixture
def torch_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_build", lambda: CUDA)


def test_four_peers_on_four_cards_take_one_each_and_more_of_them_take_turns(tmp_path: Path) -> None:
    root = a_machine(tmp_path, 4)
    seen = [each["CUDA_VISIBLE_DEVICES"] for each in given(Device(), 4, {}, root)]
    assert seen == ["0", "1", "2", "3"]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in given(Device(kind="cuda"), 5, {}, root)][4] == "0"


def test_peers_of_two_cards_take_two_each_and_more_cards_than_there_are_is_refused(
    tmp_path: Path, torch_with_cuda: None
) -> None:
    root = a_machine(tmp_path, 4)
    two = Device(kind="cuda", count=2)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in given(two, 2, {}, root)] == ["0,1", "2,3"]
    devices.refuse_missing(two, {}, root)
    with pytest.raises(ValueError, match=r"device\.count = 5, but there are 4 cards; try device\.count=4"):
        devices.refuse_missing(Device(kind="cuda", count=5), {}, root)


@pytest.mark.parametrize("name", devices.LISTS)
def test_an_inherited_list_says_which_cards_there_are(name: str, tmp_path: Path) -> None:
    root = a_machine(tmp_path, 4)
    assert [each[name] for each in given(Device(), 3, {name: "3, GPU-ab"}, root)] == ["3", "GPU-ab", "3"]
    assert all(name not in each and "CUDA_VISIBLE_DEVICES" not in each for each in given(Device(), 2, {name: ""}, root))


def test_a_peer_that_names_its_card_or_computes_on_the_cpu_is_given_none(tmp_path: Path) -> None:
    root = a_machine(tmp_path, 4)
    for kind in ("cuda:2", "cpu", "mps"):
        assert "CUDA_VISIBLE_DEVICES" not in devices.environment(Device(kind=kind), 0, 4, {}, root)
    assert "CUDA_VISIBLE_DEVICES" not in devices.environment(Device(), 0, 4, {}, a_machine(tmp_path / "none", 0))


def test_the_cores_are_divided_by_the_local_peers_unless_somebody_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "cores", lambda: 16)
    for here, threads in ((1, "16"), (4, "4"), (6, "2"), (40, "1")):
        assert {each["OMP_NUM_THREADS"] for each in given(Device(), here, {}, tmp_path)} == {threads}
    assert "OMP_NUM_THREADS" not in devices.environment(Device(), 0, 4, {"OMP_NUM_THREADS": "3"}, tmp_path)
    assert devices.environment(Device(threads=2), 0, 4, {"OMP_NUM_THREADS": "3"}, tmp_path)["OMP_NUM_THREADS"] == "2"


def test_a_heap_that_the_user_has_set_stays(tmp_path: Path) -> None:
    own = {"MALLOC_ARENA_MAX": "4"}
    variables = devices.environment(Device(), 0, 4, own, tmp_path)
    assert set(devices.HEAP) - set(own) <= set(variables) and "MALLOC_ARENA_MAX" not in variables


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the variables are glibc's")
def test_a_peer_does_not_take_the_memory_of_a_pass_from_the_system_again(tmp_path: Path) -> None:
    """On a thread of its own, as the compute thread is: 32 tensors of 1 MiB, freed together, ten times."""
    variables = {**os.environ, **devices.environment(Device(), 0, 4, {}, tmp_path)}
    code = (
        "import resource, threading\n"
        "def passes(count):\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    for _ in range(count):\n"
        "        tensors = [bytearray(b'x') * (1 << 20) for _ in range(32)]\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before\n"
        "thread = threading.Thread(target=lambda: print(passes(2), passes(10)))\n"
        "thread.start(); thread.join()\n"
    )
    printed = subprocess.run([sys.executable, "-c", code], env=variables, check=True, capture_output=True, text=True)
    first, later = map(int, printed.stdout.split())
    assert later < first / 2, f"{first} page faults in 2 passes, {later} in the next 10"


def test_a_containers_share_of_the_cores_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    limit = tmp_path / devices.CPU_LIMIT
    limit.parent.mkdir(parents=True)
    for text, count in (("250000 100000", 2), ("max 100000", 64), ("50000 100000", 1), ("9000000 100000", 64)):
        limit.write_text(f"{text}\n")
        assert devices.cores(tmp_path) == count
    assert devices.cores(tmp_path / "none") == 64


@pytest.mark.parametrize(("version", "name"), [("2.13.0+cu130", 0), ("2.9.1", 0), ("2.8.0+cu128", 1), ("2.6.0a0", 1)])
def test_expandable_segments_are_set_by_the_name_that_this_torch_knows(
    version: str, name: int, torch_with_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices.importlib.metadata, "version", lambda package: version)
    monkeypatch.setattr(sys, "platform", "linux")
    pages = {devices.HUGE_PAGES: "1"}
    assert devices.allocator({}) == {devices.ALLOCATORS[name]: "expandable_segments:True"} | pages
    for own in devices.ALLOCATORS:
        assert devices.allocator({own: "max_split_size_mb:64"}) == pages
    monkeypatch.setattr(devices, "_build", lambda: PLAIN)
    assert devices.allocator({}) == pages
    assert devices.allocator({devices.HUGE_PAGES: "0"}) == {}


def test_a_device_that_is_not_there_is_refused_with_what_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_build", lambda: CUDA)
    root = a_machine(tmp_path, 2)
    for kind in ("auto", "cpu", "cuda", "cuda:1"):
        devices.refuse_missing(Device(kind=kind), {}, root)
    with pytest.raises(ValueError, match=r"'xpu'.* is built for cuda, .* a driver for cuda; there is cpu, cuda; try"):
        devices.refuse_missing(Device(kind="xpu"), {}, root)
    with pytest.raises(ValueError, match=r"'cuda:2', but there are 2 cards"):
        devices.refuse_missing(Device(kind="cuda:2"), {}, root)
    with pytest.raises(ValueError, match=r"a driver for no card; there is cpu; try device\.kind=auto"):
        devices.refuse_missing(Device(kind="cuda"), {}, tmp_path / "empty")
    monkeypatch.setattr(devices, "_build", lambda: PLAIN)
    with pytest.raises(ValueError, match=r"is built for the CPU alone"):
        devices.refuse_missing(Device(kind="cuda"), {}, root)
    devices.refuse_missing(Device(kind="cuda", executor="emulated"), {}, root)


def test_the_commands_refuse_it_without_importing_torch(tmp_path: Path) -> None:
    """Importing it takes seconds; without it the answer comes within two."""
    code = (
        "import sys; from shoal.cli.main import main; code = main(sys.argv[1:]);"
        " assert 'torch' not in sys.modules and not list(__import__('pathlib').Path('.').iterdir()); sys.exit(code)"
    )
    file = tmp_path / "tiny.toml"
    file.write_text('[device]\nkind = "xpu:7"\n')
    (tmp_path / "here").mkdir()
    before = time.monotonic()
    for command in ("run", "train"):
        ended = subprocess.run(
            [sys.executable, "-c", code, command, str(file)],
            cwd=tmp_path / "here",
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 2 and "device.kind = 'xpu:7'" in ended.stderr, ended.stderr
    print(f"{(time.monotonic() - before) / 2:.2f} s a command")


@pytest.mark.parametrize("kind", ["gpu", "cuda:", "cpu:0", "mps:1", "cuda:1234", "Cuda"])
def test_a_kind_that_torch_does_not_name_is_refused(kind: str) -> None:
    with pytest.raises(
        ValueError, match=r"device\.kind = .* is none of auto, cpu, cuda, cuda:N, .*try device\.kind=auto"
    ):
        from_tree({"device": {"kind": kind}})


def test_auto_is_the_default() -> None:
    assert Config().device.kind == "auto"

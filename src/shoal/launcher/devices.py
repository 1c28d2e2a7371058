"""What a local peer gets of this machine: a card, a share of the cores, and an allocator that wastes little. Without torch.

For launch.py, which gives it to each process, and for the commands, which ask whether a device is there before anything starts.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import runpy
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from shoal import importing
from shoal.config import Device
from shoal.launcher.invite_text import INVITE_VARIABLE

ROOT = Path("/")
# How the processes of one vendor are told which cards they see; an inherited list says which there are for this run.
LISTS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
NVIDIA = "proc/driver/nvidia/gpus"  # one folder per card
# A driver's file, by the field of torch/version.py that says what PyTorch was built for. WSL has a driver of its own.
DRIVERS = {"cuda": ("dev/nvidiactl", "dev/dxg"), "hip": ("dev/kfd",), "xpu": ("dev/dri", "dev/dxg")}
CPU_LIMIT = "sys/fs/cgroup/cpu.max"
ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # since PyTorch 2.9, and before
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # new memory above 2 MiB: a copy into it takes 0.6 ns a value instead of 4.5
SEGMENTS = "expandable_segments:True"  # or gaps between tensors count against the limit
# glibc: what a backward frees is used again by the next forward instead of taken from the system, page by page (8 % of the stage's
# time, quickstart). Threads share one heap, since that of a single thread is returned piece by piece whatever the thresholds say.
HEAP = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # the largest that glibc takes
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
}


def environment(
    device: Device, number: int, here: int, inherited: Mapping[str, str], root: Path = ROOT
) -> dict[str, str]:
    """Variables of local peer `number`, from 0, of `here`. What was set by the user stays."""
    variables = {name: value for name, value in HEAP.items() if name not in inherited}
    if device.threads or "OMP_NUM_THREADS" not in inherited:
        variables["OMP_NUM_THREADS"] = str(max(1, (device.threads or cores() // here) // device.count))
    if device.kind in ("auto", "cuda", "xpu"):
        own = range(number * device.count, (number + 1) * device.count)
        lists = _card_lists(inherited, root)
        variables |= {name: ",".join(cards[each % len(cards)] for each in own) for name, cards in lists.items()}
    return variables | allocator(inherited)


def peer_environment(device: Device, factories: tuple[str, ...], number: int, here: int) -> dict[str, str]:
    """All variables of local peer `number` of `here`, without the invite. `factories`: the user's functions, which it imports."""
    inherited = {name: value for name, value in os.environ.items() if name != INVITE_VARIABLE}
    if path := importing.peers_path(list(factories), os.environ.get("PYTHONPATH", "")):
        inherited["PYTHONPATH"] = path
    return inherited | environment(device, number, here, inherited)


def allocator(inherited: Mapping[str, str]) -> dict[str, str]:
    """To be set before torch is imported. Only CUDA on Linux has expandable segments."""
    if sys.platform != "linux":
        return {}
    variables = {} if HUGE_PAGES in inherited else {HUGE_PAGES: "1"}
    if _build().get("cuda") and not any(name in inherited for name in ALLOCATORS):
        major, minor, *_ = importlib.metadata.version("torch").split(".")
        variables[ALLOCATORS[0] if (int(major), int(minor)) >= (2, 9) else ALLOCATORS[1]] = SEGMENTS
    return variables


def cores(root: Path = ROOT) -> int:
    """Those that this process may use, and no more than its container's share."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (root / CPU_LIMIT).read_text().split()
        return max(1, min(count, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup of version 2, or "max"
        return count


def drivers(root: Path = ROOT) -> set[str]:
    """Kinds of cards whose driver is on this machine."""
    return {name for name, files in DRIVERS.items() if any((root / file).exists() for file in files)}


def refuse_missing(device: Device, inherited: Mapping[str, str], root: Path = ROOT) -> None:
    """ValueError: the device that the user named is not there. What torch alone can find out, the peers check."""
    kind, _, number = device.kind.partition(":")
    if kind in ("auto", "cpu") or device.executor == "emulated":
        return
    _refuse_unusable(device.kind, kind, root)
    for cards in _card_lists(inherited, root).values():
        if number and int(number) >= len(cards):
            raise ValueError(
                f"device.kind = {device.kind!r}, but there are {len(cards)} cards; try device.kind={kind}:0"
            )
        if device.count > len(cards):
            raise ValueError(
                f"device.count = {device.count}, but there are {len(cards)} cards; try device.count={len(cards)}"
            )


def refuse_uncompilable(device: Device, inherited: Mapping[str, str]) -> None:
    """ValueError: torch.compile lacks what it calls here. For a card it writes Triton, otherwise C++ that includes Python's headers."""
    if not device.compile:
        return
    lacking = []
    if device.kind.partition(":")[0] in ("cuda", "xpu"):
        lacking += [] if importlib.util.find_spec("triton") else ["the package triton (pip install triton)"]
    else:
        default = "clang++" if sys.platform == "darwin" else "g++"
        compiler = inherited.get("CXX") or default
        lacking += [] if shutil.which(compiler) else [f"the C++ compiler {compiler} (or name another with CXX)"]
        headers = Path(sysconfig.get_path("include"))
        lacking += [] if (headers / "Python.h").exists() else [f"Python's headers in {headers}"]
    if lacking:
        raise ValueError(
            f"device.compile = true needs {' and '.join(lacking)}; install what is missing, or leave it out"
        )


def _refuse_unusable(device: str, kind: str, root: Path) -> None:
    """ValueError: PyTorch is not built for that kind of device, or this machine has no driver for it."""
    build = {name for name, version in _build().items() if version}
    drivers_there = drivers(root)
    usable = {"cuda" if name == "hip" else name for name in build & drivers_there} | (
        {"mps"} if sys.platform == "darwin" else set()
    )
    version = importlib.metadata.version("torch")
    if kind not in usable:
        why = f"PyTorch {version} is built for {' and '.join(sorted(build)) or 'the CPU alone'}"
        drivers_here = f"this machine has a driver for {' and '.join(sorted(drivers_there)) or 'no card'}"
        there = ", ".join(["cpu", *sorted(usable)])
        raise ValueError(f"device.kind = {device!r}: {why}, and {drivers_here}; there is {there}; try device.kind=auto")


def _card_lists(inherited: Mapping[str, str], root: Path) -> dict[str, list[str]]:
    """The cards by the variable that names them: those of inherited lists, else all of NVIDIA's; {} where none is known."""
    lists = {name: [card.strip() for card in inherited[name].split(",")] for name in LISTS if inherited.get(name)}
    # An empty list hides all
    count = 0 if any(name in inherited for name in LISTS) else len(list((root / NVIDIA).glob("*")))
    return lists or ({LISTS[0]: [str(card) for card in range(count)]} if count else {})


def _build() -> dict[str, str | None]:
    """What the installed PyTorch was built for, of its version.py: importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    fields = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return {name: fields.get(name) for name in DRIVERS}

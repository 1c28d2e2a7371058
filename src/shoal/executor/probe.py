"""What this machine sustains, for `shoal probe`: FLOP/s of a stage, the link to its device, its disk, and its memory.

FLOP/s are in the planner's unit: forward and backward of a stage as in a run (executor/resident.py), for long enough that
turbo clocks and cold caches do not count, over FLOPs counted on the meta device. Each measurement is bounded in time and size.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from shoal.config import Config, token_rows
from shoal.executor.base import device_of, emulates_bf16, free_bytes
from shoal.executor.master import Master
from shoal.executor.resident import Resident
from shoal.model import analysis, stages

WARM_UP = 2  # passes not counted: kernels are selected, memory is allocated
LINK_BYTES = 64 << 20  # one copy between host and device
LINK_COPIES = 8
PRODUCT = (4096, 512)  # rows of the square factors of a product: on a card, on a CPU
UPDATED = ((4096, 4096), (2048, 2048))  # each of four matrices that the optimizer steps: on a card, on a CPU
UPDATES = 4  # the first of them compiles
DISK_BYTES = 128 << 20


class Rate(msgspec.Struct, frozen=True):
    """FLOP/s over all passes, and of the slowest and the fastest tenth, which differ when other work ran."""

    flops: float
    slow: float
    quick: float
    passes: int


def compute(config: Config, seconds: float, progress: Callable[[str], None]) -> Rate:
    """Repeat forward and backward of the whole model for `seconds`; `progress` receives a line every 2 s."""
    profile = analysis.count(config)
    whole = profile.stage(range(profile.blocks))
    flops = whole.flops + whole.again_flops + whole.back_flops
    stage = stages.build(config, 0, device=str(device_of(config)))
    executor = Resident(stage, config)
    shape = (token_rows(config), config.data.sequence + 1)
    tokens = torch.randint(stage.vocabulary or 1, shape, generator=torch.Generator().manual_seed(0))
    seconds_per_pass: list[float] = []
    warm_up, reported_at = WARM_UP, time.monotonic()
    while warm_up or sum(seconds_per_pass) < seconds or len(seconds_per_pass) < 3:
        before = time.perf_counter()
        executor.forward(tokens[:, :-1])
        executor.backward(tokens[:, :-1], None, tokens)
        _synchronize(device_of(config))
        if warm_up:
            warm_up -= 1
            continue
        seconds_per_pass.append(time.perf_counter() - before)
        if time.monotonic() > reported_at + 2:
            reported_at = time.monotonic()
            progress(f"{len(seconds_per_pass)} passes, {sum(seconds_per_pass):.0f} of {seconds:.0f} s")
    ordered = sorted(seconds_per_pass)
    tenth = max(1, len(seconds_per_pass) // 10)
    return Rate(
        flops * len(seconds_per_pass) / sum(seconds_per_pass),
        flops / statistics.mean(ordered[-tenth:]),
        flops / statistics.mean(ordered[:tenth]),
        len(seconds_per_pass),
    )


def update_rate(config: Config, device: torch.device) -> float:
    """Parameters that a step's end takes a second for: the copy of the sum, the optimizer, the digest, and the new sum's zeros."""
    parameters = [torch.randn(UPDATED[device.type == "cpu"], device=device) * 0.02 for _ in range(4)]
    master = Master([str(number) for number in range(len(parameters))], parameters, config)
    total = torch.full((master.length,), 1e-3, device=device)
    seconds = []
    for step in range(UPDATES):
        _synchronize(device)
        before = time.perf_counter()
        master.apply(total.clone(), 1.0, step)
        master.digest()
        total.zero_()
        _synchronize(device)
        seconds.append(time.perf_counter() - before)
    return master.length / min(seconds)


def link_Bps(device: torch.device) -> float:
    """Bytes per second between host and device memory, in the slower direction; for a CPU those of a copy."""
    host = torch.ones(LINK_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    on_device = torch.zeros(LINK_BYTES, dtype=torch.uint8, device=device)
    return min(_copy_Bps(on_device, host, device), _copy_Bps(host, on_device, device))


def disk_Bps(folder: Path) -> tuple[float, float]:
    """Write (with fsync) and read bandwidth in bytes per second. OSError: the folder is not writable."""
    noise = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        before = time.perf_counter()
        for _ in range(DISK_BYTES // len(noise)):
            file.write(noise)
        os.fsync(file.fileno())
        written = DISK_BYTES / (time.perf_counter() - before)
        if hasattr(os, "posix_fadvise"):  # else the page cache is read
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        before = time.perf_counter()
        while file.read(len(noise)):
            pass
        return written, DISK_BYTES / (time.perf_counter() - before)


def memory_bytes(device: torch.device) -> tuple[float, float]:
    """Free bytes of the device and of the host; for a CPU the same number."""
    free, host = free_bytes(device), host_bytes()
    return (host if free is None else float(free)), host


def bf16_words(device: torch.device) -> str:
    """How fast the device multiplies in bfloat16, measured, and what to do where that is emulated."""
    size = PRODUCT[device.type == "cpu"]
    seconds = []
    for dtype in (torch.float32, torch.bfloat16):
        factor = torch.randn(size, size, device=device).to(dtype)
        seconds.append(min(_product_s(factor, device) for _ in range(4)))
    ratio = seconds[0] / seconds[1]
    words = f"{ratio:.2g} times the rate of float32 products"
    if emulates_bf16(device):
        words += ", emulated: this card has none, and its float16 units stay idle"
    return words + ("; train.dtype=float32 is faster here" if ratio < 1 else "")


def _product_s(factor: Tensor, device: torch.device) -> float:
    before = time.perf_counter()
    torch.mm(factor, factor)
    _synchronize(device)
    return time.perf_counter() - before


def host_bytes(root: Path = Path("/")) -> float:
    """Bytes that a new process can allocate: the available memory, within a container's limit."""
    available = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    info = root / "proc/meminfo"
    if info.exists():
        fields = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
        if "MemAvailable" in fields:
            available = 1024.0 * int(fields["MemAvailable"].split()[0])
    group = root / "sys/fs/cgroup"
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            available = min(available, float((group / limit).read_text()) - float((group / used).read_text()))
        except (OSError, ValueError):  # no such limit, or "max"
            continue
    return available


def device_name(device: torch.device) -> str:
    if device.type in ("cuda", "xpu"):
        return f"{torch.get_device_module(device).get_device_name(device)} ({device})"
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return names[0] if names else device.type


def _copy_Bps(into: Tensor, source: Tensor, device: torch.device) -> float:
    into.copy_(source, non_blocking=True)
    _synchronize(device)
    before = time.perf_counter()
    for _ in range(LINK_COPIES):
        into.copy_(source, non_blocking=True)
    _synchronize(device)
    return LINK_COPIES * LINK_BYTES / (time.perf_counter() - before)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()

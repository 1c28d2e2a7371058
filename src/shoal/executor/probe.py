"""What this machine sustains, for `shoal probe`: FLOP/s of a stage, the link to its device, its disk, and its memory.

FLOP/s are those of the planner's own unit: a stage's forward and backward as a run does them (executor/resident.py), for long enough
that a turbo or a cold cache no longer counts, over FLOPs counted on the meta device. Each measurement is bounded in time
and size.
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

from shoal.config import Config
from shoal.executor.resident import Resident
from shoal.model import analysis, stages
from shoal.planner.inputs.profile import BACKWARD, FORWARD

WARM_UP = 2  # passes that are not counted: kernels are chosen, memory is taken
LINK_BYTES = 64 << 20  # one copy between host and device
LINK_COPIES = 8
DISK_BYTES = 128 << 20


class Rate(msgspec.Struct, frozen=True):
    """FLOP/s over all passes, and of the slowest and quickest tenth: far apart when something else ran."""

    flops: float
    slow: float
    quick: float
    passes: int


def compute(config: Config, seconds: float, told: Callable[[str], None]) -> Rate:
    """Forward and backward of the configuration's whole model, again and again."""
    made = analysis.count(config)
    flops = (FORWARD + BACKWARD) * made.flops
    stage = stages.build(config, 0, device=config.device.kind)
    executor = Resident(stage, config)
    shape = (config.train.microbatch, config.data.sequence + 1)
    tokens = torch.randint(stage.vocabulary or 1, shape, generator=torch.Generator().manual_seed(0))
    took: list[float] = []
    warm, shown = WARM_UP, time.monotonic()
    while warm or sum(took) < seconds or len(took) < 3:
        before = time.perf_counter()
        executor.forward(tokens[:, :-1])
        executor.backward(tokens[:, :-1], None, tokens)
        _settled(config.device.kind)
        if warm:
            warm -= 1
            continue
        took.append(time.perf_counter() - before)
        if time.monotonic() > shown + 2:
            shown = time.monotonic()
            told(f"{len(took)} passes, {sum(took):.0f} of {seconds:.0f} s")
    ordered = sorted(took)
    tenth = max(1, len(took) // 10)
    return Rate(
        flops * len(took) / sum(took),
        flops / statistics.mean(ordered[-tenth:]),
        flops / statistics.mean(ordered[:tenth]),
        len(took),
    )


def link_Bps(kind: str) -> float:
    """Bytes per second between the host's memory and the device's, in the slower direction; of a copy where they are the same."""
    host = torch.ones(LINK_BYTES, dtype=torch.uint8, pin_memory=kind == "cuda")
    there = torch.zeros(LINK_BYTES, dtype=torch.uint8, device=kind)
    return min(_copied_Bps(there, host, kind), _copied_Bps(host, there, kind))


def disk_Bps(folder: Path) -> tuple[float, float]:
    """Written (and on the disk: fsync) and read, bytes per second. OSError when the folder cannot be written to."""
    noise = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        before = time.perf_counter()
        for _ in range(DISK_BYTES // len(noise)):
            file.write(noise)
        os.fsync(file.fileno())
        written = DISK_BYTES / (time.perf_counter() - before)
        if hasattr(os, "posix_fadvise"):  # or the page cache would answer
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        before = time.perf_counter()
        while file.read(len(noise)):
            pass
        return written, DISK_BYTES / (time.perf_counter() - before)


def memory_bytes(kind: str) -> tuple[float, float]:
    """Free on the device, and in the host's memory; the same thing for a CPU."""
    host = host_bytes()
    return (float(torch.cuda.mem_get_info()[0]), host) if kind == "cuda" else (host, host)


def host_bytes(root: Path = Path("/")) -> float:
    """What a new process may take: what is available, and no more than a container's limit leaves."""
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


def device_name(kind: str) -> str:
    if kind == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return names[0] if names else kind


def _copied_Bps(into: Tensor, source: Tensor, kind: str) -> float:
    into.copy_(source, non_blocking=True)
    _settled(kind)
    before = time.perf_counter()
    for _ in range(LINK_COPIES):
        into.copy_(source, non_blocking=True)
    _settled(kind)
    return LINK_COPIES * LINK_BYTES / (time.perf_counter() - before)


def _settled(kind: str) -> None:
    if kind == "cuda":
        torch.cuda.synchronize()
    elif kind == "mps":
        torch.mps.synchronize()

"""Whether a stage fits this machine, found before its weights are there: on the device, and in the host's memory.

For `executor.check`, asked before training begins, and for `create`, asked again before memory is taken. Every refusal says
what is needed, what there is and what would fit.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from shoal.config import ROUND_COPIES, Config
from shoal.executor.swap.groups import Runner
from shoal.model import stages
from shoal.model.cut import Stage, cut
from shoal.numerics.eightbit import nbytes, require
from shoal.units import size

ROUND_BYTES = 8  # per parameter while a round runs, besides run.round_bytes: what came of it, and that clipped
CGROUP = Path("/sys/fs/cgroup")


def check(config: Config) -> None:
    """ValueError: one of the run's stages has no room here. A peer may be given any of them."""
    count = config.run.stages
    blocks = _blocks(config)
    middle = sorted(range(1, count - 1), key=lambda stage: -len(blocks[stage]))[:1]
    for stage in dict.fromkeys([0, *middle, count - 1]):
        check_stage(config, stage)


def check_stage(config: Config, stage: int) -> None:
    """ValueError: that stage has no room here."""
    made = check_host(config, stage)
    values, where = _values(made), _where(config, stage)
    limit = config.device.memory_bytes
    if config.device.executor == "swapping":
        runner = Runner(made, config)  # refuses a family that is not made of units
        try:
            if limit:
                runner.refuse()
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    elif limit and (needed := values * resident_bytes(config) + _moments(made, config.train.moments)) > limit:
        raise ValueError(
            f"{where}: device.memory_bytes = {size(limit)}, but with device.executor = 'resident' its {values:,} parameters"
            f" take {size(needed)} before anything is computed; try device.executor=swapping, or more stages"
        )


def _blocks(config: Config) -> tuple[range, ...]:
    from shoal.model.families import hf_config

    return cut(config.run, hf_config(config).num_hidden_layers)


def resident_bytes(config: Config) -> int:
    """Per parameter, besides AdamW's moments: fp32 parameter and the sum; with bfloat16 the copy that computes too."""
    return 8 + (0 if config.train.dtype == "float32" else 2) + _late_bytes(config)


def host_bytes(config: Config) -> int:
    """Per parameter, on the host, besides AdamW's moments and what a round takes."""
    copies = 0 if config.train.dtype == "float32" else 2
    apart = 8 if config.train.local_steps > 1 else 0  # where a round began, and the outer momentum
    if config.device.executor == "swapping":  # value, the sum and the one being made
        return 12 + copies + apart + _late_bytes(config)
    return apart + (resident_bytes(config) if config.device.kind == "cpu" else 0)


def _late_bytes(config: Config) -> int:
    """Per parameter, with delayed updates: the sum of a second step, the older of two versions as it computes, and in fp32 a copy that
    computes, since the parameters themselves are stepped meanwhile."""
    if not config.train.staleness:
        return 0
    return 12 if config.train.dtype == "float32" else 6


def _moments(made: Stage, how: str) -> int:
    """Bytes of AdamW's two, as train.moments says."""
    return sum(nbytes(value.numel(), how) for _, value in made.named_parameters())


def _values(stage: Stage) -> int:
    return sum(value.numel() for _, value in stage.named_parameters())


def _where(config: Config, stage: int) -> str:
    return f"stage {stage} of {config.run.stages}" if config.run.stages > 1 else "the model"


def check_host(config: Config, stage: int) -> Stage:
    """That stage, without values, found to fit the host's memory that is free now. ValueError: it does not."""
    if config.train.moments == "8bit":
        require()
    made = stages.hollow(config, stage)
    values, where = _values(made), _where(config, stage)
    rounds = config.run.peers > 1
    on_host = config.device.executor == "swapping" or config.device.kind == "cpu"
    moments = _moments(made, config.train.moments) / values if on_host else 0.0
    each, copies = host_bytes(config) + moments + ROUND_BYTES * rounds, 4 * ROUND_COPIES * rounds
    in_rounds = min(config.run.round_bytes, copies * values)
    needed, free = values * each + in_rounds, config.device.host_bytes or free_bytes()
    if free is None or needed <= free:
        return made
    told = "device.host_bytes allows" if config.device.host_bytes else "this machine has free"
    enough = config.run.stages * math.ceil(needed / free)
    blocks = sum(map(len, _blocks(config)))
    tries = []
    if on_host and needed - moments * values + _moments(made, "8bit") <= free:
        tries.append("train.moments=8bit")
    if enough <= blocks:
        # One machine that trains alone cannot share the model out among stages.
        tries.append(f"run.stages={enough}" if rounds else f"shoal run with run.stages={enough} on several machines")
    fitting = int(max(free // (each + copies), (free - config.run.round_bytes) // each))
    raise ValueError(
        f"{where} takes {size(needed)} of host memory ({each:.4g} bytes for each of {values:,} parameters"
        + (f", {size(in_rounds)} for averaging" if in_rounds else "")
        + f"), {told} {size(free)}; about {fitting:,} parameters would fit"
        + (f"; try {' or '.join(tries)}" if tries else "")
    )


def free_bytes() -> int | None:
    """Host memory that could be taken now; None where nobody says."""
    found = [value for value in (_meminfo(), _cgroup()) if value is not None]
    if found:
        return min(found)
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def _meminfo() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _cgroup() -> int | None:
    """Of a container with a limit of its own. Pages that only cache files are given back when they are needed."""
    try:
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        lines = (CGROUP / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):  # no cgroup of version 2, or "max"
        return None
    cached = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
    return max(0, limit - used + cached)

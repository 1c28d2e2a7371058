"""Whether a stage fits this machine's device and host memory, decided before its weights are allocated.

`executor.check` asks before training starts, `create` again before it allocates. Each error names the needed bytes, the
available bytes and what would fit.
"""

from __future__ import annotations

import math

from shoal.config import ROUND_COPIES, Config, Train
from shoal.executor.base import device_of, memory_limit
from shoal.executor.swap.groups import Runner
from shoal.host import free_bytes
from shoal.model import stages
from shoal.model.cut import Stage, cut
from shoal.numerics.eightbit import nbytes
from shoal.numerics.muon import single_moments
from shoal.units import size

ROUND_BYTES = 4  # per parameter while a round runs, besides run.averaging_memory_bytes: the averaged gradient


def check(config: Config) -> None:
    """ValueError: one of the run's stages does not fit here. The leader may assign any of them to this peer."""
    count = config.run.stages
    blocks = _blocks(config)
    middle = sorted(range(1, count - 1), key=lambda stage: -len(blocks[stage]))[:1]
    for stage in dict.fromkeys([0, *middle, count - 1]):
        check_stage(config, stage)


def check_stage(config: Config, stage: int) -> None:
    """ValueError: that stage does not fit here."""
    stage_shape = check_host(config, stage)
    values, where = _values(stage_shape), _where(config, stage)
    limit = memory_limit(config) * config.device.count
    if config.device.executor == "swapping":
        runner = Runner(stage_shape, config)  # refuses a family that is not made of units
        try:
            if limit:
                runner.refuse()
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    elif limit and (needed := stage_bytes(stage_shape, config)) > limit:
        raise ValueError(
            f"{where}: device.memory_bytes = {size(limit)}, but with device.executor = 'resident' its {values:,} parameters"
            f" take {size(needed)} before any activation; try device.executor=swapping, or more stages"
        )


def stage_bytes(stage: Stage, config: Config) -> int:
    """Device bytes of a resident stage besides its activations."""
    return _values(stage) * resident_bytes(config) + _moments(stage, config.train) + frozen_bytes(stage)


def frozen_bytes(stage: Stage) -> int:
    """Of the weights that are not trained."""
    return sum(value.nbytes for value in stage.frozen())


def advice(config: Config, stage: int) -> str:
    """What that stage takes at least, and what takes less: for a peer that ran out of memory."""
    if config.device.executor == "emulated":
        return "an emulated stage takes little: this machine has no memory left"
    device, train = config.device, config.train
    stage_shape = stages.hollow(config, stage)
    moments = _moments(stage_shape, train)
    if device.executor == "resident":
        needed, what = stage_bytes(stage_shape, config), "device memory before any activation"
    else:
        needed = _values(stage_shape) * host_bytes(config) + moments + frozen_bytes(stage_shape)
        what = "host memory"
    hints = {
        "device.executor=swapping": device.executor == "resident" and device_of(config).type != "mps",
        "device.sequences=1": train.microbatch > 1 and device.sequences != 1,
        "train.moments=8bit": train.moments != "8bit" and train.optimizer == "adamw",
        f"run.stages={config.run.stages + 1}": config.run.stages < sum(map(len, _blocks(config))),
    }
    tries = [hint for hint, helps in hints.items() if helps] or ["a machine with more memory"]
    return f"{_where(config, stage)} takes {size(needed)} of {what}; try {' or '.join(tries)}"


def _blocks(config: Config) -> tuple[range, ...]:
    from shoal.model import sequential
    from shoal.model.families import hf_config

    if (own := sequential.own_sequential(config)) is not None:
        return cut(config.run, len(list(own.model.children())))
    return cut(config.run, hf_config(config).num_hidden_layers)


def resident_bytes(config: Config) -> int:
    """Bytes per parameter besides the moments: fp32 value and sum; with bfloat16 the rounded copy too; another replica's sum where
    steps are audited."""
    audited = 4 if config.run.spot_checks else 0
    return 8 + (0 if config.train.dtype == "float32" else 2) + audited + _late_bytes(config)


def host_bytes(config: Config) -> int:
    """Host bytes per parameter, besides the moments and those of a round."""
    copies = 0 if config.train.dtype == "float32" else 2
    apart = 8 if config.train.local_steps > 1 else 0  # parameters at the start of the round, and the outer momentum
    if config.device.executor == "swapping":  # value, sum, and the pending sum
        return 12 + copies + apart + _late_bytes(config)
    return apart + (resident_bytes(config) if device_of(config).type == "cpu" else 0)


def _late_bytes(config: Config) -> int:
    """Bytes per parameter with overlap: the sum of a second step, the older version, and in fp32 a copy to compute with, since the
    optimizer writes to the parameters meanwhile."""
    if not config.train.staleness:
        return 0
    return 12 if config.train.dtype == "float32" else 6


def _moments(stage_shape: Stage, train: Train) -> int:
    """Bytes of the optimizer's moments."""
    single = single_moments({name: value.shape for name, value in stage_shape.named_parameters()}, train)
    return sum(
        4 * value.numel() if name in single else nbytes(value.numel(), train.moments)
        for name, value in stage_shape.named_parameters()
    )


def _eight_bits(stage_shape: Stage) -> int:
    return sum(nbytes(value.numel(), "8bit") for _, value in stage_shape.named_parameters())


def _values(stage: Stage) -> int:
    return sum(value.numel() for _, value in stage.named_parameters())


def _where(config: Config, stage: int) -> str:
    return f"stage {stage} of {config.run.stages}" if config.run.stages > 1 else "the model"


def check_host(config: Config, stage: int) -> Stage:
    """That stage on the meta device. ValueError: it does not fit the host memory that is free now."""
    stage_shape = stages.hollow(config, stage)
    values, where = _values(stage_shape), _where(config, stage)
    rounds = config.run.peers > 1
    on_host = config.device.executor == "swapping" or device_of(config).type == "cpu"
    moments = _moments(stage_shape, config.train) / values if on_host else 0.0
    value_bytes, copies = host_bytes(config) + moments + ROUND_BYTES * rounds, 4 * ROUND_COPIES * rounds
    round_bytes = min(config.run.averaging_memory_bytes, copies * values)
    frozen = frozen_bytes(stage_shape) * on_host
    needed, free = values * value_bytes + round_bytes + frozen, config.device.host_bytes or free_bytes()
    if free is None or needed <= free:
        return stage_shape
    source = "device.host_bytes allows" if config.device.host_bytes else "this machine has free"
    enough = config.run.stages * math.ceil(needed / free)
    blocks = sum(map(len, _blocks(config)))
    hints = []
    adamw = config.train.optimizer == "adamw"
    if on_host and adamw and needed - moments * values + _eight_bits(stage_shape) <= free:
        hints.append("train.moments=8bit")
    if enough <= blocks:
        # One machine that trains alone cannot share the model out among stages.
        hints.append(f"run.stages={enough}" if rounds else f"shoal run with run.stages={enough} on several machines")
    rest = max(0, free - frozen)
    fitting = int(max(rest // (value_bytes + copies), (rest - config.run.averaging_memory_bytes) // value_bytes))
    raise ValueError(
        f"{where} takes {size(needed)} of host memory ({value_bytes:.4g} bytes for each of {values:,} parameters"
        + (f", {size(round_bytes)} for averaging" if round_bytes else "")
        + (f", {size(frozen)} of frozen weights" if frozen else "")
        + f"), {source} {size(free)}; about {fitting:,} parameters would fit"
        + (f"; try {' or '.join(hints)}" if hints else "")
    )

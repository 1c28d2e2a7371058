"""Executors run one stage of a model on one device. `create` picks the one that the configuration names."""

from __future__ import annotations

import logging

from shoal.config import Config
from shoal.executor.base import Executor, check_device, check_memory, device_of, emulates_bf16
from shoal.executor.delayed import Delayed, Restorable
from shoal.numerics.optimizer import Schedule

log = logging.getLogger(__name__)


def check(config: Config) -> None:
    """ValueError: a stage of this run does not fit this machine. No weights are read or allocated."""
    if config.device.executor != "emulated":
        check_device(config)
        check_memory(config)
        if config.run.serve:
            if config.tune.method != "full":
                from shoal.model import stages

                stages.hollow(config, 0)  # by libraries that may not be here
            return
        if config.train.dtype == "bfloat16" and emulates_bf16(device_of(config)):
            log.warning(
                "this card emulates train.dtype=bfloat16, seldom faster than float32; shoal probe measures both"
            )
        from shoal.executor import fit

        fit.check(config)


def create(config: Config, stage: int, *, source: str | None = None) -> Executor:
    """The executor of stage `stage`, with weights from directory `source`, else `model.path`, else the seed."""
    if config.run.serve:
        from shoal.executor.serving import Serving
        from shoal.model import stages

        check_device(config)
        return Serving(stages.build(config, stage, source=source, device=str(device_of(config))), config)
    if config.device.count > 1:
        check_device(config)
        from shoal.executor import fit
        from shoal.executor.shards.sharded import Sharded

        fit.check_host(config, stage)
        return Sharded(config, stage, source)
    if config.train.local_steps > 1 and config.device.executor != "emulated":  # which has no model to step
        from shoal.executor.local import LocalSteps

        return LocalSteps(lambda alone, schedule: _plain(alone, stage, source, schedule), config)
    plain = _plain(config, stage, source)
    return Delayed(plain) if config.train.staleness else plain


def _plain(config: Config, stage: int, source: str | None, schedule: Schedule | None = None) -> Restorable:
    if config.device.executor == "emulated":  # imports are here: an emulated peer never loads transformers
        from shoal.executor.emulated import Emulated

        return Emulated(config, stage)
    check_device(config)
    from shoal.executor import fit

    fit.check_host(config, stage)
    if config.device.executor == "resident":
        from shoal.executor.resident import Resident
        from shoal.model import stages

        built = stages.build(config, stage, source=source, device=str(device_of(config)))
        resident = Resident(built, config, schedule)
        if config.device.compile:
            from shoal.executor import compiling

            compiling.warm_up(resident, built, config)
        return resident
    if config.device.executor == "swapping":
        from shoal.executor.swap.swapping import Swapping
        from shoal.model import stages

        return Swapping(stages.build(config, stage, source=source), config, schedule=schedule)
    raise ValueError(f"device.executor = {config.device.executor!r} is none of resident, swapping, emulated")

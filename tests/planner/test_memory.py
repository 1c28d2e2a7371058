"""The planned memory of a stage against the measured: never below it (3 % with activation checkpointing), and at most 5 % above."""

from __future__ import annotations

import random

import msgspec
import pytest
import torch
from torch import Tensor

from shoal.config import Config, Data, Device, Model, Run, Train
from shoal.executor.resident import Resident
from shoal.executor.swap.memory import MemoryMeter
from shoal.executor.swap.swapping import Swapping
from shoal.model import analysis, stages
from shoal.model.cut import cut, inputs
from shoal.planner.inputs import memory
from shoal.planner.inputs.profile import StageProfile

SEEDS = 40
ABOVE = 0.05
BELOW = 0.03  # with activation checkpointing, the first stage in bf16: measured 0.02


def drawn(seed: int) -> Config:
    """Families, sizes, dtypes, slices, cuts, tied embeddings and checkpointing at random."""
    draw = random.Random(seed)
    heads, count, microbatch = draw.choice([2, 4]), draw.randint(1, 3), draw.choice([2, 4])
    width = heads * draw.choice([16, 32, 64])
    return Config(
        run=Run(stages=count, seed=3),
        model=Model(
            family=draw.choice(["llama", "qwen3", "gemma2"]),
            hidden_size=width,
            layers=draw.randint(3, 8),
            heads=heads,
            kv_heads=draw.choice([1, heads]),
            intermediate_size=width * draw.choice([1, 3]),
            vocab_size=draw.choice([256, 2000]),
            tied_embeddings=count == 1 and draw.random() < 0.5,
        ),
        data=Data(sequence=draw.choice([32, 128, 256])),
        train=Train(batch=2 * microbatch, microbatch=microbatch, dtype=draw.choice(["float32", "bfloat16"])),
        device=Device(sequences=draw.choice([0, 0, 1]), checkpointing=draw.random() < 0.25),
    )


def profiles(config: Config) -> tuple[list[StageProfile], float, int]:
    counted = analysis.count(config)
    spans = cut(config.run, config.model.layers)
    return [counted.stage(span) for span in spans], counted.boundary_bytes, 4 if config.train.dtype == "float32" else 2


def ends(config: Config, stage: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Input, gradient and tokens of a backward pass."""
    shape = (config.train.microbatch, config.data.sequence)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.train.dtype]
    tokens = torch.randint(0, config.model.vocab_size, (shape[0], shape[1] + 1))
    hidden = torch.randn(*shape, config.model.hidden_size, dtype=dtype)
    last = stage == config.run.stages - 1
    return inputs(tokens) if stage == 0 else hidden, None if last else hidden.clone(), tokens if last else None


def resident_peak(config: Config, stage: int) -> int:
    """Bytes of two backward passes and an optimizer step, with all that the executor holds."""
    with MemoryMeter("cpu") as meter:
        executor = Resident(stages.build(config, stage), config)
        meter.peak = meter.now
        x, grad, tokens = ends(config, stage)
        executor.backward(x, grad, tokens)
        executor.backward(x, grad, tokens)
        executor.apply(executor.contribution(), 1.0, 0)
    return meter.peak


def assert_as_planned(seed: int) -> None:
    config = drawn(seed)
    of_stages, boundary_bytes, value_bytes = profiles(config)
    for stage, profile in enumerate(of_stages):
        need = memory.resident(profile, boundary_bytes, value_bytes)
        fewer = config.device.checkpointing and need.checkpointed_bytes
        planned, peak = fewer or need.device_bytes, resident_peak(config, stage)
        least = (1 - BELOW) * peak if fewer else peak
        assert least <= planned <= (1 + ABOVE) * peak, (
            f"seed {seed}, stage {stage}: {peak} bytes, planned {planned:.0f}"
        )


def assert_swaps_in_the_planned_memory(seed: int) -> None:
    config = drawn(seed)
    config = msgspec.structs.replace(config, device=Device(sequences=config.device.sequences))
    of_stages, boundary_bytes, value_bytes = profiles(config)
    for stage, profile in enumerate(of_stages):
        planned = int(memory.swapping(profile, boundary_bytes, value_bytes).device_bytes)
        limited = msgspec.structs.replace(config.device, executor="swapping", memory_bytes=planned)
        executor = Swapping(stages.build(config, stage), msgspec.structs.replace(config, device=limited))
        with MemoryMeter("cpu") as meter:
            executor.backward(*ends(config, stage))
        assert executor.resident_bytes + meter.peak <= planned


@pytest.mark.parametrize("seed", [0, 1, 13, 25])
def test_a_resident_stage_takes_what_is_planned(seed: int) -> None:
    assert_as_planned(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_resident_stage_takes_what_is_planned_in_forty_drawn_shapes(seed: int) -> None:
    assert_as_planned(seed)


@pytest.mark.parametrize("seed", [0, 13])
def test_a_stage_swaps_in_the_memory_that_is_planned(seed: int) -> None:
    assert_swaps_in_the_planned_memory(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_stage_swaps_in_the_memory_that_is_planned_in_forty_drawn_shapes(seed: int) -> None:
    assert_swaps_in_the_planned_memory(seed)

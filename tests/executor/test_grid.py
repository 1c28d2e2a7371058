"""The swapping executor against the resident one over the whole grid: families, dtypes, embeddings, groups, microbatches.

Bits of losses, gradient sums and parameters, and device memory, which is what the plan says and never above the limit. The whole grid is
marked slow; its corners are not.
"""

from __future__ import annotations

import itertools
import random
from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from tests.executor.test_swapping import a_config, limited, limits, resident

from shoal.config import Config
from shoal.executor.swap import memory
from shoal.executor.swap.groups import Runner, Trial
from shoal.executor.swap.swapping import Swapping
from shoal.model import stages
from shoal.model.cut import inputs

FAMILIES, DTYPES, TIED = ("llama", "qwen3"), ("float32", "bfloat16"), (False, True)
GROUPS, MICROBATCHES = range(2, 7), range(1, 9)
SHAPES = 100  # drawn at random for memory
OF_PLAN = 0.03  # by which a measured peak may differ from the planned one
BATCH = [torch.randint(0, 64, (2, 13), generator=torch.Generator().manual_seed(seed)) for seed in MICROBATCHES]


@cache
def of_groups(family: str, dtype: str, tied: bool, count: int) -> Config:
    """A model whose units can be cut into so many groups, and a limit that leads to them."""
    config = a_config(dtype=dtype, family=family, tied_embeddings=tied, layers=3 if count == 5 else 4)
    runner = Runner(stages.build(config, 0), config)
    spans = next(spans for spans in memory._partitions(runner.sizes) if len(spans) == count)
    layout = memory._plan(runner.sizes, spans, Trial(runner, config).live, runner.fixed_bytes, slabs=2)
    return limited(config, layout.device_bytes)


def of_microbatches(config: Config, count: int) -> Config:
    return msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, batch=2 * count))


def assert_same_bits(family: str, dtype: str, tied: bool, groups: int, microbatches: int) -> None:
    """Two steps: all microbatches in one pass, then each in a pass of its own."""
    config = of_microbatches(of_groups(family, dtype, tied, groups), microbatches)
    plain, one = resident(config), Swapping(stages.build(config, 0), config)
    assert one.plan.count == groups
    batch = BATCH[:microbatches]
    for step in range(2):
        losses = [plain.backward(inputs(tokens), None, tokens)[1] for tokens in batch]
        loads = one.loads
        if step == 0:
            assert one.backward_batch(batch) == losses
            assert one.loads - loads <= 2 * groups - 1
        else:
            assert [one.backward(inputs(tokens), None, tokens)[1] for tokens in batch] == losses
        assert plain.sum.any() and torch.equal(one.sum, plain.sum)
        reduced = plain.sum.clone()
        for each in (plain, one):
            each.apply(reduced, 2.0, step)
            each.zero()
        theirs = plain.state()
        assert list(one.state()) == list(theirs)
        assert all(torch.equal(value, theirs[name]) for name, value in one.state().items())


@pytest.mark.parametrize(
    ("family", "dtype", "tied", "groups", "microbatches"),
    [
        ("llama", "float32", True, 2, 1),
        ("qwen3", "bfloat16", True, 6, 8),
        pytest.param("llama", "bfloat16", False, 2, 8, marks=pytest.mark.slow),
        pytest.param("qwen3", "float32", False, 6, 1, marks=pytest.mark.slow),
    ],
)
def test_corners_of_the_grid_have_the_resident_executors_bits(
    family: str, dtype: str, tied: bool, groups: int, microbatches: int
) -> None:
    assert_same_bits(family, dtype, tied, groups, microbatches)


@pytest.mark.slow
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize(("family", "dtype", "tied"), list(itertools.product(FAMILIES, DTYPES, TIED)))
def test_every_case_of_the_grid_has_the_resident_executors_bits(
    family: str, dtype: str, tied: bool, groups: int
) -> None:
    for microbatches in MICROBATCHES:
        assert_same_bits(family, dtype, tied, groups, microbatches)


# ---------------------------------------------------------------------------------------------------------------- memory


def drawn(seed: int) -> tuple[Config, int]:
    """A model of any shape, a limit from what its largest unit takes to what all of it takes, and a number of microbatches."""
    draw = random.Random(seed)
    heads = draw.choice([2, 4])
    width = heads * draw.choice([8, 16, 32])
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "heads": heads,
        "kv_heads": draw.choice([1, heads]),
        "layers": draw.randint(1, 6),
        "intermediate_size": draw.choice([width, 3 * width, 5 * width]),
        "vocab_size": draw.choice([64, 256, 1000]),
        "family": draw.choice(FAMILIES),
        "tied_embeddings": draw.choice(TIED),
    }
    config = a_config(dtype=draw.choice(DTYPES), **sizes)
    config = msgspec.structs.replace(
        config,
        data=msgspec.structs.replace(config.data, sequence=draw.choice([4, 12, 40])),
        train=msgspec.structs.replace(config.train, batch=32, microbatch=draw.choice([1, 2, 4])),
    )
    most, _, least = limits(config)
    return limited(config, draw.choice([least, least, draw.randint(least, most), most])), draw.randint(1, 8)


def assert_peak_as_planned(seed: int) -> None:
    config, microbatches = drawn(seed)
    one = Swapping(stages.build(config, 0), config)
    shape = config.train.microbatch, config.data.sequence + 1
    batch = [torch.randint(0, 64, shape, generator=torch.Generator().manual_seed(n)) for n in range(microbatches)]
    xs = [inputs(tokens) for tokens in batch]
    with memory.MemoryMeter("cpu") as watch:
        one.backward_batch(batch)
        one.run_many(xs)
        one.backward_batch(batch)  # from inputs that were kept
    peak = one.resident_bytes + watch.peak
    assert peak <= config.device.memory_bytes, f"seed {seed}: {peak} bytes of {config.device.memory_bytes}"
    unseen_bytes = 2 * memory.ALIGN + memory.CPU_SPARE * (config.train.dtype == "bfloat16")
    assert peak <= one.plan.device_bytes <= (1 + OF_PLAN) * peak + unseen_bytes, f"seed {seed}"


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed in (2, 4) else pytest.mark.slow) for seed in range(6)]
)
def test_the_peak_is_the_planned_one_and_within_the_limit(seed: int) -> None:
    assert_peak_as_planned(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, SHAPES))
def test_the_peak_is_the_planned_one_in_a_hundred_shapes(seed: int) -> None:
    assert_peak_as_planned(seed)

"""The swapping executor: the resident one's bits, within a limit of device memory that it never passes."""

from __future__ import annotations

import math
import random
import re
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from shoal import executor
from shoal.config import Config, Data, Device, Model, Run, Train
from shoal.executor.base import NotFinite
from shoal.executor.resident import Resident
from shoal.executor.swap import memory
from shoal.executor.swap.swapping import Swapping
from shoal.model import sequential, stages
from shoal.model.cut import inputs

BATCH = [torch.randint(0, 64, (2, 13), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


def a_config(cut: int = 1, dtype: str = "float32", memory_bytes: int = 0, **model: Any) -> Config:
    sizes = {"hidden_size": 32, "layers": 4, "heads": 4, "kv_heads": 2, "intermediate_size": 48, "vocab_size": 64}
    return Config(
        run=Run(stages=cut, steps=5, seed=2),
        model=Model(**(sizes | model)),
        data=Data(sequence=12),
        train=Train(batch=8, microbatch=2, dtype=dtype, warmup=2, learning_rate=0.01),
        device=Device(executor="swapping", memory_bytes=memory_bytes),
    )


def resident(config: Config, stage: int = 0) -> Resident:
    return Resident(stages.build(config, stage), config)


def swapping(config: Config, memory_bytes: int, stage: int = 0) -> Swapping:
    return Swapping(stages.build(config, stage), limited(config, memory_bytes))


def limited(config: Config, memory_bytes: int) -> Config:
    device = Device(executor="swapping", memory_bytes=memory_bytes, sequences=config.device.sequences)
    return msgspec.structs.replace(config, device=device)


def limits(config: Config, stage: int = 0) -> list[int]:
    """What the whole stage takes, what its largest unit takes, and one in between."""
    most = swapping(config, 0, stage).plan.device_bytes
    with pytest.raises(ValueError, match="largest unit") as refused:
        swapping(config, 1, stage)
    match = re.search(r"try device\.memory_bytes=(\d+)", str(refused.value))
    assert match is not None
    return [most, (most + int(match[1])) // 2, int(match[1])]


def whole_batch(one: Swapping) -> list[float | None]:
    """The losses of the batch's microbatches, run back through a model of one stage layer by layer."""
    results = one.backward_many([inputs(tokens) for tokens in BATCH], [None] * len(BATCH), BATCH)
    assert all(grad is None for grad, _ in results)
    return [loss for _, loss in results]


@pytest.mark.parametrize(
    ("family", "dtype", "tied"),
    [  # each pair of choices; the whole grid is slow, in test_grid.py
        ("llama", "float32", False),
        pytest.param("llama", "bfloat16", True, marks=pytest.mark.slow),
        pytest.param("qwen3", "float32", True, marks=pytest.mark.slow),
        ("qwen3", "bfloat16", False),
    ],
)
def test_gradients_and_parameters_are_the_resident_executors_bit_for_bit(family: str, dtype: str, tied: bool) -> None:
    config = a_config(dtype=dtype, family=family, tied_embeddings=tied)
    plain = resident(config)
    many = [swapping(config, limit) for limit in limits(config)]
    assert many[0].plan.count == 1 < many[1].plan.count < many[2].plan.count
    for step in range(3):
        losses = [plain.backward(inputs(tokens), None, tokens)[1] for tokens in BATCH]
        for one in many:
            assert whole_batch(one) == losses
            assert torch.equal(one.sum, plain.sum)
        reduced = plain.sum.clone()
        for each in (plain, *many):
            each.apply(reduced, 2.0, step)
            each.zero()
            assert not each.sum.any()
    for one in many:
        state = one.state()
        assert list(state) == list(plain.state())
        assert all(torch.equal(value, state[name]) for name, value in plain.state().items())
        assert one.digest() == plain.digest()


def through(chain: list[Any], order: list[int]) -> list[Tensor | float | None]:
    """All microbatches forward, then back in `order`, one by one, as peers do: what each hop gave."""
    ways, results = {}, []
    for index, tokens in enumerate(BATCH):
        xs = [inputs(tokens)]
        for one in chain[:-1]:
            xs.append(one.forward(xs[-1]))
        ways[index] = xs
    for index in order:
        grad: Tensor | None = None
        for one, x in zip(reversed(chain), reversed(ways[index]), strict=True):
            grad, loss = one.backward(x, grad, BATCH[index] if one is chain[-1] else None)
            results += [grad, loss]
    return results


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stages_that_swap_answer_a_pipelines_hops_as_resident_ones_do(dtype: str) -> None:
    config = a_config(2, dtype)
    plain = [resident(config, stage) for stage in range(2)]
    swapped = [swapping(config, limits(config, stage)[2], stage) for stage in range(2)]
    assert all(one.plan.count > 1 for one in swapped)
    for step, order in enumerate(([0, 1, 2, 3], [2, 0, 0, 3])):
        for ours, theirs in zip(through(swapped, order), through(plain, order), strict=True):
            assert torch.equal(ours, theirs) if isinstance(ours, Tensor) else ours == theirs
        for one, other in zip(swapped, plain, strict=True):
            assert torch.equal(one.sum, other.sum)
            for each in (one, other):
                each.apply(other.sum.clone(), 1.5, step)
            other.zero()
            one.zero()


@pytest.mark.slow
def test_a_pass_loads_each_group_at_most_twice_and_the_last_once_however_many_microbatches() -> None:
    config = a_config()
    for limit in limits(config):
        for count in (1, 4):
            one = swapping(config, limit)
            xs, ends = [inputs(tokens) for tokens in BATCH[:count]], BATCH[:count]
            one.backward_many(xs, [None] * count, ends)
            assert one.loads <= 2 * one.plan.count - 1
            first = one.loads
            one.backward_many(xs, [None] * count, ends)
            assert one.loads - first <= 2 * one.plan.count - 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_slices_of_a_microbatch_pass_through_each_group_before_the_next_is_loaded(dtype: str) -> None:
    config = a_config(2, dtype)
    config = msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, batch=16, microbatch=8))
    tokens, unsliced = torch.cat(BATCH), [resident(config, stage) for stage in range(2)]
    config = msgspec.structs.replace(config, device=Device(sequences=2))
    least = [limits(config, stage)[2] for stage in range(2)]
    swapped, plain = (
        [swapping(config, least[stage], stage) for stage in range(2)],
        [resident(config, s) for s in range(2)],
    )
    results = []
    for first, last in (unsliced, plain, swapped):
        x = first.forward(inputs(tokens))
        grad, loss = last.backward(x, None, tokens)
        first.backward(inputs(tokens), grad, None)
        results.append((x, grad, loss, first.sum, last.sum))
    for ours, theirs, whole in zip(results[2], results[1], results[0], strict=True):
        if isinstance(ours, Tensor):
            assert torch.equal(ours, theirs)
            assert torch.allclose(ours, whole, rtol=0.05, atol=1e-2 if dtype == "bfloat16" else 1e-6)
        else:
            assert ours == theirs == pytest.approx(whole, rel=1e-3)
    assert all(one.loads <= 2 * one.plan.count - 1 for one in swapped)
    assert all(one.plan.count > 1 for one in swapped)
    for one in (*plain, *swapped):
        before = one.sum.clone()
        with pytest.raises(ValueError, match=r"finite|gradient"):
            last_x = results[0][0].clone()
            last_x[-1] = math.inf  # in the last slice
            one.backward(inputs(tokens) if one in (plain[0], swapped[0]) else last_x, last_x, tokens)
        assert torch.equal(one.sum, before)


def test_a_forward_pass_leaves_what_the_backward_pass_needs() -> None:
    config = a_config(2)
    one = swapping(config, limits(config)[2])
    groups = one.plan.count
    xs = [inputs(tokens) for tokens in BATCH]
    ys = one.run_many(xs)
    assert one.loads == groups
    one.backward_many(xs, [torch.ones_like(y) for y in ys], [None] * len(xs))
    assert one.loads <= 2 * groups - 1


def test_nothing_of_the_old_parameters_is_used_after_a_change() -> None:
    config = a_config(2)
    plain, one = resident(config), swapping(config, limits(config)[2])
    x = inputs(BATCH[0])
    one.forward(x)
    y = plain.forward(x)
    for each in (plain, one):
        each.apply(torch.linspace(-1, 1, each.length), 1.0, 0)
    assert torch.equal(one.backward(x, y, None)[1] or y, plain.backward(x, y, None)[1] or y)
    assert torch.equal(one.sum, plain.sum)
    assert torch.equal(one.forward(x), plain.forward(x))
    fresh = resident(config)
    one.load_state(fresh.state())
    assert torch.equal(one.forward(x), y)


def test_device_memory_stays_under_the_limit_and_is_what_the_plan_says() -> None:
    drawn = random.Random(5)
    for _ in range(3):  # test_grid.py draws other shapes, six of them quick
        width = drawn.choice([16, 32, 64])
        config = a_config(
            dtype=drawn.choice(["float32", "bfloat16"]),
            family=drawn.choice(["llama", "qwen3"]),
            hidden_size=width,
            layers=drawn.randint(2, 5),
            intermediate_size=drawn.choice([width, 3 * width]),
            vocab_size=drawn.choice([64, 256]),
            tied_embeddings=drawn.random() < 0.5,
        )
        most, _, least = limits(config)
        limit = swapping(config, drawn.choice([least, drawn.randint(least, most)])).plan.device_bytes
        one = swapping(config, limit)  # not a byte to spare
        with memory.host():
            xs = [inputs(tokens) for tokens in BATCH]
        with memory.MemoryMeter("cpu") as watch:
            one.backward_many(xs, [None] * len(BATCH), BATCH)
        peak = one.resident_bytes + watch.peak
        assert peak <= limit
        assert peak == pytest.approx(one.plan.device_bytes, rel=0.03)


def test_a_limit_below_the_largest_unit_is_refused_with_one_that_is_enough() -> None:
    config = a_config()
    assert swapping(config, limits(config)[2]).plan.count > 1  # the limit that the refusal names
    with pytest.raises(ValueError, match=r"device\.memory_bytes = 1,000 is too little .* try device\.memory_bytes="):
        executor.create(limited(config, 1000), 0)


def test_a_microbatch_that_is_refused_leaves_the_sum_and_takes_its_whole_call_with_it() -> None:
    config = a_config(2)
    one = swapping(config, limits(config)[2])
    xs = [inputs(tokens) for tokens in BATCH]
    grads = [torch.ones_like(y) for y in one.run_many(xs)]
    one.backward_many(xs, grads, [None] * len(xs))
    before = one.sum.clone()
    with pytest.raises(NotFinite):
        one.backward_many(xs, [*grads[:-1], torch.full_like(grads[-1], math.inf)], [None] * len(xs))
    with pytest.raises(ValueError, match="gradient"):
        one.backward_many(xs, [*grads[:-1], torch.ones(2, 12, 31)], [None] * len(xs))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        one.backward(xs[0] + 64, grads[0], None)
    assert torch.equal(one.sum, before)


class Steep(nn.Module):
    """TaskRunner its input through; the gradient of its parameter is not a number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(16))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sqrt(self.weight * 0)


def steep() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(64, 16), Steep(), nn.Linear(16, 16), nn.Linear(16, 64))


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 64))


def test_what_later_groups_added_is_taken_back_when_an_earlier_one_finds_no_number() -> None:
    config = a_config(hidden_size=16)
    whole = Swapping(sequential.build(steep, (0, 1), seed=1), config).plan
    one = Swapping(sequential.build(steep, (0, 1), seed=1), limited(config, whole.device_bytes - 1))
    assert one.plan.count > 1
    with pytest.raises(NotFinite):
        one.backward(inputs(BATCH[0]), None, BATCH[0])
    assert not one.sum.any()


def test_a_plain_sequential_swaps_child_by_child() -> None:
    config = a_config(hidden_size=16)
    whole = Swapping(sequential.build(plain, (0, 1), seed=1), config).plan
    ours = Swapping(sequential.build(plain, (0, 1), seed=1), limited(config, whole.device_bytes - 1))
    theirs = Resident(sequential.build(plain, (0, 1), seed=1), config)
    assert ours.plan.count > 1
    for tokens in BATCH:
        assert ours.backward(inputs(tokens), None, tokens) == theirs.backward(inputs(tokens), None, tokens)
    assert torch.equal(ours.sum, theirs.sum)


def test_a_family_that_does_more_between_its_blocks_than_hand_on_is_refused() -> None:
    config = a_config(family="granite", extra={"embedding_multiplier": 12.0})
    with pytest.raises(ValueError, match=r"more than pass on hidden states.*set device\.executor=resident"):
        swapping(config, 0)

"""Adapters with the swapping executor: the resident one's bits, frozen weights only ever loaded, within the plan's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.executor.test_swapping import BATCH, a_config, limits, resident, swapping, through, whole_batch
from tests.model.test_adapters import based

from shoal import executor
from shoal.config import Config
from shoal.executor import fit
from shoal.executor.base import NotFinite
from shoal.executor.swap import memory
from shoal.model import stages
from shoal.model.cut import inputs


def tuned(
    folder: Path, dtype: str = "float32", cut: int = 1, model: dict[str, Any] | None = None, **tune: Any
) -> Config:
    """A base model on disk, and adapters that already say something."""
    config = based(a_config(dtype=dtype, **(model or {})), folder / "base", **tune)
    return msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, stages=cut))


def stirred(one: Any) -> Any:
    """With adapters of which none is zero, as after some steps."""
    state = {name: value.clone() for name, value in one.state().items()}
    generator = torch.Generator().manual_seed(4)
    for name, value in state.items():
        if name.startswith("model/"):
            value += 0.1 * torch.randn(value.shape, generator=generator)
    one.load_state(state)
    return one


@pytest.mark.parametrize(
    ("family", "dtype", "tied", "tune"),
    [
        pytest.param("llama", "float32", False, {}, marks=pytest.mark.slow),
        ("llama", "bfloat16", True, {}),
        pytest.param("qwen3", "float32", True, {"quantize": "nf4"}, marks=pytest.mark.slow),
        pytest.param("llama", "bfloat16", False, {"quantize": "nf4"}, marks=pytest.mark.slow),
        pytest.param("llama", "float32", False, {"dora": True}, marks=pytest.mark.slow),
        ("llama", "float32", False, {"targets": ("q_proj", "down_proj"), "rslora": True}),
        pytest.param("llama", "bfloat16", False, {"also": ("embeddings", "head", "norms")}, marks=pytest.mark.slow),
        pytest.param(
            "qwen3", "float32", False, {"also": ("embeddings", "norms"), "quantize": "nf4"}, marks=pytest.mark.slow
        ),
    ],
)
def test_adapters_get_the_resident_executors_bits_however_often_their_base_is_loaded(
    tmp_path: Path, family: str, dtype: str, tied: bool, tune: dict[str, Any]
) -> None:
    config = tuned(tmp_path, dtype, model={"family": family, "tied_embeddings": tied}, **tune)
    plain = stirred(resident(config))
    many = [stirred(swapping(config, limit)) for limit in limits(config)]
    assert many[0].plan.count == 1 < many[1].plan.count < many[2].plan.count
    frozen = [one._host.frozen.flat.clone() for one in many]
    for step in range(2):
        losses = [plain.backward(inputs(tokens), None, tokens)[1] for tokens in BATCH]
        for one in many:
            assert whole_batch(one) == losses
            assert torch.equal(one.sum, plain.sum)
        reduced = plain.sum.clone()
        assert reduced.count_nonzero() > len(reduced) / 2
        for each in (plain, *many):
            each.apply(reduced, 2.0, step)
            each.zero()
    for one, before in zip(many, frozen, strict=True):
        assert one.length == plain.length and list(one.state()) == list(plain.state())
        assert all(torch.equal(value, one.state()[name]) for name, value in plain.state().items())
        assert one.base == plain.base and one.digest() == plain.digest()
        assert torch.equal(one._host.frozen.flat, before)


def test_stages_that_swap_answer_hops_as_resident_ones_do(tmp_path: Path) -> None:
    config = tuned(tmp_path, "bfloat16", 2, quantize="nf4")
    plain = [stirred(resident(config, stage)) for stage in range(2)]
    swapped = [stirred(swapping(config, limits(config, stage)[2], stage)) for stage in range(2)]
    assert all(one.plan.count > 1 for one in swapped)
    for ours, theirs in zip(through(swapped, [2, 0, 0, 3]), through(plain, [2, 0, 0, 3]), strict=True):
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs
    for one, other in zip(swapped, plain, strict=True):
        assert torch.equal(one.sum, other.sum)


def test_a_frozen_embedding_that_begins_the_model_is_not_loaded_for_a_backward_pass(tmp_path: Path) -> None:
    config = tuned(tmp_path)
    one = swapping(config, limits(config)[2])
    assert (one.plan.groups[0].start, one.plan.groups[0].stop) == (0, 1), "the embedding is a group"
    assert [group.learns for group in one._groups] == [False] + [True] * (one.plan.count - 1)
    assert [group.passes_back for group in one._groups[:3]] == [False, False, True]
    xs = [inputs(tokens) for tokens in BATCH]
    one.backward_many(xs, [None] * len(xs), BATCH)
    assert one.loads == one.plan.count + one.plan.count - 3, (
        "forward all, back all but the last two, which stay, and the first"
    )


@pytest.mark.slow  # quickly in tests/planner/test_memory.py
@pytest.mark.parametrize("tune", [{}, {"quantize": "nf4"}])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_device_memory_is_what_the_plan_says_and_the_base_lies_in_the_host_once(
    tmp_path: Path, dtype: str, tune: dict[str, Any]
) -> None:
    config = tuned(tmp_path, dtype, model={"hidden_size": 64, "intermediate_size": 192}, **tune)
    hollow = stages.hollow(config, 0)
    for limit in limits(config):
        one = swapping(config, limit)
        one = swapping(config, one.plan.device_bytes)  # not a byte to spare
        with memory.host():
            xs = [inputs(tokens) for tokens in BATCH]
        with memory.MemoryMeter("cpu") as watch:
            one.backward_many(xs, [None] * len(BATCH), BATCH)
        peak = one.resident_bytes + watch.peak
        assert peak <= one.plan.device_bytes
        assert peak == pytest.approx(one.plan.device_bytes, rel=0.03)
        values, copies = one.length, 0 if dtype == "float32" else 2
        assert one.plan.host_bytes == values * (20 + copies) + fit.frozen_bytes(hollow)
    if not tune:
        assert one.plan.device_bytes < fit.frozen_bytes(hollow), "the base model alone is larger"


def test_a_microbatch_that_is_refused_leaves_the_sum(tmp_path: Path) -> None:
    config = tuned(tmp_path, cut=2)
    one = stirred(swapping(config, limits(config, 1)[2], 1))
    x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(1))
    one.backward(x, None, BATCH[0])
    before = one.sum.clone()
    x[0, 0, 0] = torch.inf
    with pytest.raises(NotFinite):
        one.backward(x, None, BATCH[0])
    assert before.any() and torch.equal(one.sum, before)


def test_the_host_must_hold_the_frozen_weights_too(tmp_path: Path) -> None:
    config = tuned(tmp_path)
    frozen = fit.frozen_bytes(stages.hollow(config, 0))
    for kind in ("swapping", "resident"):
        device = msgspec.structs.replace(config.device, executor=kind, host_bytes=frozen)
        with pytest.raises(ValueError, match="of frozen weights"):
            executor.create(msgspec.structs.replace(config, device=device), 0)

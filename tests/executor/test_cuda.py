"""The swapping executor on a CUDA device: near the resident one's values, within a limit that PyTorch's allocator keeps."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from shoal.config import Config, Data, Device, Model, Run, Train
from shoal.executor.resident import Resident
from shoal.executor.swap import memory
from shoal.executor.swap.swapping import Swapping
from shoal.model import stages
from shoal.model.cut import inputs

LIMIT = 320 << 20  # half of what this model's state takes, above memory.CUDA_CAPPED
BATCH = [torch.randint(0, 256, (2, 129), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


def a_config(dtype: str, executor: str, memory_bytes: int = 0) -> Config:
    """A model of 42 million parameters: 670 MB of training state."""
    return Config(
        run=Run(stages=1, peers=1, steps=5, seed=2),
        model=Model(hidden_size=512, layers=14, heads=8, kv_heads=8, intermediate_size=1536),
        data=Data(sequence=128),
        train=Train(batch=8, microbatch=2, dtype=dtype, warmup=0, learning_rate=0.001),
        device=Device(kind="cuda", executor=executor, memory_bytes=memory_bytes),
    )


on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def freed() -> Iterator[None]:
    yield
    gc.collect()  # executors are in cycles, and their slots count against the next test's limit
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def away(values: Tensor, wanted: Tensor) -> float:
    """Euclidean distance over the norm."""
    return float((values.cpu().double() - wanted.cpu().double()).norm() / wanted.cpu().double().norm())


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_sums_and_parameters_are_the_resident_executors_within_rounding(
    freed: None, dtype: str, tolerance: float
) -> None:
    plain = Resident(stages.build(a_config(dtype, "resident"), 0, device="cuda"), a_config(dtype, "resident"))
    losses = [[plain.backward(inputs(tokens), None, tokens)[1] for tokens in BATCH]]
    sums, start = plain.sum.cpu(), plain.state()["model/model.embed_tokens.weight"].cpu().clone()
    plain.apply(plain.contribution(), 2.0, 0)
    after = {name: value.cpu() for name, value in plain.state().items()}
    del plain
    torch.cuda.empty_cache()
    config = a_config(dtype, "swapping", LIMIT)
    one = Swapping(stages.build(config, 0), config)
    assert one.plan.count > 2
    losses.append(list(one.backward_batch(BATCH)))
    assert losses[0] == pytest.approx(losses[1], rel=tolerance)
    assert away(one.sum, sums) < tolerance
    one.apply(one.contribution(), 2.0, 0)
    moved = away(one.state()["model/model.embed_tokens.weight"], start)
    assert away(one.state()["model/model.embed_tokens.weight"], after["model/model.embed_tokens.weight"]) < moved / 10


@pytest.mark.gpu
@on_cuda
def test_the_allocator_is_held_to_the_limit_and_the_peak_stays_within_it(freed: None) -> None:
    config = a_config("bfloat16", "swapping", LIMIT)
    one = Swapping(stages.build(config, 0), config)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        one.backward_batch(BATCH)
    assert torch.cuda.max_memory_allocated() <= one.plan.device_bytes <= LIMIT
    assert torch.cuda.max_memory_reserved() <= LIMIT < 16 * one.length
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(LIMIT, dtype=torch.uint8, device="cuda")


def test_a_large_limit_is_given_to_the_allocator_and_leaves_it_room(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[float] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 << 30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", set_to.append)
    memory.cap_("cuda", 20 << 30)
    memory.cap_("cuda", 100 << 30)
    assert set_to == [0.25, 1.0]
    for device, limit in (("cpu", 20 << 30), ("cuda", 0), ("cuda", 1 << 20)):
        memory.cap_(device, limit)
        assert memory.spare_bytes(device, limit) == 0
    assert set_to == [0.25, 1.0] and memory.spare_bytes("cuda", 20 << 30) == 128 << 20

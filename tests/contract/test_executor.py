"""What every executor must do. To add one, add a `Case` that builds it over two stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from shoal import executor
from shoal.config import Config, Data, Device, Model, Run, Train
from shoal.executor.base import Executor, boundary
from shoal.executor.emulated import Emulated
from shoal.model.cut import inputs

MICROBATCHES = 4
FP32_BYTES, BF16_BYTES = 48_000, 32_000  # too little for a whole stage, so that its two units take turns
TOKENS = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(7))


@dataclass(frozen=True)
class Case:
    name: str
    config: Config
    make: Callable[[Config, int], Executor]


def a_config(kind: str, dtype: str = "float32", device: str = "cpu", memory_bytes: int = 0) -> Config:
    return Config(
        run=Run(stages=2, steps=10),
        model=Model(hidden_size=16, layers=2, heads=2, kv_heads=2, intermediate_size=24, vocab_size=64),
        data=Data(sequence=8),
        train=Train(batch=8, microbatch=2, dtype=dtype, warmup=0, learning_rate=0.01),
        device=Device(kind=device, executor=kind, emulated_values=64, memory_bytes=memory_bytes),
    )


CASES = [
    Case("resident fp32", a_config("resident"), executor.create),
    Case("resident bf16", a_config("resident", "bfloat16"), executor.create),
    Case("swapping fp32", a_config("swapping", memory_bytes=FP32_BYTES), executor.create),
    Case("swapping bf16", a_config("swapping", "bfloat16", memory_bytes=BF16_BYTES), executor.create),
    Case("emulated", a_config("emulated"), lambda config, stage: Emulated(config, stage, sleep=lambda seconds: None)),
]

if torch.cuda.is_available():
    CASES.append(Case("resident cuda", a_config("resident", device="cuda"), executor.create))
    CASES.append(Case("swapping cuda", a_config("swapping", device="cuda", memory_bytes=1 << 20), executor.create))
if torch.backends.mps.is_available():
    CASES.append(Case("resident mps", a_config("resident", device="mps"), executor.create))


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param  # type: ignore[no-any-return]


def pair(case: Case) -> tuple[Executor, Executor]:
    return case.make(case.config, 0), case.make(case.config, 1)


def train_one(first: Executor, last: Executor, tokens: Tensor = TOKENS) -> float:
    """One microbatch through both stages and back."""
    x = first.forward(inputs(tokens))
    grad, loss = last.backward(x, None, tokens)
    assert grad is not None and loss is not None
    assert first.backward(inputs(tokens), grad, None) == (None, None)
    return loss


def test_boundary_tensors_are_as_configured_and_sums_are_flat_fp32(case: Case) -> None:
    first, last = pair(case)
    x = first.forward(inputs(TOKENS))
    grad, loss = last.backward(x, None, TOKENS)
    assert grad is not None and isinstance(loss, float)
    for tensor in (x, grad):
        assert (tuple(tensor.shape), tensor.dtype) == tuple(boundary(case.config))
        assert not tensor.requires_grad
    for one in (first, last):
        assert tuple(one.sum.shape) == (one.length,) and one.sum.dtype == torch.float32


def test_backward_adds_to_the_sum_and_zero_empties_it(case: Case) -> None:
    first, last = pair(case)
    train_one(first, last)
    once = [one.sum.clone() for one in (first, last)]
    train_one(first, last)
    for one, before in zip((first, last), once, strict=True):
        assert before.any()
        assert torch.equal(one.sum, before + before)
        one.zero()
        assert not one.sum.any()


def test_a_refused_backward_leaves_the_sum_as_it_was(case: Case) -> None:
    first, last = pair(case)
    train_one(first, last)
    before = [one.sum.clone() for one in (first, last)]
    x = first.forward(inputs(TOKENS))
    with pytest.raises(ValueError, match="tokens"):
        last.backward(x, None, None)
    with pytest.raises(ValueError, match="gradient"):
        first.backward(inputs(TOKENS), None, None)
    assert all(torch.equal(one.sum, kept) for one, kept in zip((first, last), before, strict=True))


def test_replicas_that_apply_the_same_bytes_have_the_same_digest_and_others_do_not(case: Case) -> None:
    one, other = case.make(case.config, 0), case.make(case.config, 0)
    assert one.digest() == other.digest()
    reduced = torch.linspace(-1, 1, one.length)
    start = one.digest()
    one.apply(reduced, 3.0, 0)
    assert one.digest() != start
    other.apply(reduced.clone(), 3.0, 0)
    assert one.digest() == other.digest()


def test_apply_leaves_the_reduced_gradient_alone(case: Case) -> None:
    one = case.make(case.config, 1)
    reduced = torch.linspace(-1, 1, one.length)
    one.apply(reduced, 3.0, 0)
    assert torch.equal(reduced, torch.linspace(-1, 1, one.length))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"device\.kind = 'cuda'.*only cpu here.*device\.kind=auto"):
        executor.create(a_config("resident", device="cuda"), 0)


def test_state_in_fixed_order_makes_another_executor_continue_with_the_same_bits(case: Case) -> None:
    one, other = case.make(case.config, 0), case.make(case.config, 0)
    for step in range(2):
        one.apply(torch.linspace(-1, step, one.length), 3.0, step)
    state = {name: value.clone() for name, value in one.state().items()}
    names = [name.partition("/") for name in state]
    parameters = [rest for kind, _, rest in names if kind == "model"]
    assert names == [(kind, "/", name) for kind in ("model", "exp_avg", "exp_avg_sq") for name in parameters]
    assert all(value.dtype == torch.float32 for value in state.values())
    other.load_state(state)
    assert other.digest() == one.digest()
    assert torch.equal(one.forward(inputs(TOKENS)), other.forward(inputs(TOKENS)))
    for two in (one, other):
        two.apply(torch.linspace(1, 2, two.length), 3.0, 2)
    assert other.digest() == one.digest()
    assert torch.equal(one.forward(inputs(TOKENS)), other.forward(inputs(TOKENS)))


def test_state_of_another_stage_is_refused_and_changes_nothing(case: Case) -> None:
    one = case.make(case.config, 0)
    before = one.digest()
    state = {name: value + 1 for name, value in one.state().items()}
    with pytest.raises(ValueError, match="another stage"):
        one.load_state(dict(list(state.items())[:-1]))
    spoilt = dict(state)
    spoilt[list(spoilt)[-1]] = torch.zeros(3)
    with pytest.raises(ValueError, match="another model"):
        one.load_state(spoilt)
    assert one.digest() == before


def test_a_reduced_gradient_of_another_length_is_refused(case: Case) -> None:
    one = case.make(case.config, 0)
    before = one.digest()
    with pytest.raises(ValueError, match="reduced gradient"):
        one.apply(torch.zeros(one.length + 1), 1.0, 0)
    assert one.digest() == before

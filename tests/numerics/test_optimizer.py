"""Learning rate, clip and AdamW as functions of the step."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from shoal.config import Train
from shoal.numerics import optimizer, schedule
from shoal.numerics.optimizer import (
    NORM_VALUES,
    AdamW,
    Factors,
    adamw_,
    clip_factor,
    decays,
    learning_rate,
    nesterov_,
    norm_sq,
    separate_,
)
from shoal.numerics.pieces import PIECE

TRAIN = Train(learning_rate=0.01, warmup=4, final_ratio=0.1)


def test_warm_up_rises_evenly_to_the_peak() -> None:
    assert [learning_rate(TRAIN, 20, step) for step in range(5)] == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01])


@pytest.mark.parametrize(("schedule", "middle"), [("cosine", 0.0055), ("linear", 0.0055), ("constant", 0.01)])
def test_a_schedule_passes_its_middle_and_ends_at_the_final_ratio(schedule: str, middle: float) -> None:
    train = Train(learning_rate=0.01, warmup=4, final_ratio=0.1, schedule=schedule)
    rates = [learning_rate(train, 25, step) for step in range(25)]
    assert rates[14] == pytest.approx(middle)
    assert rates[24] == pytest.approx(0.01 if schedule == "constant" else 0.001)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_a_run_of_one_step_or_without_warm_up_has_a_rate() -> None:
    assert learning_rate(Train(warmup=0, learning_rate=0.5), 1, 0) == 0.5
    assert learning_rate(TRAIN, 3, 2) == pytest.approx(0.0075)
    assert learning_rate(TRAIN, 10, 50) == pytest.approx(0.001)


def test_the_rate_rises_anew_while_the_moments_are_young() -> None:
    train = Train(learning_rate=0.01, warmup=0, schedule="constant", local_steps=10, local_warmup=4)
    ages = [0, 1, 2, 3, 4, 9, None]
    assert [learning_rate(train, 100, 50, age) for age in ages] == [0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01, 0.01]
    assert learning_rate(Train(warmup=0, learning_rate=0.5), 10, 0, 0) == 0.5


def test_an_unknown_schedule_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"train\.schedule = 'cosin'"):
        learning_rate(Train(schedule="cosin", warmup=0), 10, 1)


def test_clipping_is_that_of_torch_and_zero_turns_it_off() -> None:
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    norm = nn.utils.clip_grad_norm_([weight], 1.0)
    assert torch.allclose(torch.tensor([3.0, 4.0]) * clip_factor(float(norm), 1.0), weight.grad)
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(5.0, 0.0) == 1.0


def test_matrices_decay_and_vectors_do_not() -> None:
    assert decays(torch.zeros(2, 2)) and not decays(torch.zeros(2))
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    gradients = {"matrix": torch.zeros(2, 2), "vector": torch.zeros(2)}
    AdamW({"matrix": matrix, "vector": vector}, Train(weight_decay=0.5)).step_(gradients, 1.0, 0.1, 0)
    assert torch.allclose(matrix, torch.full((2, 2), 0.95)) and torch.equal(vector, torch.ones(2))


def test_steps_are_those_of_torchs_adamw() -> None:
    ours, theirs = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3, 3))
    train = Train(weight_decay=0.1)
    adamw = AdamW({"weight": ours}, train)
    plain = torch.optim.AdamW([theirs], lr=0.02, betas=train.betas, eps=train.epsilon, weight_decay=0.1, foreach=False)
    for step in range(5):
        theirs.grad = torch.linspace(-1, step, 9).view(3, 3) * 0.5
        adamw.step_({"weight": theirs.grad * 2.0}, 0.5, 0.02, step)
        plain.step()
    assert torch.allclose(ours, theirs, rtol=1e-6)


def test_a_step_depends_on_moments_and_number_alone() -> None:
    one, other = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))
    first, second = (AdamW({"weight": value}, TRAIN) for value in (one, other))
    for step in range(3):
        first.step_({"weight": torch.full((4, 4), 0.3)}, 1.0, 0.01, step)
    with torch.no_grad():
        other.copy_(one)
        for moment, value in second.moments().items():
            value.copy_(first.moments()[moment])
    for adamw in (first, second):
        adamw.step_({"weight": torch.ones(4, 4)}, 1.0, 0.01, 3)
    assert torch.equal(one, other)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_compiled_loop_has_the_bits_of_separate_operations(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On however many threads, and over the whole range of exponents. torch's square root on a CPU may be MKL's, which is not rounded
    correctly; a GPU's is, as NumPy's."""
    monkeypatch.setattr(torch, "sqrt", lambda values, out: out.copy_(torch.from_numpy(np.sqrt(values.numpy()))))
    drawn = torch.Generator().manual_seed(3)
    count = 2 * PIECE + 77
    scales = 10.0 ** torch.linspace(-40, 20, count)
    tensors = [torch.randn(count, generator=drawn) * scales for _ in range(4)]
    tensors[3].abs_()
    others = [tensor.clone() for tensor in tensors]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for step in range(3):
            factors = Factors.of(Train(), 0.3, 1e-3, step, True)
            adamw_(tensors[0], tensors[1], (tensors[2], tensors[3]), factors)
            separate_(factors, *others)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(tensors, others, strict=True))


def test_powers_and_cosines_are_those_of_the_c_library_but_for_rounding() -> None:
    assert [optimizer._power(0.95, count) for count in (1, 2, 7, 1000)] == pytest.approx(
        [0.95, 0.95**2, 0.95**7, 0.95**1000]
    )
    turns = [index / 100 for index in range(101)]
    assert [schedule._cosine(x) for x in turns] == pytest.approx([math.cos(math.pi * x) for x in turns], abs=1e-15)


def test_the_norm_is_summed_in_double_precision() -> None:
    values = torch.full((3 * NORM_VALUES + 5,), 0.1)
    assert norm_sq(values) == pytest.approx(len(values) * float(values[0]) ** 2, rel=1e-14)
    assert norm_sq(torch.empty(0)) == 0.0


def test_the_outer_step_is_torchs_sgd_with_nesterov_momentum() -> None:
    drawn = torch.Generator().manual_seed(1)
    value = nn.Parameter(torch.randn(50, generator=drawn))
    ours, momentum = value.detach().clone(), torch.zeros(50)
    optimizer = torch.optim.SGD([value], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(4):
        value.grad = torch.randn(50, generator=drawn)
        nesterov_(ours, momentum, value.grad, 0.7, 0.9)
        optimizer.step()
    assert torch.allclose(ours, value.detach(), rtol=1e-6, atol=1e-6)

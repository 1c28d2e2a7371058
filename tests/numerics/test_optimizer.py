"""Learning rate, clip and AdamW as functions of the step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.config import Train
from shoal.numerics.optimizer import (
    NORM_VALUES,
    adamw,
    clip_factor,
    decays,
    learning_rate,
    nesterov_,
    norm_sq,
    step_,
)

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
    optimizer = adamw({"matrix": matrix, "vector": vector}, Train(weight_decay=0.5))
    matrix.grad, vector.grad = torch.zeros(2, 2), torch.zeros(2)
    step_(optimizer, 0.1, 0)
    assert torch.allclose(matrix, torch.full((2, 2), 0.95)) and torch.equal(vector, torch.ones(2))


def test_steps_are_those_of_a_plain_adamw() -> None:
    ours, theirs = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3, 3))
    train = Train(weight_decay=0.1)
    optimizer = adamw({"weight": ours}, train)
    plain = torch.optim.AdamW([theirs], lr=0.02, betas=train.betas, eps=train.epsilon, weight_decay=0.1, foreach=False)
    for step in range(5):
        ours.grad = theirs.grad = torch.linspace(-1, step, 9).view(3, 3)
        step_(optimizer, 0.02, step)
        plain.step()
    assert torch.allclose(ours, theirs, rtol=1e-6)


def test_a_step_depends_on_moments_and_number_alone() -> None:
    one, other = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))
    first, second = (adamw({"weight": value}, TRAIN) for value in (one, other))
    for step in range(3):
        one.grad = torch.full((4, 4), 0.3)
        step_(first, 0.01, step)
    with torch.no_grad():
        other.copy_(one)
        for moment in ("exp_avg", "exp_avg_sq"):
            second.state[other][moment].copy_(first.state[one][moment])
    one.grad, other.grad = torch.ones(4, 4), torch.ones(4, 4)
    step_(first, 0.01, 3)
    step_(second, 0.01, 3)
    assert torch.equal(one, other)


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

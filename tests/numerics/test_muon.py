"""Muon: the step that torch's makes, of the same bits in whatever order products are summed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.config import Train
from shoal.numerics import muon
from shoal.numerics.muon import COEFFICIENTS, EPSILON, ITERATIONS, Muon, exact_product, orthogonal, orthogonalized

MATRIX, VECTOR, HEAD = "model.layers.0.mlp.up_proj.weight", "model.layers.0.input_layernorm.weight", "lm_head.weight"


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def whole_numbers(factor: Tensor, bits: int) -> tuple[np.ndarray, int]:
    up = bits - math.frexp(float(factor.abs().max()))[1]
    return np.rint(factor.double().numpy() * 2.0**up).astype(np.int64), up


@pytest.mark.parametrize("shape", [(20, 3000, 20), (24, 24, 24), (16, 16, 2500), (1, 1, 1), (3, 9000, 2)])
def test_a_product_is_that_of_whole_numbers(shape: tuple[int, int, int]) -> None:
    rows, inner, columns = shape
    left, right = drawn(rows, inner), drawn(inner, columns, seed=1) * 1e-3
    bits = 20 if inner <= 2**13 else 19
    (a, a_up), (b, b_up) = whole_numbers(left, bits), whole_numbers(right, bits)
    expected = torch.from_numpy((a @ b).astype(np.float64) * 2.0 ** -(a_up + b_up)).float()
    assert torch.equal(exact_product(left, right), expected)
    assert torch.allclose(expected, left @ right, atol=1e-5 * float(expected.abs().max()) * math.sqrt(inner))


def test_the_order_of_a_sum_changes_no_bit_and_would_of_an_fp32_product() -> None:
    left, right = drawn(40, 2000), drawn(2000, 40, seed=1)
    order = torch.randperm(2000, generator=torch.Generator().manual_seed(2))
    assert torch.equal(exact_product(left, right), exact_product(left[:, order], right[order]))
    assert not torch.equal(left @ right, left[:, order] @ right[order])


def test_the_largest_values_that_sums_may_reach_are_exact() -> None:
    ones = torch.ones(1, 1 << 13)  # all at the upper end, where 20 bits need all 53 of fp64
    assert float(exact_product(ones, ones.T)) == 1 << 13
    nearly = torch.full((1, 1 << 13), 1 - 2.0**-24)
    assert float(exact_product(nearly, nearly.T)) == 1 << 13  # rounded up to whole numbers


@pytest.mark.parametrize("shape", [(64, 160), (160, 64), (96, 96), (1, 50), (8, 2100)])
def test_a_direction_is_torchs_within_its_bf16_and_keeps_the_side(shape: tuple[int, int]) -> None:
    matrix = drawn(*shape)
    ours = orthogonal(matrix)
    theirs = torch.optim._muon._zeropower_via_newtonschulz(matrix, COEFFICIENTS, ITERATIONS, EPSILON).float()
    assert ours.shape == shape and ours.is_contiguous()
    assert float((ours - theirs).norm() / theirs.norm()) < 0.05
    assert float(orthogonal(-matrix).add(ours).abs().max()) == 0
    exact = orthogonal(matrix * 4.0)  # the size of a gradient does not count
    assert float((exact - ours).abs().max()) < 1e-5


def test_singular_values_become_nearly_one_even_of_nearly_dependent_rows() -> None:
    matrix = drawn(64, 8) @ torch.diag(torch.logspace(0, -1.5, 8)) @ drawn(8, 96, seed=1)
    values = torch.linalg.svdvals(orthogonal(matrix))
    assert float(values[0]) < 1.3 and float(values[7]) > 0.3 and float(values[8]) < 0.1


def test_no_gradient_decays_only() -> None:
    values, momentum = drawn(4, 6), torch.zeros(4, 6)
    expected = values * (1 - 0.01)
    muon.muon_(values, torch.zeros(4, 6), momentum, 1.0, 0.1, 1 - 0.01)
    assert torch.equal(values, expected) and not momentum.any()


def test_matrices_of_blocks_step_as_torchs_muon_and_the_rest_as_adamw() -> None:
    train = Train(learning_rate=0.02, weight_decay=0.1)
    named = {HEAD: drawn(64, 32), MATRIX: drawn(32, 64, seed=1), VECTOR: drawn(32, seed=2)}
    theirs = {name: torch.nn.Parameter(value.clone()) for name, value in named.items()}
    ours = Muon(named, train)
    before = named[MATRIX].clone()
    reference = [
        torch.optim.Muon([theirs[MATRIX]], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([theirs[HEAD]], lr=0.02, betas=train.betas, eps=train.epsilon, weight_decay=0.1),
        torch.optim.AdamW([theirs[VECTOR]], lr=0.02, betas=train.betas, eps=train.epsilon, weight_decay=0.0),
    ]
    for step in range(4):
        gradients = {name: drawn(*value.shape, seed=10 * step + 5) for name, value in named.items()}
        ours.step_(gradients, 0.5, 0.02, step)
        for name, value in theirs.items():
            value.grad = gradients[name] * 0.5
        for one in reference:
            one.step()
    moved = float((theirs[MATRIX].detach() - before).norm())
    assert (
        moved > 0.1 and float((named[MATRIX] - theirs[MATRIX].detach()).norm()) < 0.03 * moved
    )  # theirs iterates in bf16
    for name in (HEAD, VECTOR):
        torch.testing.assert_close(named[name], theirs[name].detach())


def test_a_matrix_of_a_block_has_one_moment_and_all_else_two() -> None:
    named = {HEAD: drawn(8, 4), MATRIX: drawn(4, 8), VECTOR: drawn(4)}
    assert [name for name, value in named.items() if orthogonalized(name, value.shape)] == [MATRIX]
    assert list(Muon(named, Train()).moments()) == [
        *(f"exp_avg/{name}" for name in (HEAD, MATRIX, VECTOR)),
        *(f"exp_avg_sq/{name}" for name in (HEAD, VECTOR)),
    ]


def test_a_stage_without_matrices_of_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"finds no matrix .* among weight; try train\.optimizer=adamw"):
        Muon({"weight": drawn(4, 4)}, Train())

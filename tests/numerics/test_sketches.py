"""Sketches add up as vectors do, and a change of the vector shows."""

from __future__ import annotations

import pytest
import torch

from shoal.numerics.pieces import PIECE
from shoal.numerics.sketches import hashed, sketch

DIGEST = hashed(torch.ones(3))


@pytest.mark.parametrize("length", (1, 15, 16, 1000, PIECE + 21))
def test_products_are_those_with_signs_that_the_digest_gives_whatever_the_length(length: int) -> None:
    values = torch.randn(length, generator=torch.Generator().manual_seed(1))
    known = min(length, 40)
    rows = [sketch(one, DIGEST)[0] for one in torch.eye(length)[:known]] if length <= 1000 else []
    products, norm_sq = sketch(values, DIGEST)
    assert norm_sq == pytest.approx(float(values.double().square().sum()), rel=1e-12)
    for row in rows:
        assert all(abs(sign) == 1.0 for sign in row)
    if length <= known:
        for k in range(4):
            assert products[k] == pytest.approx(sum(float(v) * row[k] for v, row in zip(values, rows, strict=True)))


def test_sketches_of_one_digest_add_up_and_of_another_they_do_not() -> None:
    one, other = (torch.randn(5000, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    both = [sum(pair) for pair in zip(sketch(one, DIGEST)[0], sketch(other, DIGEST)[0], strict=True)]
    assert list(sketch(one + other, DIGEST)[0]) == pytest.approx(both, abs=1e-3)
    assert list(sketch(one + other, hashed(one))[0]) != pytest.approx(both, abs=1.0)


def test_signs_are_even_and_those_of_the_four_vectors_independent() -> None:
    lengths = 1 << 16
    spread = [sketch(torch.ones(lengths), hashed(torch.full((1,), float(seed))))[0] for seed in range(40)]
    normalised = torch.tensor(spread) / lengths**0.5
    assert 0.7 < float(normalised.std()) < 1.3 and abs(float(normalised.mean())) < 0.4
    assert float(torch.corrcoef(normalised.T).fill_diagonal_(0.0).abs().max()) < 0.6

"""Flat arithmetic in pieces: the bits of torch's own operations, on one thread and on two, which do run at once."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from shoal.executor.base import DIGEST_VALUES, digest_of
from shoal.numerics import pieces
from shoal.numerics.optimizer import NORM_VALUES, _halved, norm_sq

WAIT_S = 60.0


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def drawn(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator) * 10.0 ** torch.randint(-30, 18, (count,), generator=generator)


def test_as_many_pieces_run_at_once_as_torch_has_threads(threads: int) -> None:
    together = threading.Barrier(threads)  # broken, hence an error, unless all of them wait at once
    assert pieces.each(lambda number: (together.wait(WAIT_S), number)[1], range(2 * threads)) == list(
        range(2 * threads)
    )


@pytest.mark.parametrize("count", [1, 5, pieces.PIECE, 2 * pieces.PIECE + 3])
def test_copies_and_sums_are_those_of_torch(count: int, threads: int) -> None:
    parts = [drawn(count, seed) for seed in range(4)]
    for most in range(1, 5):
        total = parts[0].clone()
        for part in parts[1:most]:
            total += part
        assert torch.equal(pieces.sum_of(parts[:most]), total)
    copy = pieces.copied(parts[0])
    assert torch.equal(copy, parts[0]) and copy.data_ptr() != parts[0].data_ptr()


@pytest.mark.parametrize(
    "count", [pieces.PIECE, pieces.PIECE + 1, NORM_VALUES, 2 * NORM_VALUES + 7, 3 * NORM_VALUES - 1]
)
def test_the_compiled_norm_has_the_bits_of_separate_operations(count: int, threads: int) -> None:
    values = drawn(count, 5)
    halves = [float(_halved(piece)) for piece in torch.split(values, NORM_VALUES)]
    assert norm_sq(values) == math.fsum(halves)
    values[count // 3] = torch.nan
    assert math.isnan(norm_sq(values))


def test_a_digest_is_the_same_on_any_threads_and_every_part_and_their_order_count(threads: int) -> None:
    values = drawn(2 * DIGEST_VALUES + 33, 6)
    digest = digest_of([values])
    torch.set_num_threads(3 - threads)
    assert digest_of([values]) == digest
    for at in (0, DIGEST_VALUES, 2 * DIGEST_VALUES, len(values) - 1):
        other = values.clone()
        other.view(torch.int32)[at] ^= 1
        assert digest_of([other]) != digest
    first, second, rest = values.split(DIGEST_VALUES)
    assert digest_of([torch.cat([second, first, rest])]) != digest

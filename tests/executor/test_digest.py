"""The digest of a state: every change of it shows, and only those."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.executor.base import MIXED_BYTES, digest_of


def a_state(*sizes: int) -> list[Tensor]:
    return [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in sizes]


@settings(deadline=None)  # the first call compiles
@given(
    st.lists(st.integers(1, 70) | st.integers(MIXED_BYTES // 4, MIXED_BYTES // 4 + 70), min_size=1, max_size=4),
    st.data(),
)
def test_every_bit_and_every_place_counts(sizes: list[int], data: st.DataObject) -> None:
    state = a_state(*sizes)
    before = digest_of(state)
    assert digest_of([tensor.clone() for tensor in state]) == before
    tensor = state[data.draw(st.integers(0, len(state) - 1))]
    at, bit = data.draw(st.integers(0, len(tensor) - 1)), data.draw(st.integers(0, 31))
    tensor.view(torch.int32)[at] ^= 1 << bit if bit < 31 else -(1 << 31)
    assert digest_of(state) != before


def test_the_order_of_values_counts() -> None:
    (state,) = a_state(MIXED_BYTES // 4)
    for distance in (1, 16, 32):
        assert digest_of([state.roll(distance)]) != digest_of([state])
    assert digest_of(a_state(MIXED_BYTES // 4, MIXED_BYTES // 4)[:1]) != digest_of(
        a_state(MIXED_BYTES // 4, MIXED_BYTES // 4)
    )

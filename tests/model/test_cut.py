"""Which blocks a stage holds."""

from __future__ import annotations

import pytest
import torch

from shoal.model.cut import next_token_loss, seeded, spans


@pytest.mark.parametrize("blocks", range(1, 20))
def test_spans_hold_every_block_once_in_order_and_differ_by_one_at_most(blocks: int) -> None:
    for stages in range(1, blocks + 1):
        cut = spans(blocks, stages)
        sizes = [len(span) for span in cut]
        assert [block for span in cut for block in span] == list(range(blocks))
        assert len(cut) == stages and max(sizes) - min(sizes) <= 1


def test_the_ends_get_an_extra_block_last() -> None:
    assert [len(span) for span in spans(5, 3)] == [2, 2, 1]
    assert [len(span) for span in spans(4, 3)] == [1, 2, 1]
    assert [len(span) for span in spans(6, 4)] == [1, 2, 2, 1]


def test_more_stages_than_blocks_are_refused_with_what_would_do() -> None:
    with pytest.raises(ValueError, match=r"run\.stages = 7.*6 blocks.*try run\.stages=6"):
        spans(6, 7)


def test_a_cut_by_hand_is_taken_as_it_stands() -> None:
    assert spans(6, 3, (2, 3, 1)) == (range(2), range(2, 5), range(5, 6))


@pytest.mark.parametrize("layers", [(2, 3), (2, 3, 2), (6, 0, 0), (1, 1, 1, 3)])
def test_a_cut_that_is_not_the_model_is_refused_with_what_would_do(layers: tuple[int, ...]) -> None:
    with pytest.raises(
        ValueError, match=r"6 blocks in run\.stages = 3; it must be 3 numbers of 1 or more that add up to 6"
    ):
        spans(6, 3, layers)


def test_draws_depend_on_seed_and_name_only_and_leave_the_global_generator_alone() -> None:
    def draw(seed: int, name: str) -> torch.Tensor:
        with seeded(seed, name):
            return torch.rand(4)

    before = torch.get_rng_state()
    first = draw(1, "a")
    draw(1, "b")
    assert torch.equal(first, draw(1, "a"))
    assert not torch.equal(first, draw(1, "b")) and not torch.equal(first, draw(2, "a"))
    assert torch.equal(before, torch.get_rng_state())


def test_the_loss_of_even_odds_is_the_entropy() -> None:
    loss = next_token_loss(torch.zeros(2, 3, 8, dtype=torch.bfloat16), torch.zeros(2, 3, dtype=torch.int64))
    assert loss.dtype == torch.float32 and float(loss) == pytest.approx(torch.log(torch.tensor(8.0)).item())

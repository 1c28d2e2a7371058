"""Bounded parts with real tensors: the same bits while nothing is too long, a liar that is found or shortened, and a model that learns
beside one."""

from __future__ import annotations

import pytest
import torch
from tests.tensors import LIES, Replicas, Trained, train

from shoal import codec
from shoal.core.allreduce.bounds import FACTOR, SLACK, lengths, longest
from shoal.core.messages import Share

LENGTH = 5003
COUNTS = (1, 2, 3)
CODES = ("none", "bf16", "int8")


def parts_of(replicas: Replicas, step: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """As of honest replicas: what microbatches share, and the noise of each."""
    chance = torch.Generator().manual_seed(step)
    shared = torch.randn(LENGTH, generator=torch.Generator().manual_seed(0))
    return {
        name: scale * (count * shared + count**0.5 * torch.randn(LENGTH, generator=chance))
        for name, count in replicas.counts.items()
    }


@pytest.mark.parametrize("piece_values", [0, 2100])
@pytest.mark.parametrize("how", CODES)
def test_while_nothing_is_too_long_bounds_change_no_bit(how: str, piece_values: int) -> None:
    plain, bounded = (Replicas(COUNTS, LENGTH, how, robust, piece_values) for robust in ("none", "clip"))
    for step in range(4):
        one, other = (each.average(parts_of(each, step)) for each in (plain, bounded))
        assert torch.equal(one.reduced, other.reduced) and not other.shortened
    assert bounded.references and not plain.references
    plain.close()
    bounded.close()


@pytest.mark.parametrize("piece_values", [0, 2100])
@pytest.mark.parametrize("how", CODES)
def test_a_part_that_is_too_long_is_shortened_by_its_own_machine_and_the_sums_are_those_of_what_was_sent(
    how: str, piece_values: int
) -> None:
    replicas = Replicas(COUNTS, LENGTH, how, "clip", piece_values)
    replicas.average(parts_of(replicas, 0))
    shares: tuple[Share, ...] = tuple(replicas.group.shares.values())
    most = longest(replicas.references, 0, shares, shares[2], replicas.settings)
    parts = parts_of(replicas, 1)
    parts["p2"] *= 100.0
    averaged = replicas.average(parts)  # asserts that the sums are those of the parts
    assert averaged.shortened == 1 and not averaged.guilty and most is not None
    length = lengths(shares, replicas.group.reduced)[2]
    assert length == pytest.approx(most, rel=SLACK + codec.LOST[how])
    wanted = parts["p0"] + parts["p1"] + parts["p2"] * (most / float(parts["p2"].norm()))
    assert float((averaged.reduced - wanted).norm() / wanted.norm()) < 1e-6 + 2 * codec.LOST[how]
    replicas.close()


def test_what_encoding_has_left_out_before_is_shortened_with_the_rest() -> None:
    replicas = Replicas(COUNTS, LENGTH, "bf16", "clip", 2100)
    replicas.average(parts_of(replicas, 0))
    shares: tuple[Share, ...] = tuple(replicas.group.shares.values())
    most = longest(replicas.references, 0, shares, shares[0], replicas.settings)
    replicas.tensors["p0"].runner._sums.averaging._residual = 10.0 * torch.randn(LENGTH)
    averaged = replicas.average(parts_of(replicas, 1))
    assert not averaged.guilty and most is not None
    assert lengths(shares, replicas.group.reduced)[0] == pytest.approx(most, rel=SLACK + codec.LOST["bf16"])
    replicas.close()


@pytest.mark.parametrize("piece_values", [0, 2100])
@pytest.mark.parametrize("how", CODES)
def test_who_does_not_shorten_its_part_is_named_and_nobody_else(how: str, piece_values: int) -> None:
    replicas = Replicas(COUNTS, LENGTH, how, "clip", piece_values)
    replicas.average(parts_of(replicas, 0))
    parts = parts_of(replicas, 1)
    parts["p1"] *= FACTOR * 1.5
    averaged = replicas.average(parts, "p1", tame=False)
    assert averaged.guilty == ("p1",)
    wanted = parts["p0"] + parts["p2"]
    assert float((averaged.reduced - wanted).norm() / wanted.norm()) < 1e-6 + 2 * codec.LOST[how]
    replicas.close()


def test_gradients_may_grow_and_shrink_faster_than_bounds_follow() -> None:
    """All are shortened alike then, and the direction stays."""
    replicas = Replicas((2, 2, 2), LENGTH, "none", "clip")
    replicas.average(parts_of(replicas, 0))
    for step, scale in enumerate((10.0, 10.0, 0.01, 0.01), 1):
        parts = parts_of(replicas, step, scale)
        averaged = replicas.average(parts)
        wanted = torch.stack(list(parts.values())).sum(0)
        assert not averaged.guilty and torch.cosine_similarity(averaged.reduced, wanted, 0) > 0.999
    replicas.close()


@pytest.fixture(scope="module")
def honest() -> Trained:
    return train("none", steps=60)


@pytest.mark.slow
def test_without_a_liar_a_model_learns_as_well_with_bounds(honest: Trained) -> None:
    mean, bounded = honest, train("clip", steps=60)
    assert bounded.loss == pytest.approx(mean.loss, rel=0.005)
    assert bounded.shortened < 0.1 * bounded.sent_parts


@pytest.mark.parametrize(
    "lie", [pytest.param(lie, marks=() if lie == "sign flip" else pytest.mark.slow) for lie in LIES]
)
def test_beside_a_liar_that_keeps_to_the_bounds_a_model_learns_better_with_them(lie: str, honest: Trained) -> None:
    mean, bounded = train("none", lie, steps=60), train("clip", lie, steps=60)
    assert not bounded.evicted, "it does nothing that could be proven"
    assert bounded.loss < honest.loss + 0.25 * (4.8 - honest.loss), "of 4.8, the loss of an untrained model"
    assert bounded.loss <= mean.loss * (1.0 if lie != "sign flip" else 1.005), "a flipped part is no longer than others"


def test_a_liar_that_does_not_keep_to_them_is_found_in_its_first_step() -> None:
    trained = train("clip", "x 100", tame=False, steps=20)
    assert trained.evicted == {"p3": 1}

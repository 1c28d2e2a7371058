"""Held-out microbatches in the ledger, in views, and over whole simulated runs."""

from __future__ import annotations

import math

import msgspec
import pytest

from shoal.core.consensus.phases import ended
from shoal.core.consensus.validity import flaw, measured
from shoal.core.leader.ledger import Ledger
from shoal.core.messages import Booking, HeldOut, Member, Phase, Rewards, Settings, Share, View
from shoal.sim.run import results

MEMBERS = (Member("a", 0), Member("b", 1), Member("c", 1))
LAST = (Share("b", ()), Share("c", ()))


def a_ledger(**fields: int) -> Ledger:
    return Ledger(2, 2, heldout=3, heldout_tokens=8, **fields)  # type: ignore[arg-type]


def test_the_last_stage_alone_books_what_is_held_out() -> None:
    ledger = a_ledger()
    assert "microbatch 2 of 2" in ledger.report("a", (Booking(2),), 0)
    assert not ledger.report("a", (Booking(0), Booking(1)), 0)
    assert not ledger.report("b", (Booking(0, 1.0), Booking(1, 1.0), Booking(4, 3.0, 8)), 1)
    assert (
        not ledger.complete(MEMBERS) and ledger.open_at(MEMBERS) == [(2, 1), (3, 1)] and ledger.open(MEMBERS) == {2, 3}
    )
    assert not ledger.report("c", (Booking(2, 1.0, 1), Booking(3, 0.0, 0)), 1)
    assert ledger.complete(MEMBERS) and not ledger.open(MEMBERS)


def test_the_mean_is_over_counted_tokens_and_gradients_are_of_the_others() -> None:
    ledger = a_ledger()
    ledger.report("b", (Booking(0, 1.0), Booking(4, 3.0, 8)), 1)
    ledger.report("c", (Booking(2, 1.0, 1), Booking(1, 2.0), Booking(3, 0.0, 0)), 1)
    assert ledger.heldout_loss(LAST) == (1.0 + 24.0) / 9 and ledger.loss(LAST) == 1.5
    assert [share.indices for share in ledger.groups(MEMBERS, ())[1]] == [(0,), (1,)]


def test_more_tokens_than_a_microbatch_has_are_a_lie() -> None:
    assert "counted 9 tokens" in a_ledger().report("b", (Booking(4, 3.0, 9),), 1)


def test_after_the_last_step_nothing_else_is_booked() -> None:
    ledger = a_ledger(trains=False)
    assert not ledger.whole and ledger.open(MEMBERS) == {2, 3, 4}
    ledger.report("b", tuple(Booking(index, 1.0, 8) for index in (2, 3, 4)), 1)
    assert ledger.complete(MEMBERS) and ledger.heldout_loss(LAST) == 1.0


def test_the_best_is_the_lowest_and_what_was_measured_twice_counts_once() -> None:
    newest: HeldOut | None = None
    for step, loss in ((0, 5.0), (4, 4.0), (8, 4.5), (4, 9.9), (12, 4.2)):
        newest = measured(newest, step, loss)
    assert newest == HeldOut(12, 4.2, 4, 4.0, misses=2)


@pytest.mark.parametrize(("misses", "over"), [(1, False), (2, True)])
def test_a_run_ends_early_only_when_nothing_became_better_for_long_enough(misses: int, over: bool) -> None:
    settings = Settings(stages=1, microbatches=1, steps=9, heldout=1, heldout_every=1, patience=2)
    view = View(3, 5, (Member("a", 0),), owners=(0, 0), phase=Phase.TRAINING, heldout=HeldOut(4, 2.0, 1, 1.0, misses))
    assert ended(view, settings) is over
    finished = msgspec.structs.replace(view, phase=Phase.FINISHED)
    assert bool(flaw(None, finished, settings)) is not over, "voters accept no early end without that reason"


@pytest.mark.parametrize("loss", [math.nan, -1.0, math.inf])
def test_a_view_with_an_impossible_loss_is_refused(loss: float) -> None:
    settings = Settings(stages=1, microbatches=1, steps=9, heldout=1, heldout_every=1)
    view = View(3, 5, (Member("a", 0),), owners=(0, 0), phase=Phase.TRAINING, heldout=HeldOut(4, loss, 1, loss))
    assert "held-out loss" in flaw(None, view, settings)


def test_a_loss_that_nobody_measured_is_refused() -> None:
    settings = Settings(stages=1, microbatches=1, steps=9, heldout=1, heldout_every=1)
    before = View(3, 5, (Member("a", 0),), owners=(0, 0), phase=Phase.TRAINING)
    after = msgspec.structs.replace(before, number=4, heldout=HeldOut(5, 1.0, 5, 1.0))
    assert "held-out loss" in flaw(before, after, settings)


def test_every_held_out_microbatch_is_in_the_mean_once_whatever_dies() -> None:
    for result in results("measured", range(4)):
        assert result.ok, result


def test_rewards_are_means_over_counted_pairs_in_whatever_microbatch_they_are() -> None:
    ledger = Ledger(2, 2, tokens=4, heldout=2, heldout_tokens=4)
    ledger.report("b", (Booking(1, 1.0, 3, Rewards(1.0, 2.0)), Booking(2, 1.0, 1, Rewards(0.0, -1.0))), 1)
    ledger.report("c", (Booking(0, 1.0, 1, Rewards(0.0, -2.0)), Booking(3, 0.0, 0)), 1)
    assert ledger.rewards(LAST) == Rewards(0.75, 1.0)
    assert ledger.rewards(LAST, heldout=True) == Rewards(0.0, -1.0)
    assert a_ledger().rewards(LAST) is None


@pytest.mark.parametrize(
    "rewards", [Rewards(1.5, 0.0), Rewards(-0.1, 0.0), Rewards(math.nan, 0.0), Rewards(0.5, math.inf)]
)
def test_rewards_that_cannot_be_are_a_lie(rewards: Rewards) -> None:
    ledger = Ledger(2, 2, tokens=4)
    assert "reports an accuracy of" in ledger.report("b", (Booking(0, 1.0, 1, rewards),), 1)
    assert not ledger.rewards(LAST)

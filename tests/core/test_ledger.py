"""The leader's account of a step: disjoint books that together hold every index, or no commit."""

from __future__ import annotations

import pytest

from shoal.core.leader.ledger import FAR_LOSS, MOST_LOSS, Doubled, Ledger, counted_twice
from shoal.core.messages import Booking, Member, Share

A, B, C, D = (Member("a", 0), Member("b", 0), Member("c", 1), Member("d", 1))
MEMBERS = (A, B, C, D)


def books(*indices: int) -> tuple[Booking, ...]:
    return tuple(Booking(i, loss=float(i)) for i in indices)


def a_whole_step() -> Ledger:
    ledger = Ledger(stages=2, microbatches=4)
    for peer, indices in (("a", (0, 2)), ("b", (3, 1)), ("c", (0, 1, 2)), ("d", (3,))):
        ledger.report(peer, books(*indices))
    return ledger


def test_a_step_is_complete_when_every_stage_holds_every_index_once() -> None:
    assert a_whole_step().complete(MEMBERS)


def test_a_missing_index_keeps_the_step_open() -> None:
    ledger = Ledger(stages=2, microbatches=4)
    ledger.report("a", books(0, 1, 2))
    assert not ledger.complete(MEMBERS)
    assert "stage 0 has 3 of 4 microbatches" in ledger.faults(MEMBERS)


def test_an_index_in_two_books_of_a_stage_keeps_the_step_open_and_names_both() -> None:
    ledger = a_whole_step()
    ledger.forget("b")
    ledger.report("b", books(3, 2))  # the count is right, the books overlap
    assert not ledger.complete(MEMBERS)
    ledger.report("b", books(3, 2, 0))
    assert ledger.doubled(MEMBERS) == [Doubled(2, 0, "a", "b"), Doubled(0, 0, "a", "b")]


def test_the_books_of_a_peer_outside_the_view_count_for_nothing() -> None:
    ledger = a_whole_step()
    assert not ledger.complete((A, B, C))


def test_forgetting_a_peer_says_how_much_must_be_redone() -> None:
    ledger = a_whole_step()
    assert ledger.forget("c") == 3
    assert ledger.booked == 5
    assert ledger.forget("c") == 0


def test_an_older_report_does_not_shrink_the_books() -> None:
    ledger = Ledger(stages=1, microbatches=4)
    ledger.report("a", books(0, 1, 2))
    ledger.report("a", books(0, 1))
    assert ledger.booked == 3


def test_groups_hold_members_in_order_and_joiners_with_nothing() -> None:
    groups = a_whole_step().groups(MEMBERS, (Member("e", 1),))
    assert groups == (
        (Share("a", (0, 2)), Share("b", (3, 1))),
        (Share("c", (0, 1, 2)), Share("d", (3,)), Share("e", ())),
    )


def test_the_loss_is_the_mean_over_the_microbatches() -> None:
    ledger = a_whole_step()
    assert ledger.loss(ledger.groups(MEMBERS, ())[-1]) == 1.5


def test_a_commit_that_holds_an_index_twice_is_counted() -> None:
    assert counted_twice(((Share("a", (0, 1)), Share("b", (1, 2))), (Share("c", (0, 1, 2)),))) == 1


@pytest.mark.parametrize(
    ("report", "wrong"),
    [
        ((0, 1, 3, 3), "has booked a microbatch twice"),
        ((0, 1, 0), "has booked a microbatch twice"),
        ((0, 1, 4), "has booked microbatch 4 of 4"),
        ((0, 1, 2**20 - 1), "has booked microbatch 1048575 of 4"),
        ((1, 0, 2), "has changed what it booked"),
        ((2, 3, 0, 1), "has changed what it booked"),
    ],
)
def test_books_that_cannot_be_are_refused_and_what_was_booked_before_stands(
    report: tuple[int, ...], wrong: str
) -> None:
    ledger = Ledger(stages=1, microbatches=4)
    assert ledger.report("a", books(0, 1)) == ""
    assert ledger.report("a", books(*report)) == wrong
    assert ledger.books["a"] == books(0, 1) and ledger.booked == 2


def test_a_first_report_is_held_to_the_same() -> None:
    ledger = Ledger(stages=1, microbatches=4)
    assert ledger.report("a", books(2, 2)) == "has booked a microbatch twice"
    assert ledger.booked == 0 and not ledger.books


def test_books_that_grow_stay_or_come_late_are_in_order() -> None:
    ledger = Ledger(stages=1, microbatches=4)
    for report in ((), (3,), (3, 1), (3,), (2,), (3, 1), (3, 1, 0, 2)):
        assert ledger.report("a", books(*report)) == ""
    assert ledger.complete((Member("a", 0),))


def test_a_booking_whose_loss_changes_is_another() -> None:
    ledger = Ledger(stages=1, microbatches=4)
    ledger.report("a", (Booking(0, 1.0),))
    assert ledger.report("a", (Booking(0, 2.0), Booking(1, 1.0))) == "has changed what it booked"


def test_what_two_replicas_of_one_stage_have_booked_is_found_and_of_two_stages_is_in_order() -> None:
    ledger = a_whole_step()
    assert ledger.doubled(MEMBERS) == []
    ledger.report("b", books(3, 1, 0))
    assert ledger.doubled(MEMBERS) == [Doubled(0, 0, "a", "b")]
    assert ledger.doubled((A, C, D)) == [], "b has left"


def test_what_is_open_is_named_with_the_highest_stage_that_lacks_it() -> None:
    ledger = Ledger(stages=3, microbatches=3)
    members = (Member("a", 0), Member("b", 1), Member("c", 2))
    ledger.report("c", books(0, 1))
    ledger.report(
        "b",
        books(
            1,
        ),
    )
    assert ledger.open_at(members) == [(0, 1), (1, 0), (2, 2)]
    assert ledger.open_at(members[:2]) == [(0, 2), (1, 2), (2, 2)], "what c booked left with it"
    for peer in "abc":
        ledger.report(
            peer, ledger.books.get(peer, ()) + books(*({0, 1, 2} - {b.index for b in ledger.books.get(peer, ())}))
        )
    assert ledger.open_at(members) == []


def test_counted_tokens_are_those_that_the_last_stage_reports_and_bounded_by_a_microbatch() -> None:
    ledger = Ledger(stages=2, microbatches=4, tokens=32)
    for peer, indices in (("a", (0, 2)), ("b", (3, 1)), ("c", (0, 1, 2)), ("d", (3,))):
        assert ledger.report(peer, tuple(Booking(i, counted=10 * i) for i in indices)) == ""
    assert ledger.counted(ledger.groups(MEMBERS, ())[-1]) == 60
    assert ledger.report("d", (Booking(3, counted=30), Booking(1, counted=33))) == (
        "has counted 33 tokens in a microbatch of 32"
    )
    assert Ledger(2, 4).report("a", (Booking(0, counted=1),)) == "has counted 1 tokens in a microbatch of 0"


@pytest.mark.parametrize("loss", [-1e300, -1e-9, 2 * MOST_LOSS, 1e300])
def test_a_loss_that_cannot_be_convicts(loss: float) -> None:
    assert "reports losses" in Ledger(1, 4).report("a", (Booking(0, 1.0), Booking(1, loss)))


def test_one_loss_far_above_the_others_does_not_move_the_mean_far() -> None:
    ledger = Ledger(1, 4)
    ledger.report("a", tuple(Booking(index, 2.0) for index in range(3)))
    ledger.report("b", (Booking(3, MOST_LOSS),))
    group = (Share("a", (0, 1, 2)), Share("b", (3,)))
    assert ledger.loss(group) == (3 * 2.0 + FAR_LOSS * 2.0) / 4

"""The account is measured: a sample missing from a round, or in it twice, shows, whatever the members' own count says."""

from __future__ import annotations

import msgspec

from shoal.core.messages import Account, Committed, Member, Share, View
from shoal.runtime.account import Books

STAGES, MICROBATCHES = 2, 4
MEMBERS = (Member("a", 0), Member("b", 0), Member("c", 1))
GROUPS = ((Share("a", (0, 2)), Share("b", (3, 1))), (Share("c", (0, 1, 2, 3)),))


def a_view(step: int, groups: tuple[tuple[Share, ...], ...] = GROUPS, epoch: int = 0, **fields: object) -> View:
    """The view that commits step - 1."""
    last = Committed(step - 1, round=step, norm=1.0, loss=2.0, digests=("x", "y"), groups=groups) if step else None
    counted = Account(issued=MICROBATCHES * step, committed=MICROBATCHES * step)
    view = View(step + 1 + 100 * epoch, step, MEMBERS, started=True, epoch=epoch, last=last, account=counted)
    return msgspec.structs.replace(view, **fields)


def some_books(*views: View, first_step: int = 0) -> Books:
    books = Books(STAGES, MICROBATCHES, first_step)
    for now, view in enumerate(views):
        books.agree(view, float(now))
    return books


def test_a_run_in_which_every_sample_counted_once_balances() -> None:
    totals = some_books(a_view(0), a_view(1), a_view(2)).totals()
    assert (totals.steps, totals.issued, totals.committed) == (2, 8, 8)
    assert (totals.lost, totals.counted_twice, totals.balanced, totals.reason) == (0, 0, True, "")


def test_views_may_come_twice_late_and_in_any_order() -> None:
    books = some_books(a_view(2), a_view(0), a_view(2), a_view(1), a_view(1))
    assert [step.commit.step for step in books.steps] == [0, 1]
    assert books.totals().balanced


def test_a_commit_is_new_once() -> None:
    books = Books(STAGES, MICROBATCHES)
    step = books.agree(a_view(1), 5.0)
    assert step is not None and step.commit.step == 0 and step.heard_s == 5.0
    assert books.agree(a_view(1), 6.0) is None


def test_a_sample_missing_at_one_stage_is_lost() -> None:
    groups = (GROUPS[0], (Share("c", (0, 1, 3)),))
    totals = some_books(a_view(1, groups), a_view(2)).totals()
    assert (totals.committed, totals.lost, totals.balanced) == (7, 1, False)
    assert "step 0: 1 microbatches missing" in totals.reason


def test_a_stage_without_a_group_loses_everything() -> None:
    assert some_books(a_view(1, GROUPS[:1])).totals().lost == MICROBATCHES


def test_a_sample_in_two_replicas_sums_is_counted_twice() -> None:
    groups = ((Share("a", (0, 2, 3)), Share("b", (3, 1))), GROUPS[1])
    totals = some_books(a_view(1, groups)).totals()
    assert (totals.counted_twice, totals.lost, totals.balanced) == (1, 0, False)


def test_a_sample_twice_in_one_replicas_sum_is_counted_twice() -> None:
    groups = ((Share("a", (0, 2, 2)), Share("b", (3, 1))), GROUPS[1])
    assert some_books(a_view(1, groups)).totals().counted_twice == 1


def test_a_step_that_nobody_reported_is_lost() -> None:
    totals = some_books(a_view(0), a_view(1), a_view(3)).totals()
    assert (totals.lost, totals.balanced) == (MICROBATCHES, False)
    assert "how step 1 was committed" in totals.reason


def test_a_step_committed_in_two_ways_is_counted_twice() -> None:
    other = ((Share("a", (0, 1, 2, 3)), Share("b", ())), GROUPS[1])
    totals = some_books(a_view(1), a_view(1, other)).totals()
    assert (totals.counted_twice, totals.balanced) == (MICROBATCHES, False)


def test_a_member_count_that_disagrees_with_the_rounds_does_not_balance() -> None:
    wrong = a_view(1, account=Account(issued=4, committed=3))
    assert "the members count 3 committed, their rounds hold 4" in some_books(wrong).totals().reason


def test_samples_issued_and_never_committed_do_not_balance() -> None:
    assert not some_books(a_view(1, account=Account(issued=8, committed=4))).totals().balanced


def test_commits_before_the_run_went_back_do_not_count() -> None:
    account = Account(issued=4, committed=4)
    back = a_view(1, epoch=1, account=account)
    books = some_books(a_view(1), a_view(2), a_view(3), back, a_view(3))
    assert [step.commit.step for step in books.steps] == [0]
    assert books.totals().balanced
    again = a_view(2, epoch=1)
    assert books.agree(again, 9.0) is not None
    assert books.steps[-1].epoch == 1
    assert books.totals().balanced


def test_a_resumed_run_keeps_the_account_of_its_checkpoint() -> None:
    first = some_books(a_view(0), a_view(1), a_view(2, account=Account(issued=12, committed=8, redone=5, joined=1)))
    before = tuple(step for step in first.steps if step.commit.step < 2)
    books = Books(STAGES, MICROBATCHES, first_step=2, before=before)
    books.agree(a_view(2, last=None, account=Account(issued=4)), 0.0)
    books.agree(a_view(3, account=Account(issued=4, committed=4, redone=1)), 1.0)
    totals = books.totals()
    assert (totals.steps, totals.issued, totals.committed, totals.redone) == (3, 12, 12, 6)
    assert totals.balanced
    lacking = Books(STAGES, MICROBATCHES, first_step=2, before=before[1:])
    lacking.agree(a_view(3, account=Account(issued=4, committed=4)), 1.0)
    assert lacking.totals().lost == MICROBATCHES

"""The account is measured: a sample missing from a round, or in it twice, shows, whatever the members' own count says."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from shoal.core.messages import Account, Committed, Member, Phase, Share, View
from shoal.runtime.records import account
from shoal.runtime.records.account import (
    BLOCK,
    Base,
    CommitHistory,
    CommittedStep,
    credits_of,
    restarted,
    surviving,
)

STAGES, MICROBATCHES = 2, 4


@pytest.fixture(autouse=True, params=[account.WHOLE, 0], ids=["whole", "short"])
def whole(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Every test also with a history of which each commit becomes short at once: the account is the same."""
    monkeypatch.setattr(account, "WHOLE", request.param)
    return int(request.param)


MEMBERS = (Member("a", 0), Member("b", 0), Member("c", 1))
GROUPS = ((Share("a", (0, 2)), Share("b", (3, 1))), (Share("c", (0, 1, 2, 3)),))


def a_view(step: int, groups: tuple[tuple[Share, ...], ...] = GROUPS, epoch: int = 0, **fields: object) -> View:
    """The view that commits step - 1."""
    last = Committed(step - 1, round=step, norm=1.0, loss=2.0, digests=("x", "y"), groups=groups) if step else None
    counted = Account(issued=MICROBATCHES * step, committed=MICROBATCHES * step)
    view = View(step + 1 + 100 * epoch, step, MEMBERS, phase=Phase.TRAINING, epoch=epoch, last=last, account=counted)
    return msgspec.structs.replace(view, **fields)


def shorts(steps: tuple[CommittedStep, ...]) -> list[CommittedStep]:
    """As an old history holds them."""
    return [step if step.tally else account._short(step, (MICROBATCHES, 0, 0), None) for step in steps]


def some_books(*views: View, first_step: int = 0) -> CommitHistory:
    books = CommitHistory(STAGES, MICROBATCHES, first_step)
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


def test_steps_that_were_averaged_beside_the_next_ones_compute_are_counted_once() -> None:
    ahead = a_view(1, number=9, phase=Phase.OVERLAPPING)
    again = a_view(1, number=11, phase=Phase.OVERLAPPING)  # after a death had opened it again
    assert some_books(a_view(0), a_view(1), ahead, again, a_view(2, number=12)).overlapped == {1}
    assert some_books(ahead, a_view(0, epoch=1, last=None)).overlapped == set()  # all of it is trained again


def test_a_commit_is_new_once() -> None:
    books = CommitHistory(STAGES, MICROBATCHES)
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


def test_a_step_that_had_begun_is_counted_apart_if_nothing_else_is_amiss() -> None:
    totals = some_books(a_view(1, account=Account(issued=8, committed=4))).totals()
    assert (totals.begun, totals.balanced) == (MICROBATCHES, False)
    assert some_books(a_view(1, account=Account(issued=9, committed=4))).totals().begun == 0
    short = ((Share("a", (0, 2)), Share("b", (3,))), GROUPS[1])
    assert some_books(a_view(1, short, account=Account(issued=8, committed=4))).totals().begun == 0


def gone_back(to: int, undone: int, epoch: int = 1) -> View:
    """The view under which everybody goes back to the checkpoint of step `to`."""
    account = Account(issued=MICROBATCHES * to, committed=MICROBATCHES * to, undone=undone)
    return a_view(to, epoch=epoch, last=None, phase=Phase.GATHERING, account=account)


def again(step: int, undone: int, epoch: int = 1, **fields: object) -> View:
    """The view that commits step - 1 after going back; its loss tells that it is another commit."""
    counted = Account(issued=MICROBATCHES * step, committed=MICROBATCHES * step, undone=undone)
    view = a_view(step, epoch=epoch, account=counted)
    assert view.last is not None
    last = msgspec.structs.replace(view.last, loss=2.0 + epoch)
    return msgspec.structs.replace(view, last=last, **fields)


BEFORE = (a_view(0), a_view(1), a_view(2), a_view(3))  # steps 0, 1 and 2, of which the last two are undone
AFTER = (gone_back(1, undone=8), again(2, undone=8), again(3, undone=8), again(4, undone=8))


def test_commits_before_the_run_went_back_do_not_count() -> None:
    books = some_books(*BEFORE, AFTER[0], a_view(3))
    assert [step.commit.step for step in books.steps] == [0]
    totals = books.totals()
    assert totals.balanced, totals.reason
    assert (totals.committed, totals.undone, totals.recovered) == (4, 8, 1)


def test_a_step_committed_again_appears_once_and_is_the_later_one() -> None:
    books = some_books(*BEFORE, *AFTER)
    assert [(step.commit.step, step.epoch, step.commit.loss) for step in books.steps] == [
        (0, 0, 2.0),
        (1, 1, 3.0),
        (2, 1, 3.0),
        (3, 1, 3.0),
    ]
    totals = books.totals()
    assert totals.balanced, totals.reason
    assert (totals.steps, totals.issued, totals.committed, totals.undone, totals.recovered) == (4, 16, 16, 8, 1)


def test_the_surviving_history_is_the_same_in_whatever_order_its_views_come() -> None:
    wanted = [(step.commit.step, step.epoch) for step in some_books(*BEFORE, *AFTER).steps]
    for seed in range(200):
        views = [*BEFORE, *AFTER] * 2
        Random(seed).shuffle(views)
        books = some_books(*views)
        assert [(step.commit.step, step.epoch) for step in books.steps] == wanted, f"seed {seed}"
        assert books.totals().balanced


def test_a_void_step_stays_void_when_nobody_reports_how_it_was_trained_again() -> None:
    totals = some_books(*BEFORE, AFTER[0], AFTER[1], AFTER[3]).totals()
    assert "how step 2 was committed" in totals.reason
    assert (totals.lost, totals.balanced) == (MICROBATCHES, False)


def test_the_step_that_an_epoch_began_with_may_be_heard_of_last() -> None:
    books = some_books(*BEFORE, AFTER[3])
    assert [(step.commit.step, step.epoch) for step in books.steps] == [(0, 0), (1, 0), (2, 0), (3, 1)]
    books.agree(AFTER[0], 9.0)
    assert [(step.commit.step, step.epoch) for step in books.steps] == [(0, 0), (3, 1)]
    assert books.totals().lost == 2 * MICROBATCHES


def test_a_run_may_go_back_more_than_once_and_to_earlier_steps() -> None:
    books = some_books(*BEFORE, *AFTER, gone_back(0, undone=24, epoch=2), again(1, undone=24, epoch=2))
    assert [(step.commit.step, step.epoch) for step in books.steps] == [(0, 2)]
    totals = books.totals()
    assert totals.balanced, totals.reason
    assert (totals.undone, totals.recovered) == (24, 2)


def test_what_was_written_down_reads_back_as_the_history_that_stands() -> None:
    books = CommitHistory(STAGES, MICROBATCHES)
    written = [step for view in (*BEFORE, *AFTER) if (step := books.agree(view, 0.0)) is not None]
    assert len(written) == 6 and {step.epoch for step in written} == {0, 1}
    assert shorts(surviving(written)) == shorts(books.steps)
    assert [(step.commit.step, step.epoch) for step in surviving(written[:4])] == [(0, 0), (1, 1)]
    late = [*written[:3], written[4], written[3], written[5]]  # reported in another order
    assert shorts(surviving(late)) == shorts(books.steps)


def test_a_resumed_run_keeps_the_account_of_its_checkpoint() -> None:
    first = some_books(a_view(0), a_view(1), a_view(2, account=Account(issued=12, committed=8, redone=5, joined=1)))
    before = tuple(step for step in first.steps if step.commit.step < 2)
    books = CommitHistory(STAGES, MICROBATCHES, first_step=2, before=before)
    books.agree(a_view(2, last=None, account=Account(issued=4)), 0.0)
    books.agree(a_view(3, account=Account(issued=4, committed=4, redone=1)), 1.0)
    totals = books.totals()
    assert (totals.steps, totals.issued, totals.committed, totals.redone) == (3, 12, 12, 6)
    assert totals.balanced
    lacking = CommitHistory(STAGES, MICROBATCHES, first_step=2, before=before[1:])
    lacking.agree(a_view(3, account=Account(issued=4, committed=4)), 1.0)
    assert lacking.totals().lost == MICROBATCHES


def test_a_resumed_run_keeps_what_was_undone_before_and_counts_its_own_epochs_from_zero() -> None:
    before = some_books(*BEFORE, *AFTER).steps
    books = CommitHistory(STAGES, MICROBATCHES, first_step=4, before=before)
    books.agree(a_view(4, last=None, account=Account(issued=4)), 0.0)
    books.agree(a_view(5, account=Account(issued=4, committed=4)), 1.0)
    back = Account(undone=4)
    books.agree(a_view(4, epoch=1, last=None, phase=Phase.GATHERING, account=back), 2.0)
    assert shorts(books.steps) == shorts(before), "a later epoch of this session voids nothing of the sessions before"
    books.agree(a_view(5, epoch=1, account=msgspec.structs.replace(back, issued=4, committed=4)), 3.0)
    totals = books.totals()
    assert totals.balanced, totals.reason
    assert (totals.steps, totals.committed, totals.undone, totals.recovered) == (5, 20, 12, 2)


# ------------------------------------------------------------------------------------------------------ killed as a whole


def test_what_a_restart_throws_away_is_counted_as_undone_and_stands_nowhere_else() -> None:
    standing = some_books(a_view(0), a_view(1), a_view(2), a_view(3)).steps
    base = restarted(standing, 1, MICROBATCHES)
    assert base.account.undone == 2 * MICROBATCHES
    books = CommitHistory(STAGES, MICROBATCHES, first_step=1, before=standing[:1], base=base)
    books.agree(a_view(2, account=Account(issued=4, committed=4)), 1.0)
    totals = books.totals()
    assert totals.balanced, totals.reason
    assert (totals.steps, totals.committed, totals.undone) == (2, 2 * MICROBATCHES, 2 * MICROBATCHES)


def test_a_run_killed_again_and_again_counts_each_undone_step_once() -> None:
    """Also when nothing was committed between two kills, or the second came before the first restart had written all of its files."""
    standing = some_books(a_view(0), a_view(1), a_view(2), a_view(3)).steps
    first = restarted(standing, 1, MICROBATCHES)
    assert restarted(standing, 1, MICROBATCHES, first) == first, "the commits were still there"
    assert restarted(standing[:1], 1, MICROBATCHES, first) == first, "nothing came after them"
    books = CommitHistory(STAGES, MICROBATCHES, first_step=1, before=standing[:1], base=first)
    books.agree(a_view(2, account=Account(issued=4, committed=4, redone=3)), 1.0)
    second = restarted(books.steps, 1, MICROBATCHES, first)
    assert (second.account.undone, second.account.redone) == (3 * MICROBATCHES, 3)


def test_what_an_undone_history_had_undone_itself_stays_undone() -> None:
    standing = some_books(*BEFORE, *AFTER).steps  # went back once by itself, to step 1; 8 microbatches
    base = restarted(standing, 1, MICROBATCHES)
    assert (base.account.undone, base.recovered) == (8 + 3 * MICROBATCHES, 1)


def test_a_run_killed_before_its_first_checkpoint_begins_anew_with_its_account() -> None:
    standing = some_books(a_view(0), a_view(1), a_view(2)).steps
    books = CommitHistory(STAGES, MICROBATCHES, base=restarted(standing, 0, MICROBATCHES))
    for step in (1, 2, 3):
        books.agree(a_view(step, account=Account(issued=4 * step, committed=4 * step)), float(step))
    totals = books.totals()
    assert totals.balanced, totals.reason
    assert (totals.committed, totals.undone) == (3 * MICROBATCHES, 2 * MICROBATCHES)


# ------------------------------------------------------------------------------------------------------ cut another way


def test_a_run_resumed_on_more_or_fewer_stages_balances() -> None:
    whole = ((Share("a", (0, 1)), Share("b", (3, 2))),)
    one = CommitHistory(1, MICROBATCHES)
    for step in (1, 2):
        one.agree(a_view(step, whole), 0.0)
    assert one.totals().balanced
    two = CommitHistory(STAGES, MICROBATCHES, first_step=2, before=one.steps)
    two.agree(a_view(3, account=Account(issued=4, committed=4)), 1.0)
    assert (two.totals().lost, two.totals().balanced) == (0, True), two.totals().reason
    again = CommitHistory(1, MICROBATCHES, first_step=3, before=two.steps)
    again.agree(a_view(4, whole, account=Account(issued=4, committed=4)), 2.0)
    assert (again.totals().lost, again.totals().committed, again.totals().balanced) == (0, 16, True)


def test_a_run_resumed_on_more_stages_balances_also_when_no_commit_says_how_many_there_were() -> None:
    whole = ((Share("a", (0, 1)), Share("b", (3, 2))),)
    old = tuple(msgspec.structs.replace(step, stages=0, microbatches=0) for step in _committed(1, whole, steps=2))
    two = CommitHistory(STAGES, MICROBATCHES, first_step=2, before=old)
    two.agree(a_view(3, account=Account(issued=4, committed=4)), 1.0)
    assert (two.totals().lost, two.totals().balanced) == (0, True), two.totals().reason


def test_a_stage_without_a_group_is_lost_in_an_earlier_session_too() -> None:
    before = _committed(2, GROUPS[:1], steps=1)
    books = CommitHistory(1, MICROBATCHES, first_step=1, before=before)
    assert books.totals().lost == MICROBATCHES


def test_a_run_resumed_with_microbatches_of_another_size_balances() -> None:
    books = CommitHistory(STAGES, 2, first_step=2, before=_committed(STAGES, GROUPS, steps=2))
    halves = ((Share("a", (0,)), Share("b", (1,))), (Share("c", (0, 1)),))
    books.agree(a_view(3, halves, account=Account(issued=2, committed=2)), 1.0)
    totals = books.totals()
    assert (totals.issued, totals.committed, totals.balanced) == (10, 10, True), totals.reason
    assert restarted(books.steps, 1, 2).account.undone == 4 + 2


def test_steps_that_another_run_committed_are_taken_as_its_checkpoint_says() -> None:
    books = CommitHistory(STAGES, MICROBATCHES, first_step=2, base=Base(adopted_steps=2))
    books.agree(a_view(3, account=Account(issued=4, committed=4)), 1.0)
    totals = books.totals()
    assert (totals.adopted_steps, totals.lost, totals.committed, totals.balanced) == (2, 0, 12, True), totals.reason
    assert restarted(books.steps, 3, MICROBATCHES, books.base).adopted_steps == 2, "in every session to come"


def _committed(stages: int, groups: tuple[tuple[Share, ...], ...], steps: int) -> tuple[CommittedStep, ...]:
    books = CommitHistory(stages, MICROBATCHES)
    for step in range(1, steps + 1):
        books.agree(a_view(step, groups), 0.0)
    return books.steps


# ------------------------------------------------------------------------------------- trained while this machine was away


def test_steps_that_others_committed_while_this_machine_was_away_are_counted_by_them() -> None:
    standing = some_books(a_view(1), a_view(2)).steps
    books = CommitHistory(STAGES, MICROBATCHES, before=standing, returns=True)
    books.agree(a_view(2), 0.0)  # the view with which it asks for admission commits a step that is known
    books.agree(a_view(6), 1.0)  # which commits step 5: steps 2 to 4 were heard of nowhere here
    books.agree(a_view(7), 2.0)
    totals = books.totals()
    assert totals.balanced, totals.reason
    assert (totals.steps, totals.committed, totals.lost, totals.away) == (7, 7 * MICROBATCHES, 0, 3)
    assert [step.away for step in books.steps] == [0, 0, 3, 0]


def test_a_machine_that_was_never_away_misses_no_commit() -> None:
    books = CommitHistory(STAGES, MICROBATCHES, before=some_books(a_view(1), a_view(2)).steps)
    books.agree(a_view(6), 1.0)
    totals = books.totals()
    assert not totals.balanced and totals.lost == 3 * MICROBATCHES
    assert totals.reason.startswith("nobody reported how step 2 was committed")


def test_steps_away_that_the_members_did_not_commit_do_not_balance() -> None:
    books = CommitHistory(STAGES, MICROBATCHES, before=some_books(a_view(1)).steps, returns=True)
    books.agree(a_view(4, account=Account(issued=12, committed=12)), 1.0)
    assert not books.totals().balanced, "four steps have sixteen microbatches"


def test_a_restart_after_an_absence_remembers_which_steps_were_away() -> None:
    """Also from a checkpoint in the middle of them."""
    books = CommitHistory(STAGES, MICROBATCHES, before=some_books(a_view(1), a_view(2)).steps, returns=True)
    books.agree(a_view(6), 1.0)
    base = restarted(books.steps, 4, MICROBATCHES, books.base)
    assert (base.away, base.first_step) == ((2, 3), 4)
    assert restarted(books.steps[:2], 4, MICROBATCHES, base) == base, "the session that was killed at once had the same"
    again = CommitHistory(STAGES, MICROBATCHES, first_step=4, before=books.steps[:2], base=base)
    again.agree(a_view(5, account=Account(issued=4, committed=4)), 2.0)
    totals = again.totals()
    assert totals.balanced, totals.reason
    assert (totals.committed, totals.away, totals.undone) == (5 * MICROBATCHES, 2, MICROBATCHES)


def test_a_history_of_any_length_keeps_few_whole_commits(whole: int) -> None:
    books = some_books(*(a_view(step) for step in range(601)))
    assert sum(bool(step.commit.groups) for step in books.steps) == whole
    assert all((step.tally is None) == bool(step.commit.groups) for step in books.steps)
    line = msgspec.json.encode(books.steps[0]) if not whole else b""
    assert len(line) < 420, "a short line"
    assert books.totals().balanced and books.totals().steps == 600


def test_another_commit_of_an_old_step_is_a_conflict_and_the_same_is_none() -> None:
    books = some_books(*(a_view(step) for step in range(301)))
    books.agree(a_view(5), 0.0)
    assert books.totals().balanced
    other = a_view(5)
    assert other.last is not None
    books.agree(msgspec.structs.replace(other, last=msgspec.structs.replace(other.last, norm=2.0)), 0.0)
    assert books.totals().reason == "step 4 was committed in two ways"


def test_a_resumed_history_is_short_from_its_beginning(whole: int) -> None:
    standing = some_books(*(a_view(step) for step in range(301))).steps
    read = tuple(msgspec.json.decode(msgspec.json.encode(step), type=CommittedStep) for step in standing)
    books = CommitHistory(STAGES, MICROBATCHES, 300, read)
    assert sum(bool(step.commit.groups) for step in books.steps) == whole
    assert books.account.committed == 300 * MICROBATCHES


# ------------------------------------------------------------------------------------------------------------- credits


def credited(books: CommitHistory) -> tuple[dict[tuple[str, int], int], int]:
    credits, steps = credits_of(books.steps)
    return {(one.who, one.stage): one.microbatches for one in credits}, steps


def test_credits_are_the_same_before_and_after_old_commits_are_shortened(whole: int) -> None:
    """And each microbatch is credited once at every stage, whatever was shortened."""
    count = whole + 3 * BLOCK
    books = some_books(*(a_view(step) for step in range(count + 1)))
    short = [step.tally for step in books.steps if step.tally is not None]
    assert len(short) == count - whole
    blocks = (count - whole) // BLOCK
    assert sum(tally.credited == BLOCK for tally in short) == blocks == 3, "the last of each block has them"
    assert sum(bool(tally.credits) for tally in short) == blocks + (count - whole) % BLOCK
    one_step, _ = credits_of(some_books(a_view(1)).steps)
    totals, steps = credited(books)
    assert steps == count and totals == {(one.who, one.stage): count * one.microbatches for one in one_step}
    assert sum(totals.values()) == count * STAGES * MICROBATCHES
    again = CommitHistory(STAGES, MICROBATCHES, first_step=count, before=books.steps)
    assert credited(again) == (totals, steps), "a resumed run has them, too"


def test_undone_steps_are_credited_to_nobody() -> None:
    books = some_books(*BEFORE, gone_back(1, undone=8))
    assert credited(books)[1] == 1
    books.agree(again(2, undone=8), 9.0)
    assert credited(books)[1] == 2

"""A step whose results are not finite is skipped, or ends the run; one replica alone proves nothing."""

from __future__ import annotations

import msgspec
import pytest
from tests.core.test_leader import SETTINGS, LeaderRig

from shoal.core.consensus.validity import flaw
from shoal.core.leader.rules.divergence import IN_A_ROW
from shoal.core.messages import NonFinite, Phase, Settings

LONG = msgspec.structs.replace(SETTINGS, steps=20, save_every=1)


def started(settings: Settings = LONG) -> LeaderRig:
    """a and c serve stage 0, b serves stage 1."""
    leader = LeaderRig(settings)
    leader.start()
    return leader


def report(leader: LeaderRig, peer: str, stage: int, index: int = 2) -> None:
    view = leader.view
    leader.hear(peer, NonFinite(view.epoch, view.step, index, stage, "the stage's output is not finite"))


def confirm(leader: LeaderRig) -> None:
    for peer in ("a", "b", "c"):
        leader.heartbeat(peer)


def test_a_step_is_skipped_when_two_replicas_find_the_same_microbatch_not_finite() -> None:
    leader = started()
    report(leader, "a", 0)
    report(leader, "c", 0, index=1)
    assert leader.view.step == 0, "two replicas, two microbatches: either replica may be broken"
    report(leader, "c", 0)
    last = leader.view.last
    assert leader.view.step == 1 and last is not None and last.skipped == 1
    assert not last.groups and not last.save
    assert "microbatch 2 is not finite at stage 0" in leader.view.reason
    assert (leader.view.account.committed, leader.view.account.skipped, leader.view.account.issued) == (4, 4, 8)


def test_the_only_replica_of_a_stage_is_enough() -> None:
    leader = started()
    report(leader, "b", 1)
    assert leader.view.step == 1


def test_a_step_is_not_skipped_before_every_member_holds_the_one_before() -> None:
    leader = started()
    leader.heartbeat("c", ready=False)
    report(leader, "b", 1)
    assert leader.view.step == 0
    leader.heartbeat("c")
    assert leader.view.step == 1


@pytest.mark.parametrize("changes", [{"step": 1}, {"epoch": 1}, {"stage": 0}, {"index": 4}])
def test_reports_of_anything_else_are_ignored(changes: dict[str, int]) -> None:
    leader = started()
    leader.hear("b", msgspec.structs.replace(NonFinite(0, 0, 2, 1), **changes))
    assert leader.view.step == 0 and leader.view.phase is Phase.TRAINING


def test_steps_that_are_skipped_in_a_row_end_the_run_and_a_good_one_between_them_starts_the_count_anew() -> None:
    leader = started()
    for _ in range(IN_A_ROW):
        report(leader, "b", 1)
        confirm(leader)
    assert leader.view.step == IN_A_ROW and not leader.view.finished
    leader.fill_books()
    leader.reduce()
    confirm(leader)
    for _ in range(IN_A_ROW):
        report(leader, "b", 1)
        confirm(leader)
    assert not leader.view.finished
    report(leader, "b", 1)
    assert leader.view.phase is Phase.FAILED
    assert f"{IN_A_ROW + 1} steps in a row" in leader.view.failed and "train.learning_rate" in leader.view.failed
    assert leader.view.account.issued == leader.view.account.committed, "nothing of the last step is owed"


def test_a_run_that_stops_ends_at_the_first() -> None:
    leader = started(msgspec.structs.replace(LONG, nonfinite="stop"))
    report(leader, "b", 1)
    assert leader.view.phase is Phase.FAILED and leader.view.step == 0


def test_no_voter_accepts_a_skipped_step_with_a_gradient_or_a_wrong_count() -> None:
    leader = started()
    before = leader.view
    report(leader, "b", 1)
    view, last = leader.view, leader.view.last
    assert last is not None and not flaw(before, view, leader.settings)
    for changes in ({"skipped": 2}, {"norm": 1.0}, {"digests": ("a", "b")}):
        wrong = msgspec.structs.replace(view, last=msgspec.structs.replace(last, **changes))
        assert flaw(before, wrong, leader.settings), changes


def test_the_last_step_is_skipped_with_its_checkpoint() -> None:
    leader = started(msgspec.structs.replace(LONG, steps=1))
    report(leader, "b", 1)
    assert leader.view.phase is Phase.SAVING and leader.view.last is not None and leader.view.last.save

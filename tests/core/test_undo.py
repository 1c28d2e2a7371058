"""What an evicted peer contributed is undone: when, how far, and how often. The leader's view says all of it."""

from __future__ import annotations

import msgspec
import pytest
from tests.core.test_evicting import LONG, a_run, commit, late_leader
from tests.core.test_leader import LeaderRig

from shoal.core.allreduce.checked import WrongSums
from shoal.core.consensus.validity import flaw
from shoal.core.leader.audits.audits import Outcome
from shoal.core.leader.undo.decision import FEW, most
from shoal.core.leader.undo.unchecked import KEPT, tracked
from shoal.core.messages import (
    Member,
    Phase,
    Published,
    Saved,
    SaveRequest,
    Settings,
    Unchecked,
    Undoing,
    View,
)

CHECKED = msgspec.structs.replace(LONG, spot_checks=1e-9, undo="checkpoint", steps=500)


def checked(others: str = "bcde", **changes: object) -> LeaderRig:
    settings = msgspec.structs.replace(CHECKED, **changes)
    return a_run(others, **{name: getattr(settings, name) for name in ("spot_checks", "undo", "steps", *changes)})


def steps(leader: LeaderRig, count: int) -> None:
    for _ in range(count):
        commit(leader)
        for peer in [member.peer for member in leader.view.members]:
            leader.heartbeat(peer)


def save(leader: LeaderRig) -> None:
    """A checkpoint of the version that is trained now."""
    step, epoch = leader.view.step, leader.view.epoch
    leader.machine.facts.requests.save = True
    for member in leader.view.members:
        leader.heartbeat(member.peer, place="disk")
    for _ in range(4):
        for peer, asked in leader.sent(SaveRequest):
            if isinstance(asked, SaveRequest) and asked.step == step:
                stage = leader.stage_of(peer)
                leader.hear(peer, Saved(epoch, step, stage, f"record {stage}", shard=f"shard {stage}"))
        for member in leader.view.members:
            leader.hear(member.peer, Published(epoch, step, "place", edition=leader.machine.facts.saving.edition))
        leader.wait(1.0, alive=tuple(member.peer for member in leader.view.members))
    assert leader.machine.facts.saving.published == step, leader.notes()


def convict(leader: LeaderRig, peer: str) -> None:
    leader.machine.facts.convict((peer, "sends noise"), false=True)
    leader.decide()


def since(leader: LeaderRig) -> dict[str, int]:
    undoing = leader.view.undoing
    assert undoing is not None
    return {one.key: one.since for one in undoing.unchecked}


def everybody_holds(leader: LeaderRig) -> None:
    for member in leader.view.members:
        leader.heartbeat(member.peer)
    assert leader.view.phase is Phase.TRAINING, leader.view


def test_all_go_back_to_before_the_peer_came_and_its_steps_are_undone() -> None:
    leader = checked()
    steps(leader, 4)
    save(leader)
    leader.join("f")
    leader.heartbeat("f", number=leader.view.number)
    steps(leader, 3)
    assert "f" in [member.peer for member in leader.view.members], leader.view
    before = leader.view
    assert since(leader)["f"] > 4
    convict(leader, "f")
    assert (leader.view.epoch, leader.view.phase, leader.view.step) == (1, Phase.GATHERING, 4)
    assert leader.view.saved == 4 and leader.view.number == before.number + 1  # with the eviction, in one view
    assert "f" not in [member.peer for member in leader.view.members]
    assert leader.view.account.undone == 4 * (before.step - 4) and leader.view.account.committed == 16
    assert "back from step 7 to the state of step 4, 3 steps" in leader.view.reason
    undoing = leader.view.undoing
    assert undoing is not None and (undoing.times, undoing.steps, undoing.epoch) == (1, 3, 1)
    assert not flaw(before, leader.view, leader.settings)
    everybody_holds(leader)
    steps(leader, 1)
    assert leader.view.step == 5 and leader.view.account.committed == 20


def test_a_newer_checkpoint_that_holds_what_it_contributed_is_not_gone_back_to() -> None:
    leader = checked()
    steps(leader, 2)
    save(leader)
    leader.machine.facts.evidence.values.passes("d", 1)
    steps(leader, 4)
    save(leader)
    steps(leader, 1)
    assert since(leader)["d"] == 2 and leader.view.saved == 6
    convict(leader, "d")
    assert leader.view.step == 2 and leader.view.undoing.saves == (2,)


def test_after_a_check_that_passed_only_what_came_since_is_undone() -> None:
    leader = checked()
    steps(leader, 2)
    save(leader)
    steps(leader, 2)
    leader.machine.facts.evidence.values.passes("d", 3)
    save(leader)
    steps(leader, 2)
    convict(leader, "d")
    assert leader.view.step == 4


def test_nothing_is_undone_when_all_of_it_was_checked_or_is_of_the_open_step() -> None:
    leader = checked()
    steps(leader, 3)
    leader.machine.facts.evidence.values.passes("d", 2)
    convict(leader, "d")
    assert leader.view.epoch == 0 and leader.view.step == 3
    assert "d" not in [member.peer for member in leader.view.members]


def test_an_audit_that_passed_is_a_check_of_its_step() -> None:
    leader = checked()
    steps(leader, 3)
    leader.machine.facts.judge(Outcome(passed=("d",), step=2))
    convict(leader, "d")
    assert leader.view.epoch == 0 and leader.view.step == 3


@pytest.mark.parametrize("changes", [{"undo": "none"}, {"spot_checks": 0.0}])
def test_without_the_setting_or_without_checks_nothing_is_undone(changes: dict[str, object]) -> None:
    leader = checked(**changes)
    steps(leader, 2)
    convict(leader, "d")
    assert leader.view.epoch == 0 and leader.view.step == 2


def test_slowness_and_silence_undo_nothing() -> None:
    leader = checked()
    steps(leader, 2)
    leader.machine.facts.convict(("d", "is late"))
    leader.decide()
    leader.wait(5.0, alive=("b", "c"))
    assert [member.peer for member in leader.view.members] == ["a", "b", "c"]
    assert leader.view.epoch == 0


def test_a_wrong_sum_and_a_part_with_another_gradient_are_false_values() -> None:
    leader = checked("bcdefgh")
    steps(leader, 1)
    leader.machine.facts.judge(Outcome((("g", "its part is not what its hops make"),)))
    leader.decide()
    assert leader.view.epoch == 1 and leader.view.step == 0
    leader = checked()
    steps(leader, 1)
    leader.machine.facts.note(WrongSums((("d", "its parts do not make its sum"),), ()), leader.now)
    leader.decide()
    assert leader.view.epoch == 1 and leader.view.step == 0


def test_without_an_old_enough_checkpoint_it_stays_and_is_said() -> None:
    leader = checked(first_step=0, keep=1)
    steps(leader, 3)
    save(leader)
    view, settings = leader.view, msgspec.structs.replace(leader.settings, first_step=2)
    leader.machine.facts.settings = leader.machine.settings = settings
    convict(leader, "d")
    assert leader.view.epoch == 0 and leader.view.step == view.step
    assert (
        "contributed since step 0, of which no check has passed, stays: no checkpoint is as old" in leader.view.reason
    )


def test_liars_one_after_the_other_undo_a_tenth_of_the_steps_at_most() -> None:
    leader = checked("bcdefghij")
    for peer in "jihg":
        steps(leader, 7)
        convict(leader, peer)
        if not leader.view.started:
            everybody_holds(leader)
    undoing = leader.view.undoing
    assert undoing is not None and undoing.times == 2 and undoing.steps == 14 <= FEW
    assert "14 steps after 14 would be undone for evictions, and at most 16 may be" in leader.view.reason
    assert most(leader.view, Undoing(steps=100), msgspec.structs.replace(leader.settings, save_every=40)) == 80
    assert most(msgspec.structs.replace(leader.view, step=900), Undoing(steps=100), leader.settings) == 100


def test_a_new_leader_knows_since_when_and_goes_back_as_far() -> None:
    leader = checked()
    steps(leader, 2)
    save(leader)
    leader.machine.facts.evidence.values.passes("d", 1)
    steps(leader, 2)
    late_leader(leader)
    for peer in "bcde":
        leader.heartbeat(peer)
    convict(leader, "d")
    assert leader.view.step == 2


def test_whoever_left_and_came_back_does_not_begin_anew() -> None:
    leader = checked()
    steps(leader, 3)
    leader.wait(5.0, alive=("b", "c", "e"))
    assert "d" not in [member.peer for member in leader.view.members] and since(leader)["d"] == 0
    leader.join("d")
    assert since(leader)["d"] == 0


def test_what_a_view_says_is_bounded_and_follows_the_step() -> None:
    members = (Member("a", 0), Member("b", 0))
    known = Undoing((*(Unchecked(f"x{i}", 1) for i in range(300)), Unchecked("b", 9), Unchecked("late", 4)), (2, 8))
    view = View(number=9, step=4, members=members, undoing=known, phase=Phase.TRAINING)
    said = tracked(view, {"b": 7}, 3, CHECKED)
    assert len(said.unchecked) == KEPT + 2 and said.saves == (2, 3)
    since = {one.key: one.since for one in said.unchecked}
    assert since["a"] == 4 and since["b"] == 4 and "late" not in since and "x299" in since and "x0" not in since


@pytest.mark.parametrize(("times", "count", "step", "epoch"), [(1, 3, 2, 0), (1, 2, 2, 1), (2, 3, 2, 1), (0, 3, 2, 1)])
def test_no_voter_accepts_other_counts_of_what_was_undone(times: int, count: int, step: int, epoch: int) -> None:
    settings = Settings(stages=1, microbatches=4, steps=99)
    before = View(number=7, step=5, members=(Member("a", 0),), phase=Phase.TRAINING, owners=(0,) * 4)
    after = View(8, step, before.members, epoch=epoch, undoing=Undoing(times=times, steps=count, epoch=epoch))
    assert flaw(before, after, settings)
    right = msgspec.structs.replace(after, epoch=1, undoing=Undoing(times=1, steps=3, epoch=1))
    assert not flaw(before, right, settings)

"""The table of the View's phases: what is in it voters accept and the leader's rules may propose, and nothing else."""

from __future__ import annotations

from itertools import product

import msgspec
import pytest

from shoal.core.consensus.phases import TRANSITIONS, Step, misplaced, transition
from shoal.core.consensus.validity import flaw
from shoal.core.leader.rules.proposal import successor
from shoal.core.messages import Committed, Member, Phase, Settings, Share, View

STEPS = 8
SETTINGS = Settings(stages=1, microbatches=1, steps=STEPS, staleness=1)
TRAINS = (Phase.TRAINING, Phase.OVERLAPPING, Phase.REOPENED)


def a_view(phase: Phase, step: int = 3) -> View:
    return View(number=5, step=step, members=(Member("a", 0),), phase=phase, owners=(0,))


def follows(before: View, phase: Phase, step: int, new_epoch: bool) -> View:
    """With a commit, should that step be the next."""
    share = Share("a", (0,))
    commits = step == before.step + 1 and not new_epoch
    last = Committed(before.step, 1, 1.0, 2.0, ("d",), ((share,),)) if commits else None
    return msgspec.structs.replace(
        before, number=before.number + 1, phase=phase, step=step, epoch=before.epoch + new_epoch, last=last
    )


def in_table(before: Phase, after: Phase, change: int, new_epoch: bool) -> bool:
    steps = {Step.SAME: (0,), Step.NEXT: (1,), Step.SAME_OR_EARLIER: (0, -1, -2, -3)}
    return any(
        (one.before, one.after, one.new_epoch) == (before, after, new_epoch) and change in steps[one.step]
        for one in TRANSITIONS
    )


def first_step(before: Phase, after: Phase, change: int) -> int | None:
    """A step at which both phases can be; None: the two exclude one another."""
    for step in (3, STEPS - 1, STEPS):
        views = a_view(before, step), a_view(after, step + change)
        if step + change <= STEPS and not any(misplaced(view, SETTINGS) for view in views):
            return step
    return None


@pytest.mark.parametrize("before", Phase)
def test_voters_accept_what_is_in_the_table_and_nothing_else(before: Phase) -> None:
    for after, change, new_epoch in product(Phase, (-2, -1, 0, 1, 2), (False, True)):
        step = first_step(before, after, change)
        if step is None:
            continue
        view = a_view(before, step)
        wrong = flaw(view, follows(view, after, step + change, new_epoch), SETTINGS)
        assert (wrong == "") is in_table(before, after, change, new_epoch), (after, change, new_epoch, wrong)


def test_every_transition_can_be_made() -> None:
    """None of them is between phases that exclude one another."""
    change = {Step.SAME: 0, Step.NEXT: 1, Step.SAME_OR_EARLIER: 0}
    for one in TRANSITIONS:
        assert first_step(one.before, one.after, change[one.step]) is not None, one


def test_no_transition_stands_twice() -> None:
    keys = [(one.before, one.after, one.new_epoch, one.step) for one in TRANSITIONS]
    assert len(set(keys)) == len(keys)


def test_a_finished_run_stays_finished() -> None:
    for over, phase, new_epoch in product((Phase.FINISHED, Phase.FAILED), Phase, (False, True)):
        view = a_view(over, STEPS)
        assert transition(view, follows(view, phase, STEPS, new_epoch)) is None


@pytest.mark.parametrize("phase", Phase)
def test_a_phase_is_refused_at_a_step_that_it_cannot_have(phase: Phase) -> None:
    assert bool(misplaced(a_view(phase, STEPS), SETTINGS)) is (phase in TRAINS)
    assert bool(misplaced(a_view(phase), SETTINGS)) is (phase in (Phase.SAVING, Phase.FINISHED))
    plain = msgspec.structs.replace(SETTINGS, staleness=0)
    allowed = (Phase.GATHERING, Phase.TRAINING, Phase.FAILED)
    assert bool(misplaced(a_view(phase), plain)) is (phase not in allowed)


def test_a_rule_cannot_propose_what_is_not_in_the_table() -> None:
    with pytest.raises(AssertionError):
        successor(a_view(Phase.TRAINING), ["because"], phase=Phase.GATHERING)
    after = successor(a_view(Phase.TRAINING), ["one", "two"], phase=Phase.OVERLAPPING)
    assert (after.number, after.phase, after.reason) == (6, Phase.OVERLAPPING, "one; two")

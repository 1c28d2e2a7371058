"""Each checker catches a planted violation, and says nothing about what is right."""

from __future__ import annotations

import msgspec
import pytest

from shoal.core import messages as m
from shoal.sim import liveness
from shoal.sim.checkers import Watch, contents
from shoal.sim.swarm import simulate
from shoal.sim.tasks.storage import short
from shoal.sim.tasks.task_runner import Reduced, World

STAGES, MICROBATCHES, STEPS = 2, 3, 4


def a_watch(staleness: int = 0) -> Watch:
    settings = m.Settings(stages=STAGES, microbatches=MICROBATCHES, steps=STEPS, staleness=staleness)
    world = World(STAGES, 100, staleness)
    world.versions = {(stage, f"w{stage}"): 0 for stage in range(STAGES)}
    return Watch(settings, world, lambda: 1.0)


def a_view(number: int = 5, **changes: object) -> m.View:
    members = tuple(m.Member(peer, stage) for peer, stage in (("a", 0), ("b", 0), ("c", 1)))
    view = m.View(number=number, step=0, members=members, owners=(0, 1, 2), phase=m.Phase.TRAINING)
    return msgspec.structs.replace(view, **changes)


def an_addition(index: int, stage: int, step: int = 0) -> tuple[object, ...]:
    return (step, index, "" if stage == 0 else "w0", f"w{stage}", "w1" if stage == 0 else "")


def a_gradient(stage: int, indices: tuple[int, ...] = (0, 1, 2), step: int = 0) -> Reduced:
    chunk = tuple(an_addition(index, stage, step) for index in indices)
    return Reduced(stage, (0, 50, 100), (chunk, chunk))


def a_commit(watch: Watch, gradients: tuple[Reduced, ...], step: int = 0) -> m.View:
    digests = tuple(short(gradient) for gradient in gradients)
    watch.world.reduced.update(zip(digests, gradients, strict=True))
    groups = ((m.Share("a", (0, 1)), m.Share("b", (2,))), (m.Share("c", (0, 1, 2)),))
    last = m.Committed(step=step, round=7, norm=1.0, loss=2.0, digests=digests, groups=groups)
    return a_view(number=6, step=step + 1, last=last)


def violations(watch: Watch) -> set[str]:
    return {violation.checker for violation in watch.violations}


def test_a_right_commit_is_no_violation() -> None:
    watch = a_watch()
    view = a_commit(watch, (a_gradient(0), a_gradient(1)))
    for peer in "abc":
        watch.agreed(peer, a_view())
        watch.agreed(peer, view)
    assert not watch.violations
    assert list(watch.commits.known) == [(0, 0)] and watch.newest is view


@pytest.mark.parametrize("indices", [(0, 1), (0, 1, 1), (0, 1, 2, 2), (0, 1, 3)])
def test_a_commit_that_lacks_or_doubles_a_microbatch_is_caught(indices: tuple[int, ...]) -> None:
    watch = a_watch()
    watch.agreed("a", a_commit(watch, (a_gradient(0), a_gradient(1, indices))))
    assert violations(watch) == {"exactly once"}


def test_one_chunk_that_lacks_a_microbatch_is_caught() -> None:
    whole, part = a_gradient(0).chunks[0], a_gradient(0, (0, 2)).chunks[0]
    assert contents(Reduced(0, (0, 50, 100), (whole, part)), 0, MICROBATCHES, "")[0] == "chunk 1 holds indices [0, 2]"
    assert (
        contents(Reduced(0, (0, 50, 50), (whole, part)), 0, MICROBATCHES, "")[0] == ""
    )  # an empty chunk holds nothing


def test_additions_in_another_order_than_the_commit_lists_are_caught() -> None:
    watch = a_watch()
    watch.agreed("a", a_commit(watch, (a_gradient(0, (0, 2, 1)), a_gradient(1))))
    assert violations(watch) == {"order"}


def met(group: str, *others: str) -> set[str]:
    watch = a_watch()
    shares = tuple(m.Share(peer, ()) for peer in group)
    watch.sent("leader", "a", m.Round(epoch=0, step=0, round=7, view=5, groups=(shares,)))
    for to in others:
        watch.sent("a", to, m.ReduceChunk(epoch=0, step=0, round=7, chunk=1))
        watch.sent("a", to, m.GatherChunk(epoch=0, step=0, round=7, chunk=1))
    return violations(watch)


def test_whoever_meets_more_of_a_large_group_than_a_round_needs_is_caught() -> None:
    sixteen, twenty = "abcdefghijklmnop", "abcdefghijklmnopqrst"
    assert met(sixteen, *sixteen[1:]) == set()
    assert met(twenty, *twenty[1:12]) == set()
    assert met(twenty, *twenty[1:]) == {"connections"}
    assert met(sixteen, "z") == {"connections"}, "a stranger to the group"


def test_gradients_of_another_step_or_of_other_parameters_are_caught() -> None:
    watch = a_watch()
    watch.agreed("a", a_commit(watch, (a_gradient(0, step=1), a_gradient(1))))
    assert violations(watch) == {"exactly once"}
    chunk = (an_addition(0, 1), an_addition(1, 1), (0, 2, "w0", "stale", ""))
    assert "different parameters" in contents(Reduced(1, (0, 100), (chunk,)), 0, MICROBATCHES, "w0")[0]
    assert "the stage below" in contents(a_gradient(1), 0, MICROBATCHES, "other")[0]


def test_two_different_commits_of_one_step_are_caught() -> None:
    watch = a_watch()
    view = a_commit(watch, (a_gradient(0), a_gradient(1)))
    watch.agreed("a", view)
    assert view.last is not None
    other = msgspec.structs.replace(view, number=7, last=msgspec.structs.replace(view.last, round=8))
    watch.agreed("b", other)
    assert "commit" in violations(watch)


def test_two_different_views_of_one_number_are_caught() -> None:
    watch = a_watch()
    watch.agreed("a", a_view())
    watch.agreed("b", a_view())
    assert not watch.violations
    watch.agreed("b", a_view(reason="another"))
    assert violations(watch) == {"agreement"}


@pytest.mark.parametrize(
    "changes",
    [
        {"step": 2},
        {"owners": (0, 1)},
        {"owners": (0, 1, 3)},
        {"members": ()},
        {"members": (m.Member("a", 0), m.Member("a", 1), m.Member("c", 1))},
        {
            "members": (m.Member("a", 0), m.Member("b", 0), m.Member("c", 1), m.Member("d", 1)),
            "fenced": (m.Member("d", 1),),
        },
    ],
)
def test_a_view_that_does_not_follow_is_caught(changes: dict[str, object]) -> None:
    watch = a_watch()
    watch.agreed("a", a_view())
    watch.agreed("a", a_view(number=6, **changes))
    assert violations(watch) == {"view"}


def test_a_step_that_is_computed_beside_the_one_before_is_caught_where_updates_are_not_delayed() -> None:
    ahead = {"number": 6, "phase": m.Phase.OVERLAPPING, "since": 6}
    for staleness, wanted in ((0, {"view"}), (1, set())):
        watch = a_watch(staleness)
        watch.agreed("a", a_view())
        watch.agreed("a", a_view(**ahead))
        assert violations(watch) == wanted
    watch.agreed("a", a_view(**ahead | {"number": 7, "step": 1}))  # and on to the next but one without a commit between
    assert violations(watch) == {"view"}


@pytest.mark.parametrize(("staleness", "versions"), [(0, {0: 0, 1: 1, 2: 2}), (1, {0: 0, 1: 0, 2: 1})])
def test_a_gradient_that_is_older_or_younger_than_declared_is_caught(staleness: int, versions: dict[int, int]) -> None:
    for step, right in versions.items():
        for version in range(3):
            watch = a_watch(staleness)
            watch.world.versions = {(stage, f"w{stage}"): version for stage in range(STAGES)}
            watch.agreed("a", a_commit(watch, (a_gradient(0, step=step), a_gradient(1, step=step)), step))
            assert violations(watch) == (set() if version == right else {"staleness"}), (step, version)


def test_a_move_that_empties_a_stage_is_caught_and_a_death_is_not() -> None:
    watch = a_watch()
    watch.agreed("a", a_view())
    watch.agreed("a", a_view(number=6, step=1, members=(m.Member("a", 0), m.Member("b", 0), m.Member("c", 0))))
    assert violations(watch) == {"staffed"}
    watch = a_watch()
    watch.agreed("a", a_view())
    watch.agreed("a", a_view(number=6, members=(m.Member("a", 0), m.Member("b", 0)), owners=(0, 1, 0)))
    assert not watch.violations


def test_an_attempt_sent_to_two_peers_is_caught() -> None:
    watch = a_watch()
    request = m.Backward(epoch=0, step=0, index=1, stage=0, attempt=4, view=5)
    watch.sent("a", "b", request)
    watch.sent("a", "b", request)
    watch.sent("a", "c", msgspec.structs.replace(request, attempt=5))
    watch.sent("c", "a", request)  # another owner's count
    assert not watch.violations
    watch.sent("a", "c", request)
    assert violations(watch) == {"attempt"}


def a_heartbeat(*indices: int, stage: int = 0) -> m.Heartbeat:
    books = tuple(m.Booking(index) for index in indices)
    return m.Heartbeat(term=1, number=5, step=0, ready=True, books=books, stage=stage)


def test_a_microbatch_booked_at_two_members_is_caught() -> None:
    watch = a_watch()
    watch.agreed("a", a_view())
    watch.sent("a", "b", a_heartbeat(0, 2))
    watch.sent("b", "b", a_heartbeat(1))
    watch.sent("gone", "b", a_heartbeat(1))
    watch.sent("c", "b", a_heartbeat(1, stage=1))
    watch.sent("a", "b", a_heartbeat(0, 2))
    assert not watch.violations
    watch.sent("b", "b", a_heartbeat(1, 2))
    assert violations(watch) == {"booked twice"}


def test_an_average_with_a_fenced_peer_is_caught() -> None:
    watch = a_watch()
    members = (m.Member("a", 0), m.Member("c", 1))
    watch.agreed("a", a_view(members=members, owners=(0, 1, 0)))
    watch.agreed("a", a_commit(watch, (a_gradient(0), a_gradient(1))))
    assert "fenced" in violations(watch)


def test_two_leaders_of_one_term_are_caught() -> None:
    watch = a_watch()
    watch.sent("a", "b", m.Lead(term=3, number=1))
    watch.sent("b", "a", m.Lead(term=4, number=1))
    assert not watch.violations
    watch.sent("b", "a", m.Lead(term=3, number=1))
    assert violations(watch) == {"leader"}


def test_an_apply_without_its_commit_is_caught() -> None:
    watch = a_watch()
    view = a_commit(watch, (a_gradient(0), a_gradient(1)))
    watch.agreed("a", view)
    watch.applying("a", view, m.Apply(id="s/1", step=0, round=7, norm=1.0, save=False))
    assert not watch.violations
    for wrong in ({"round": 6}, {"step": 1}, {"norm": 1.5}):
        watch = a_watch()
        a_commit(watch, (a_gradient(0), a_gradient(1)))
        watch.violations.clear()
        task = msgspec.structs.replace(m.Apply(id="s/1", step=0, round=7, norm=1.0, save=False), **wrong)
        watch.applying("a", view, task)
        assert violations(watch) == {"apply"}


def test_replicas_that_differ_are_caught() -> None:
    watch = a_watch()
    watch.holds("a", 0, 1, 3, "same")
    watch.holds("b", 0, 1, 3, "same")
    watch.holds("b", 0, 0, 3, "another stage")
    watch.holds("b", 1, 1, 3, "another epoch")
    assert not watch.violations
    watch.holds("b", 0, 1, 3, "other")
    assert violations(watch) == {"replicas"}


def test_a_checkpoint_of_other_parameters_is_caught() -> None:
    watch = a_watch()
    for epoch in (0, 1):
        for stage in range(STAGES):
            watch.holds("a", epoch, stage, 2, f"epoch{epoch}stage{stage}")
    watch.published("a", 2, ("epoch1stage0", "epoch1stage1"))
    assert not watch.violations
    watch.published("a", 2, ("epoch0stage0", "epoch1stage1"))  # halves of two histories
    assert violations(watch) == {"checkpoint"}


def a_last_view(**changes: object) -> m.View:
    account = m.Account(issued=STEPS * MICROBATCHES, committed=STEPS * MICROBATCHES)
    return a_view(step=STEPS, owners=(), phase=m.Phase.FINISHED, account=account, **changes)


def test_a_run_that_ended_well_is_no_violation() -> None:
    watch = a_watch()
    watch.agreed("a", a_last_view())
    watch.end(finished=("a", "b", "c"), alive=())
    assert not watch.violations


@pytest.mark.parametrize(
    ("account", "checker"),
    [
        (m.Account(issued=12, committed=11), "account"),
        (m.Account(issued=13, committed=12), "account"),
        (m.Account(issued=12, committed=12, counted_twice=1), "account"),
    ],
)
def test_an_account_that_does_not_add_up_is_caught(account: m.Account, checker: str) -> None:
    watch = a_watch()
    watch.agreed("a", msgspec.structs.replace(a_last_view(), account=account))
    watch.end(finished=("a", "b", "c"), alive=())
    assert violations(watch) == {checker}


def test_a_run_or_a_member_that_never_finishes_is_caught() -> None:
    watch = a_watch()
    watch.agreed("a", a_view())
    watch.end(finished=(), alive=("a", "b", "c"))
    assert violations(watch) == {"progress"}
    watch = a_watch()
    watch.agreed("a", a_last_view())
    watch.end(finished=("a", "b"), alive=("c", "d"))
    assert violations(watch) == {"progress"}


def test_what_members_of_the_last_view_still_hold_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "MOST_BLOBS", -1)
    outcome = simulate("calm", 3)
    assert outcome.committed and {one.checker for one in outcome.violations} == {"leak"}

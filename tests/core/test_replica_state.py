"""Whose requests a replica still listens to: a microbatch that comes back to its former owner begins anew. And who has been joining for so
long that what it waits for is urgent."""

from __future__ import annotations

from msgspec.structs import replace

from shoal.core.messages import Member, Phase, View
from shoal.core.replica_state import HURRY_STEPS, MOST_STEPS, ReplicaState

MEMBERS = tuple(Member(peer, 0) for peer in "abc")
VIEW = View(number=4, step=3, members=MEMBERS, owners=(0, 1, 2), phase=Phase.TRAINING)


def seen(*views: View) -> ReplicaState:
    replica = ReplicaState()
    for view in views:
        replica.adopt(view)
    return replica


def test_an_owner_speaks_for_what_it_has_owned_since_its_request() -> None:
    replica = seen(VIEW, replace(VIEW, number=5))
    assert replica.speaks_for(0, "a", 4) and replica.speaks_for(1, "b", 5) and not replica.speaks_for(1, "a", 5)


def test_who_lost_a_microbatch_and_has_it_again_begins_anew() -> None:
    """Found 2026-11-25: b took it over and was evicted, a had it again; a's first request was still booked, and its second one, too."""
    taken, back = replace(VIEW, number=5, owners=(1, 1, 2)), replace(VIEW, number=6)
    replica = seen(VIEW, taken, back)
    assert not replica.speaks_for(0, "a", 4) and replica.speaks_for(0, "a", 6)
    assert replica.speaks_for(1, "b", 4) and replica.speaks_for(2, "c", 4), "theirs went on"
    assert seen(VIEW, taken, back, replace(VIEW, number=7, step=4)).speaks_for(0, "a", 4), "another step"


def test_views_that_were_missed_may_have_named_others() -> None:
    replica = seen(VIEW, replace(VIEW, number=6))
    assert not replica.speaks_for(0, "a", 4) and replica.speaks_for(0, "a", 6)


def joined(*steps: int, stage: int = 0) -> ReplicaState:
    """`new` is a joiner at these steps."""
    return seen(*(replace(VIEW, number=5 + step, step=step, joining=(Member("new", stage),)) for step in steps))


def test_a_joiner_hurries_when_it_has_been_one_for_some_steps() -> None:
    assert not joined(3, 3 + HURRY_STEPS - 1).hurries("new")
    assert joined(3, 4, 3 + HURRY_STEPS).hurries("new") and not joined(3, 3 + HURRY_STEPS).hurries("other")
    assert joined(3, 2 + MOST_STEPS).hurries("new") and not joined(3, 3 + MOST_STEPS).hurries("new"), "not for ever"
    assert joined(9, 3, 3 + HURRY_STEPS).hurries("new"), "the run went back"
    assert not joined(9, 3, 3 + HURRY_STEPS - 1).hurries("new")


def test_a_joiner_that_left_or_goes_to_another_stage_begins_anew() -> None:
    at = [replace(VIEW, number=5 + step, step=step, joining=(Member("new", step // 4),)) for step in range(8)]
    assert not seen(*at[:5]).hurries("new")
    at = [replace(VIEW, number=5 + step, step=step, joining=(Member("new", 0),) * (step != 2)) for step in range(8)]
    assert not seen(*at[:6]).hurries("new") and seen(*at).hurries("new")

"""Where a joiner goes."""

from __future__ import annotations

from shoal.core.messages import Member
from shoal.core.rebalance import place


def test_a_joiner_goes_to_the_stage_with_the_fewest_replicas() -> None:
    stage, why = place([Member("a", 0), Member("b", 0), Member("c", 2)], stages=3)
    assert stage == 1 and "0:2, 1:0, 2:1" in why


def test_equal_stages_are_filled_from_the_first() -> None:
    assert place([], stages=3)[0] == 0


def test_a_stage_with_twice_the_work_gets_twice_the_replicas() -> None:
    members: list[Member] = []
    for i in range(9):
        stage, _ = place(members, stages=2, seconds=(2.0, 1.0))
        members.append(Member(f"p{i}", stage))
    assert sum(m.stage == 0 for m in members) == 6

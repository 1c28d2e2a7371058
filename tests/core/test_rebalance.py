"""Where a joiner goes."""

from __future__ import annotations

from shoal.core.messages import Member
from shoal.core.rebalance import GAIN, move, place


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


def test_a_peer_moves_from_the_thickest_to_the_thinnest_stage_when_it_pays() -> None:
    members = tuple(Member(f"p{i}", stage) for i, stage in enumerate((0, 0, 0, 0, 1, 1, 2)))
    chosen = move(members, stages=3)
    assert chosen is not None
    who, stage, why = chosen
    assert (who, stage) == (Member("p3", 0), 2), "the newest of the stage that can best spare one"
    assert "move p3 0->2" in why and "gain 2.00x" in why


def test_a_small_gain_moves_nobody() -> None:
    members = tuple(Member(f"p{i}", stage) for i, stage in enumerate((0, 0, 0, 0, 0, 1, 1, 1, 1)))
    assert GAIN > 1.0 and move(members, stages=2) is None


def test_the_last_replica_of_a_stage_never_moves() -> None:
    assert move((Member("a", 0), Member("b", 1)), stages=2, seconds=(1.0, 100.0)) is None


def test_moving_there_and_back_is_never_worth_it_twice() -> None:
    members = tuple(Member(f"p{i}", stage) for i, stage in enumerate((0, 0, 0, 1)))
    chosen = move(members, stages=2)
    assert chosen is not None
    who, stage, _ = chosen
    after = tuple(Member(m.peer, stage) if m == who else m for m in members)
    assert move(after, stages=2) is None


def test_an_empty_stage_is_served_first() -> None:
    chosen = move((Member("a", 0), Member("b", 0), Member("c", 1)), stages=3)
    assert chosen is not None and chosen[1] == 2

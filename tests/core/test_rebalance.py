"""Where a joiner goes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.core.messages import Member
from shoal.core.rebalance import move, place


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
    """Five peers on three stages: whichever has one replica, noise of 20 % each way makes it look thinner or not."""
    for lone in range(3):
        members = tuple(Member(f"p{s}{n}", s) for s in range(3) for n in range(1 if s == lone else 2))
        for noise in ((1.2, 1.0, 0.83), (0.83, 1.2, 1.0), (1.0, 0.83, 1.2), (1.2, 1.2, 0.83)):
            assert move(members, stages=3, seconds=noise) is None
        twice = tuple(2.0 if s == lone else 1.0 for s in range(3))
        assert move(members, stages=3, seconds=twice) is not None


def test_in_large_groups_one_peer_too_many_still_moves() -> None:
    members = tuple(Member(f"p{i}", stage) for i, stage in enumerate([0] * 22 + [1] * 20))
    chosen = move(members, stages=2)
    assert chosen is not None and "gain 1.05x" in chosen[2]


def test_two_stages_that_are_equally_thin_do_not_block_each_other() -> None:
    members = tuple(Member(f"p{i}", stage) for i, stage in enumerate((0, 0, 0, 1, 1, 1, 2, 3)))
    chosen = move(members, stages=4)
    assert chosen is not None
    assert (chosen[0].stage, chosen[1]) == (0, 2) and "gain 2.00x" in chosen[2]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.lists(st.floats(0.1, 10.0), min_size=5, max_size=5))
def test_moves_come_to_an_end_and_empty_no_stage(stages: list[int], seconds: list[float]) -> None:
    members = tuple(Member(f"p{i}", stage) for i, stage in enumerate(stages))
    served, moves = {member.stage for member in members}, 0
    while (chosen := move(members, stages=5, seconds=tuple(seconds))) is not None:
        who, stage, _ = chosen
        rest = tuple(member for member in members if member != who)
        members = (*rest, Member(who.peer, stage))
        served, before = {member.stage for member in members}, served
        assert served >= before
        moves += 1
        assert moves <= len(stages), "peers wander"


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

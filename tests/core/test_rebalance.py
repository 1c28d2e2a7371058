"""Where a joiner goes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.leader.rebalance import MOVE_S, REST_MOVES, Fleet, Move, _Plan, measure, place, rebalance
from shoal.core.messages import Member


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


# ------------------------------------------------------------------------------------------------------- several moves


def a_fleet(*counts: int, **known: Any) -> Fleet:
    """`counts[s]` members at stage s, newest last: peers p0, p1, ..."""
    stages = [stage for stage, count in enumerate(counts) for _ in range(count)]
    return Fleet(members=tuple(Member(f"p{i}", s) for i, s in enumerate(stages)), stages=len(counts), **known)


def ways(moves: tuple[Move, ...]) -> list[tuple[int, int]]:
    return [(one.source, one.stage) for one in moves]


def after(fleet: Fleet, moves: tuple[Move, ...], now: float) -> Fleet:
    """The movers have arrived; `now` is the next time that somebody asks."""
    movers = {one.peer for one in moves}
    members = tuple(one for one in fleet.members if one.peer not in movers)
    members += tuple(Member(one.peer, one.stage) for one in moves)
    return msgspec.structs.replace(fleet, members=members, recent=(*fleet.recent, *moves), now=now)


def test_every_thin_stage_gets_a_peer_at_once() -> None:
    moves = rebalance(a_fleet(4, 4, 1, 1, 4, 2))
    assert sorted(one.stage for one in moves) == [2, 3, 5]
    assert sorted(one.source for one in moves) == [0, 1, 4]
    assert "gain 2.00x, cost 60 s of" in moves[0].reason and moves[0].reason.startswith(f"move {moves[0].peer} ")


def test_where_lines_are_full_the_stages_between_the_ends_get_the_peers() -> None:
    """A microbatch crosses both ends of a stage in the middle: a line that carries two tensors a second passes one there, two elsewhere."""
    narrow = {f"p{i}": 2.0 for i in range(8)}
    fleet = a_fleet(3, 3, 2, seconds=(0.25, 0.25, 0.25))
    assert rebalance(fleet) == (), "as far as their compute goes"
    (move,) = rebalance(msgspec.structs.replace(fleet, lines=narrow))
    assert (move.source, move.stage) == (0, 1) and "stage 1 serves 3.00, stage 0 6.00" in move.reason
    assert rebalance(after(msgspec.structs.replace(fleet, lines=narrow), (move,), MOVE_S)) == ()
    wide = dict.fromkeys(narrow, 8.0)
    assert rebalance(msgspec.structs.replace(fleet, lines=wide)) == (), "they carry what is computed"
    members = a_fleet(2, 3, 2).members
    assert place(members, 3, (0.25, 0.25, 0.25))[0] == 0
    assert place(members, 3, (0.25, 0.25, 0.25), {}, narrow)[0] == 1


def test_the_peer_with_the_wider_line_moves_to_where_lines_are_full() -> None:
    fleet = a_fleet(3, 1, 3, seconds=(0.25, 0.25, 0.25), lines={f"p{i}": 8.0 if i == 1 else 2.0 for i in range(7)})
    assert [one.peer for one in rebalance(fleet)] == ["p1"]


def test_an_even_pipeline_stays() -> None:
    assert rebalance(a_fleet(3, 3, 2, 3)) == ()
    assert rebalance(a_fleet(1, 1, 1)) == ()


def test_a_stage_is_helped_before_its_only_replica_dies() -> None:
    """Nothing gains now: stage 2 stays the bottleneck. But stage 0 has two to spare, and stage 1 none."""
    moves = rebalance(a_fleet(4, 1, 1))
    assert ways(moves) == [(0, 1)]
    assert ways(rebalance(a_fleet(3, 1, 1, 1, 2, 2, 2))) == [(0, 1)]


def test_the_last_replica_stays_even_for_an_empty_stage() -> None:
    assert rebalance(a_fleet(1, 1, 0)) == ()
    assert ways(rebalance(a_fleet(1, 2, 0))) == [(1, 2)]


def test_a_mover_that_downloads_serves_nobody_and_leaves_no_last_replica_behind() -> None:
    """Stage 0 has one that serves and two that download: nobody may go, however thick it looks."""
    loading = (Member("x", 0), Member("y", 0))
    assert rebalance(a_fleet(1, 1, 0, loading=loading)) == ()


def test_who_downloads_counts_at_its_stage() -> None:
    assert rebalance(a_fleet(3, 1)) != ()
    assert rebalance(a_fleet(3, 1, loading=(Member("x", 1),))) == ()


def test_a_stage_serves_no_more_downloads_than_it_has_replicas() -> None:
    assert len(rebalance(a_fleet(9, 9, 1))) == 1
    assert len(rebalance(a_fleet(9, 9, 2))) == 2
    assert rebalance(a_fleet(9, 9, 1, loading=(Member("x", 2),))) == ()


def test_at_most_a_quarter_moves_at_once() -> None:
    fleet = a_fleet(9, 9, 9, 9, 1, 1, 1, 1)
    moves = rebalance(fleet)
    assert len(moves) == 4
    fleet = a_fleet(4, 4, 1, 1)
    assert len(rebalance(fleet)) == 2
    movers = tuple(Move(f"x{i}", 0, 1, 0.0, "") for i in range(2))
    busy = msgspec.structs.replace(fleet, recent=movers, loading=tuple(Member(one.peer, 1) for one in movers))
    assert rebalance(busy) == ()


def test_a_pair_of_stages_sees_one_move_per_interval() -> None:
    fleet = a_fleet(9, 3)
    moves = rebalance(fleet)
    assert ways(moves) == [(0, 1)]
    assert rebalance(after(fleet, moves, now=MOVE_S - 1)) == ()
    assert ways(rebalance(after(fleet, moves, now=MOVE_S + 1))) == [(0, 1)]


def test_nobody_goes_back_before_it_has_rested() -> None:
    fleet = a_fleet(4, 1, 2)
    moves = rebalance(fleet)
    assert ways(moves) == [(0, 1)]
    there = after(fleet, moves, now=2 * MOVE_S)
    turned = msgspec.structs.replace(there, seconds=(9.0, 1.0, 1.0))  # now it is stage 0 that needs somebody
    assert (1, 0) not in ways(rebalance(turned)) and all(one.peer != moves[0].peer for one in rebalance(turned))
    later = msgspec.structs.replace(turned, now=2.1 * REST_MOVES * MOVE_S)
    assert (1, 0) in ways(rebalance(later))


@pytest.mark.parametrize(("known", "rest_s"), [({"move_s": 2.0}, 10.0), ({"move_s": 2.0, "step_s": 30.0}, 90.0)])
def test_a_rest_takes_as_long_as_moves_and_steps_do(known: dict[str, float], rest_s: float) -> None:
    fleet = a_fleet(4, 1, 2, **known)
    moves = rebalance(fleet)
    turned = msgspec.structs.replace(after(fleet, moves, now=0.99 * rest_s), seconds=(9.0, 1.0, 1.0))
    assert "cost 2 s" in moves[0].reason
    assert (1, 0) not in ways(rebalance(turned))
    assert (1, 0) in ways(rebalance(msgspec.structs.replace(turned, now=2.01 * rest_s)))


def test_rests_end_at_different_times() -> None:
    fleet = a_fleet(8, 8, 2, 2)
    moves = rebalance(fleet)
    assert len(moves) == 4
    there = after(fleet, moves, now=0.0)

    def tired(now: float) -> int:
        turned = msgspec.structs.replace(there, members=tuple(Member(m.peer, 0) for m in there.members), now=now)
        return len({m.peer for m in moves} - {m.peer for m in turned.members if _may_go(turned, m.peer)})

    counts = [tired(REST_MOVES * MOVE_S * share) for share in (0.99, 1.2, 1.4, 1.6, 1.8, 2.01)]
    assert counts[0] == 4 and counts[-1] == 0 and len(set(counts)) > 2


def test_nobody_rests_while_a_stage_passes_far_less_than_it_could() -> None:
    """As after an emergency: the only stage that could spare anybody just had a peer from there."""
    fleet = a_fleet(5, 3, 4, recent=(Move("p0", 1, 0, 0.0, ""),))
    for rests_until in (MOVE_S + 1, REST_MOVES * MOVE_S - 1):
        there = msgspec.structs.replace(fleet, now=rests_until)
        assert rebalance(there) == (), "four for three is no more than rates differ by"
        thin = tuple(one for one in there.members if one.peer not in ("p6", "p7"))
        assert ways(rebalance(msgspec.structs.replace(there, members=thin))) == [(0, 1)]
    making = msgspec.structs.replace(there, members=thin, now=MOVE_S - 1)
    assert (0, 1) not in ways(rebalance(making)), "a move between the two is being made"


def _may_go(fleet: Fleet, peer: str) -> bool:
    """Would it go if it were its stage's newest, and fast?"""
    others = tuple(one for one in fleet.members if one.peer != peer)
    thin = [Member(f"{name}{at}", stage) for stage, name in enumerate("qrs", 1) for at in range(3)]
    asked = msgspec.structs.replace(fleet, members=(*others, Member(peer, 0), *thin))
    return any(one.peer == peer for one in rebalance(asked))


def test_an_empty_stage_waits_for_no_interval() -> None:
    fleet = a_fleet(4, 2)
    moves = rebalance(fleet)
    there = after(fleet, moves, now=1.0)
    lost = msgspec.structs.replace(there, members=tuple(one for one in there.members if one.stage == 0))
    assert ways(rebalance(lost)) == [(0, 1)]
    assert "nobody serves it now" in rebalance(lost)[0].reason


def test_a_move_must_pay_in_what_is_left_of_the_run() -> None:
    assert rebalance(a_fleet(4, 1, left_s=2.1 * MOVE_S)) != ()
    assert rebalance(a_fleet(4, 1, left_s=1.9 * MOVE_S)) == ()
    assert rebalance(a_fleet(9, 1, left_s=1.5 * MOVE_S, seconds=(3.0, 1.0))) != (), "it does more where it goes"


def test_speeds_count_not_heads() -> None:
    """Two fast ones outweigh four slow ones."""
    speeds = {"p0": 4.0, "p1": 4.0, "p2": 1.0, "p3": 1.0, "p4": 1.0, "p5": 1.0}
    assert rebalance(a_fleet(2, 4)) != () or rebalance(a_fleet(4, 2)) != ()
    assert rebalance(a_fleet(2, 4, speeds=speeds)) == (), "one of two fast ones is half of the stage"
    speeds["p1"] = 2.5
    fleet = a_fleet(3, 2, speeds={"p0": 4.0, "p1": 1.0, "p2": 1.0})
    (one,) = rebalance(fleet)
    assert (one.peer, one.stage) == ("p2", 1), "a slow one is enough; of two the newest"


def test_a_joiner_goes_where_the_speeds_are_least() -> None:
    members = (Member("a", 0), Member("b", 1), Member("c", 1))
    assert place(members, 2)[0] == 0
    assert place(members, 2, speeds={"a": 4.0})[0] == 1


def test_in_the_middle_of_a_step_only_the_bottleneck_is_helped() -> None:
    assert ways(rebalance(a_fleet(6, 1, 6, 6, passed=0.5)))[0][1] == 1
    assert rebalance(a_fleet(4, 1, 1, passed=0.5)) == (), "it would gain nothing before somebody dies"
    assert rebalance(a_fleet(4, 1, 1)) != ()


def test_rates_tell_peers_within_a_stage_and_stages_from_each_other() -> None:
    members = a_fleet(2, 2).members
    rates = {"p0": 2.0, "p1": 2.0, "p2": 1.0, "p3": 1.0}
    assert measure(members, rates, 2) == ((0.5, 1.0), dict.fromkeys(rates, 1.0))
    seconds, speeds = measure(members, rates, 2, planned=(1.0, 1.0))
    assert seconds[0] == seconds[1] and speeds["p0"] == 2 * speeds["p2"], "with a plan it is the peers that differ"
    power = [sum(speeds[m.peer] / seconds[s] for m in members if m.stage == s) for s in range(2)]
    assert power == [4.0, 2.0], "in microbatches per second, whoever is credited"
    assert measure(members, {}, 2, planned=(1.0, 3.0)) == ((1.0, 3.0), {})
    slow = measure(members, {"p0": 1.0, "p1": 1.0, "p2": 1.0, "p3": 1e-9}, 2)[1]
    assert min(slow.values()) > 0


counts_st = st.lists(st.integers(0, 9), min_size=2, max_size=6).filter(any)


@settings(max_examples=40, deadline=None)
@given(counts_st, st.data())
def test_moves_keep_every_bound_and_end(counts: list[int], data: st.DataObject) -> None:
    stages = len(counts)
    one_speed = st.floats(0.2, 5.0)
    fleet = a_fleet(*counts)
    speeds = {one.peer: data.draw(one_speed) for one in fleet.members} if data.draw(st.booleans()) else {}
    seconds = tuple(data.draw(st.floats(0.5, 2.0)) for _ in range(stages)) if data.draw(st.booleans()) else ()
    fleet = msgspec.structs.replace(fleet, speeds=speeds, seconds=seconds)
    members, total = len(fleet.members), 0
    for turn in range(10 * members + 10):
        moves = rebalance(fleet)
        if not moves and turn and fleet.now > 20 * REST_MOVES * MOVE_S:
            break
        total += len(moves)
        assert len(set(ways(moves))) == len(moves), "one per pair of stages"
        assert len({one.peer for one in moves}) == len(moves)
        assert len(moves) <= max(1, members // 4)
        served = {one.stage for one in fleet.members}
        fleet = after(fleet, moves, now=fleet.now + 1.5 * MOVE_S)
        assert {one.stage for one in fleet.members} >= served, "a stage is emptied"
    assert total <= 3 * members, "peers wander"


@given(
    st.lists(st.integers(1, 6), min_size=2, max_size=5),
    st.lists(st.tuples(st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([3.0, 8.0])), min_size=30, max_size=30),
    st.lists(st.integers(0, 29), max_size=4),
)
def test_of_members_that_are_alike_the_last_is_as_good_as_any(
    counts: list[int], kinds: list[tuple[float, float]], moved: list[int]
) -> None:
    """Places break ties."""
    recent = tuple(Move(f"p{i}", 1, 0, 0.0, "") for i in moved)
    known: dict[str, Any] = {"seconds": tuple(0.1 + 0.1 * s for s in range(len(counts))), "recent": recent, "now": 90.0}
    alike = a_fleet(
        *counts,
        speeds={f"p{i}": speed for i, (speed, _) in enumerate(kinds)},
        lines={f"p{i}": line for i, (_, line) in enumerate(kinds)},
        **known,
    )
    with mock.patch.object(_Plan, "unlike", lambda self, stage: tuple(enumerate(self.groups[stage]))):
        wanted = rebalance(alike)
    assert rebalance(alike) == wanted

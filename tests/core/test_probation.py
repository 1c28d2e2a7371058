"""New keys get a bounded share of each stage: who is on probation, what such peers own, and what they are sent."""

from __future__ import annotations

from collections import Counter
from random import Random

import msgspec
import pytest
from tests.core.test_evicting import LONG, a_run, commit
from tests.core.test_routing import SETTINGS

from shoal.core.leader.membership import inherit, newcomers, on_probation, owned, owners_of
from shoal.core.messages import Member, Newcomer, Phase, View
from shoal.core.trainer.routing import Routes

PROBATION = msgspec.structs.replace(LONG, probation=3, steps=99)
LONGER = msgspec.structs.replace(PROBATION, probation=6)
OLD = (Member("a", 0), Member("b", 0))
SYBILS = ("x", "y", "z")


def routes(old: tuple[str, ...] = ("a", "b"), new: tuple[str, ...] = SYBILS) -> Routes:
    wiring = Routes(SETTINGS, Random(0))
    wiring.on_view(tuple(Member(peer, 0) for peer in (*old, *new)), 0.0, set(new))
    return wiring


def served(wiring: Routes, count: int = 48) -> Counter[str]:
    """Who is chosen for so many microbatches that are answered at once."""
    chosen: Counter[str] = Counter()
    for index in range(count):
        choice = wiring.choose(0, 0.0, index=index)
        assert choice is not None
        chosen[choice[0]] += 1
        wiring.answered(
            choice[0], 0.001 if choice[0] in SYBILS else 1.0, 1.0, 0.0
        )  # they answer so soon that all would go there
    return chosen


def test_three_sybils_get_a_third_of_a_stage_however_soon_they_answer() -> None:
    chosen = served(routes())
    assert sum(chosen[peer] for peer in SYBILS) == 16
    assert min(chosen[peer] for peer in ("a", "b")) >= 12
    free = Routes(SETTINGS, Random(0))
    free.on_view(tuple(Member(peer, 0) for peer in ("a", "b", *SYBILS)), 0.0)
    taken = served(free)
    assert sum(taken[peer] for peer in SYBILS) > 40, "without probation they get nearly all"


def test_one_newcomer_among_many_gets_about_its_even_share() -> None:
    wiring = routes(tuple("abcdefgh"), ("new",))
    assert 8 <= served(wiring, 90)["new"] <= 12


def test_a_stage_that_only_newcomers_serve_is_served_by_them() -> None:
    assert sum(served(routes(())).values()) == 48


def test_a_newcomer_steps_in_where_the_others_fail_and_waits_where_they_are_busy() -> None:
    wiring = routes(("a",), ("x",))
    wiring.busy("a", 5.0, 1.0, 0.0)
    assert wiring.choose(0, 0.0, index=1) is None and wiring.wake(0) is not None
    wiring = routes(("a",), ("x",))
    wiring.failed("a", 0.0)
    assert wiring.choose(0, 0.0, index=1) == ("x", "expected to answer first")
    assert routes(("a",), ("x",)).choose(0, 0.0, avoid="a", index=1) == ("x", "expected to answer first")


def test_whoever_owns_chooses_who_serves_so_that_newcomers_own_nothing() -> None:
    members = (*OLD, *(Member(peer, 0) for peer in SYBILS))
    assert set(owned(members, 12, (), SYBILS, PROBATION)) == {0, 1}
    assert set(owned(members[2:], 12, (), SYBILS, PROBATION)) == {0, 1, 2}
    home = owned(members, 12, (), SYBILS, msgspec.structs.replace(PROBATION, home=True))
    assert sum(at >= 2 for at in home) == 4
    assert owners_of((*OLD, Member("c", 0), Member("x", 0)), 8, few=("x",)) == (0, 1, 2, 3) * 2
    view = View(1, 3, members, owners=(0, 1, 0, 1), newcomers=tuple(Newcomer(key, 1) for key in SYBILS))
    assert inherit(view, members[1:], {0, 1, 2, 3}) == (0, 0, 0, 0)


def test_a_key_is_new_for_some_steps_and_whoever_founded_the_run_never_is() -> None:
    leader = a_run("bc", probation=3)
    assert not leader.view.newcomers
    for peer in ("d", "k1.1.inv.8", "e"):
        leader.join(peer)
    commit(leader)
    assert {one.key for one in leader.view.newcomers} == {"d", "k1", "e"}
    for peer in ("d", "k1.1.inv.8", "e"):
        leader.heartbeat(peer, number=leader.view.number)
    commit(leader)
    assert {"d", "k1.1.inv.8", "e"} == on_probation(leader.view) <= {one.peer for one in leader.view.members}
    assert {leader.view.members[at].peer for at in leader.view.owners} == {"a", "b", "c"}
    for _ in range(3):
        for member in leader.view.members:
            leader.heartbeat(member.peer)
        commit(leader)
    assert not leader.view.newcomers
    assert {leader.view.members[at].peer for at in leader.view.owners} > {"a", "b", "c"}


@pytest.mark.parametrize(("peer", "new"), [("k.1.guest.8", True), ("k.1.founder.8", False)])
def test_peers_of_the_founders_machine_are_not_on_probation(peer: str, new: bool) -> None:
    before = View(4, 7, OLD, phase=Phase.TRAINING, founder="founder")
    after = msgspec.structs.replace(before, number=5, joining=(Member(peer, 0),))
    assert bool(newcomers(before, after, PROBATION)) == new


def test_its_steps_count_from_when_it_serves_and_going_back_does_not_end_it() -> None:
    joining = View(4, 7, OLD, joining=(Member("x", 0),), phase=Phase.TRAINING, newcomers=(Newcomer("x", 5),))
    later = msgspec.structs.replace(joining, number=5, step=9)
    assert newcomers(joining, later, LONGER) == (Newcomer("x", 9),), "it downloads still"
    member = msgspec.structs.replace(later, members=(*OLD, Member("x", 0)), joining=())
    assert newcomers(later, member, LONGER) == (Newcomer("x", 5),)
    back = msgspec.structs.replace(member, step=2, epoch=1)
    assert newcomers(msgspec.structs.replace(member, newcomers=(Newcomer("x", 8),)), back, LONGER) == (
        Newcomer("x", 2),
    )

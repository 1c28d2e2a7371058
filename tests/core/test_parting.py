"""Two replicas that differ again: one of them changes places with a third peer, and nobody is evicted on one peer's word."""

from __future__ import annotations

from shoal.core.leader.evictions import DIFFERS, TIES, Conduct
from shoal.core.leader.rules.parting import part
from shoal.core.messages import Member, Phase, View

MEMBERS = (Member("a", 0), Member("b", 0), Member("c", 1), Member("d", 1), Member("e", 2), Member("f", 2, since=3))
VIEW = View(number=5, step=3, members=MEMBERS, owners=(), phase=Phase.TRAINING, since=4)


def places(view: View = VIEW, leader: str = "a", evicted: tuple[str, ...] = ()) -> list[tuple[str, int, int]]:
    moves = part(view, {"d": "its sums differ"}, evicted, leader, 7.0)
    return [(move.peer, move.source, move.stage) for move in moves]


def test_it_changes_places_with_the_newest_of_a_stage_that_keeps_another() -> None:
    assert places() == [("d", 1, 2), ("f", 2, 1)]
    (why, _) = part(VIEW, {"d": "its sums differ"}, (), "a", 7.0)
    assert why.reason == "d parts from its stage's other: its sums differ, and downloads the state of stage 2"


def test_neither_the_leader_nor_a_stages_last_replica_nor_whoever_is_evicted_moves() -> None:
    few = (*VIEW.members[:4], Member("f", 2, since=3))
    alone = View(number=5, step=3, members=few, owners=(), phase=Phase.TRAINING, since=4)
    assert places(alone) == [("d", 1, 0), ("b", 0, 1)]
    assert places(alone, leader="b") == [("d", 1, 0), ("a", 0, 1)]
    assert places(alone, evicted=("b",)) == [], "nobody could come without leaving a stage empty"


def test_whoever_differs_with_one_alone_is_undecided_until_it_has_differed_with_another_or_too_often() -> None:
    conduct = Conduct()
    conduct.right({"1": ["liar"], "2": ["a"]}, "z")
    verdicts = [conduct.differs("a", "differs", tie=True) for _ in range(TIES)]
    assert verdicts[-1] is not None and conduct.undecided("a")
    conduct.right({"1": ["liar"], "2": ["b"]}, "z")
    assert not conduct.undecided("liar"), "it stayed, and differs with who took the other's place"
    for _ in range(TIES, DIFFERS):
        conduct.differs("a", "differs")
    assert not conduct.undecided("a"), "it went, and differs from those that it met"

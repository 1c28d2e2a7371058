"""Chunks of a group's gradient, and which rounds a replica refuses."""

from __future__ import annotations

from itertools import count, pairwise

import msgspec
import pytest
from tests.rounds import Group

from shoal.core.allreduce.layout import fenced, objection, split
from shoal.core.messages import GatherChunk, Member, ReduceChunk, Round, Share, View, Withdraw

MEMBERS = (Member("a", 0), Member("b", 0), Member("c", 1))


def a_view(members: tuple[Member, ...] = MEMBERS, joining: tuple[Member, ...] = ()) -> View:
    return View(number=5, step=3, members=members, joining=joining, owners=(0, 1, 2, 0))


def a_round(*groups: tuple[Share, ...]) -> Round:
    return Round(epoch=0, step=3, round=7, view=5, groups=groups)


COUNT = 4
WHOLE = (Share("c", (0, 1, 2, 3)),)


@pytest.mark.parametrize(
    ("length", "peers", "bounds"),
    [
        (10, 1, (0, 10)),
        (10, 3, (0, 4, 7, 10)),
        (12, 4, (0, 3, 6, 9, 12)),
        (2, 3, (0, 1, 2)),
        (0, 2, (0, 0)),
    ],
)
def test_chunks_are_as_even_as_whole_values_allow(length: int, peers: int, bounds: tuple[int, ...]) -> None:
    chunks = split(length, "abcd"[:peers])

    assert chunks.bounds == bounds
    assert chunks.owners == tuple("abcd"[: len(bounds) - 1])


def test_chunks_cover_every_value_once_and_differ_by_at_most_one() -> None:
    for length in range(1, 40):
        for peers in range(1, 9):
            bounds = split(length, [f"p{i}" for i in range(peers)]).bounds
            sizes = [after - before for before, after in pairwise(bounds)]
            assert bounds[0] == 0 and bounds[-1] == length
            assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1


def test_pieces_cover_every_value_once_within_their_size_and_number_their_chunks_through() -> None:
    for length in range(1, 40):
        for group in ("a", "ab", "abcd"):
            for most in (1, 3, 8, 100):
                at, number, chunks = 0, 0, split(length, group, most)
                for piece in count():
                    chunks = split(length, group, most, piece)
                    assert chunks.bounds[0] == at and chunks.first == piece * len(group)
                    assert [list(chunks.role(peer).adds) for peer in chunks.owners] == [[c] for c in chunks.numbers]
                    at, number = chunks.bounds[-1], number + 1
                    assert 1 <= at - chunks.bounds[0] <= max(most, len(group))
                    if chunks.last:
                        break
                assert at == length


def test_a_replica_beyond_the_last_value_owns_no_chunk() -> None:
    chunks = split(1, ["a", "b"])

    assert (chunks.role("a").adds, chunks.role("b").adds) == ({0: ("a", "b")}, {})


def test_a_round_whose_books_are_disjoint_and_whole_is_taken_part_in() -> None:
    message = a_round((Share("a", (2, 0)), Share("b", (1, 3))), WHOLE)

    assert objection(message, a_view(), Share("a", (2, 0)), COUNT) == ""


def test_a_ready_joiner_that_brings_nothing_takes_part() -> None:
    view = a_view(joining=(Member("d", 0),))
    message = a_round((Share("a", (2, 0)), Share("b", (1, 3)), Share("d", ())), WHOLE)

    assert objection(message, view, Share("d", ()), COUNT) == ""


def test_a_member_made_a_joiner_brings_nothing_any_more() -> None:
    view = a_view(members=(Member("a", 0), Member("c", 1)), joining=(Member("b", 0),))
    message = a_round((Share("a", (2, 0)), Share("b", (1, 3))), WHOLE)

    assert fenced(message, view) == "b"


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ((Share("a", (0, 2)), Share("b", (1, 3))), "lists [0, 2] for me, I booked [2, 0]"),
        ((Share("a", (2, 0)), Share("b", (1, 0, 3))), "[0] are brought twice"),
        ((Share("a", (2, 0)), Share("b", (1,))), "[3] are brought by nobody"),
        ((Share("a", (2, 0)), Share("b", (1, 3, 4))), "only 4 microbatches exist"),
        ((Share("a", (2, 0)), Share("a", (1, 3))), "listed twice"),
        ((Share("a", (2, 0)), Share("x", (1, 3))), "x is listed, but view 5"),
        ((Share("a", (2, 0)), Share("c", (1, 3))), "c is listed, but view 5"),
    ],
)
def test_a_round_that_would_count_wrongly_is_refused_in_words(group: tuple[Share, ...], words: str) -> None:
    assert words in objection(a_round(group, WHOLE), a_view(), Share("a", (2, 0)), COUNT)


def test_a_hole_in_another_stages_books_is_seen_too() -> None:
    message = a_round((Share("a", (2, 0)), Share("b", (1, 3))), (Share("c", (0, 1)),))

    assert objection(message, a_view(), Share("a", (2, 0)), COUNT).startswith("stage 1:")


@pytest.mark.parametrize("ends", ["a newer one", "it fails", "a replica leaves"])
def test_what_waits_of_a_round_that_is_void_need_not_be_sent(ends: str) -> None:
    play = Group(("a", "b", "c"), 12)
    play.begin("a")
    rounds, without_c = play.rounds["a"], msgspec.structs.replace(play.view, number=6, members=play.view.members[:2])
    match ends:
        case "a newer one":
            commands = rounds.begin(play.a_round(8), play.shares["a"], 0.0)
        case "it fails":
            commands = rounds.fail(play.a_round(), "why")
        case _:
            commands = rounds.on_view(without_c)
    assert [one for one in commands if isinstance(one, Withdraw)] == [Withdraw(0, 3, 7)]


def test_of_a_round_that_is_committed_only_joiners_get_what_waits() -> None:
    play = Group(("a", "b", "c"), 12)
    play.begin("a")
    (withdrawn,) = (one for one in play.rounds["a"].turn() if isinstance(one, Withdraw))
    assert withdrawn.voids("b", ReduceChunk(0, 3, 7, 1)) and withdrawn.voids("b", GatherChunk(0, 3, 7, 1, again=True))
    assert not withdrawn.voids("b", GatherChunk(0, 3, 7, 1, to_joiner=True))
    assert not withdrawn.voids("b", GatherChunk(0, 4, 1, 1)) and not withdrawn.voids("b", GatherChunk(0, 3, 8, 1))

"""Slices of a large piece among even owners: sums are sent while parts still arrive, and rounds of them add up everything once."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tests.rounds import Group, Symbols, held

from shoal.core.allreduce import layout
from shoal.core.allreduce.layout import ONE_ROW, SLICE_VALUES, SLICES, split
from shoal.core.messages import GatherChunk, Peer, ReduceChunk, Resend


def names(count: int) -> tuple[Peer, ...]:
    return tuple(f"p{number:02}" for number in range(count))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "SLICE_VALUES", 10)


@pytest.mark.parametrize("replicas", [2, 6, ONE_ROW])
def test_large_pieces_are_sliced_as_far_as_chunks_stay_a_fragment(replicas: int) -> None:
    for slices in (1, 3, SLICES):
        length = slices * replicas * SLICE_VALUES
        for values in (length, length + replicas * SLICE_VALUES - 1):
            whole = split(values, names(replicas))
            assert whole.slices == min(SLICES, slices) and not whole.weighted
            assert whole.bounds[0] == 0 and whole.bounds[-1] == values
            assert min(high - low for low, high in pairwise(whole.bounds)) >= SLICE_VALUES - 1
            assert whole.owners == names(replicas) * whole.slices, "evenly"


def test_one_replica_and_groups_in_rows_have_no_slices() -> None:
    for replicas in (1, ONE_ROW + 1):
        assert split(100 * replicas * SLICE_VALUES, names(replicas)).slices == 1


def test_all_pieces_have_as_many_numbers() -> None:
    """Chunk numbers say which piece they belong to."""
    group, most = names(4), 3 * 4 * SLICE_VALUES
    pieces = [split(8 * most + 5, group, most, number) for number in range(9)]
    assert len({piece.stride for piece in pieces}) == 1 and pieces[-1].last
    for number, piece in enumerate(pieces):
        assert {chunk // piece.stride for chunk in piece.numbers} == {number}


@pytest.mark.usefixtures("small")
def test_a_sum_does_not_wait_for_the_parts_of_later_slices() -> None:
    play = Group(names(3), 240)
    play.lost = lambda _, __, message: isinstance(message, ReduceChunk) and message.chunk // 3 == SLICES - 1
    play.begin()
    play.run(until=lambda: not any(play._lines.values()) and not any(play._doing.values()))
    sums = {message.chunk for _, _, message in play.sent if isinstance(message, GatherChunk)}
    assert sums == set(range(3 * (SLICES - 1))), "of all slices but the last"


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("piece_values", [0, 160])
@pytest.mark.parametrize("loss", [0.0, 0.2])
@pytest.mark.parametrize("replicas", [2, 3, 5])
def test_every_replica_is_added_once_to_each_slice(replicas: int, loss: float, piece_values: int) -> None:
    group = names(replicas)
    play = Group(group, 900, piece_values, seed=replicas)
    play.lost = lambda *_: play.rng.random() < loss
    play.begin()
    play.run(until=lambda: len(play.reduced) == replicas)
    assert len({one.digest for one in play.reduced.values()}) == 1 and not play.failures
    for name in group:
        runner = play.runner[name]
        assert isinstance(runner, Symbols)
        assert all(added == tuple((peer,) for peer in group) for _, _, added in runner.gathered[7])
        assert loss or not any(isinstance(message, Resend) for _, _, message in play.sent)
    play.run()
    for name in group:
        play.carry(name, play.rounds[name].turn())
        assert held(play, name) == {}, "all is let go of"


@pytest.mark.usefixtures("small")
def test_parts_that_come_before_the_round_are_kept() -> None:
    group = names(4)
    play = Group(group, 2000, 500, seed=4)
    play.begin(*group[1:])
    play.run(until=lambda: not any(play._lines.values()) and not any(play._doing.values()))
    assert not play.reduced
    play.begin(group[0])
    play.run()
    assert set(play.reduced) == set(group)
    assert not any(isinstance(message, Resend) for _, _, message in play.sent)

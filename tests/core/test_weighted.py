"""Owners of unlike shares: what each line carries, and that rounds of them add up everything once."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from random import Random

import pytest
from tests.rounds import Group, Symbols, held

from shoal.core.allreduce.layout import ONE_ROW, SLICES, SPARED, Layout, early_parts, owned, split
from shoal.core.messages import (
    RANKS,
    Backward,
    BoundaryTensor,
    Chunk,
    Forward,
    GatherChunk,
    Peer,
    ReduceChunk,
    Resend,
    rank,
)


def names(count: int) -> tuple[Peer, ...]:
    return tuple(f"p{number:02}" for number in range(count))


def layouts(line_rates: tuple[int, ...], length: int, most: int = 0) -> list[Layout]:
    """Of all pieces."""
    group = names(len(line_rates))
    shares = [split(length, group, most, 0, line_rates)]
    while not shares[-1].last:
        shares.append(split(length, group, most, len(shares), line_rates))
    return shares


def busy_s(shares: list[float], line_rates: tuple[int, ...]) -> float:
    """Of the busiest line, each way, for a gradient of 1."""
    return max((1 + (len(line_rates) - 2) * share) / width for share, width in zip(shares, line_rates, strict=True))


def drawn(seed: int) -> tuple[int, ...]:
    rng = Random(seed)
    return tuple(int(12_500 * 10 ** rng.random()) for _ in range(rng.randint(3, ONE_ROW)))


UNLIKE = [line_rates for line_rates in map(drawn, range(60)) if owned(line_rates)]


def test_most_fleets_of_100_to_1000_megabit_gain_by_it() -> None:
    assert len(UNLIKE) > 45


@pytest.mark.parametrize("line_rates", UNLIKE)
def test_the_busiest_line_is_as_little_busy_as_any_shares_make_it(line_rates: tuple[int, ...]) -> None:
    """The busiest line's time is a convex function of the shares: who cannot gain by giving some to one other cannot gain at all."""
    owned_chunks = owned(line_rates)
    shares = [share / sum(owned_chunks) for share in owned_chunks]
    best_s = busy_s(shares, line_rates)
    assert best_s <= SPARED * busy_s([1 / len(line_rates)] * len(line_rates), line_rates)
    for giver in range(len(line_rates)):
        for taker in range(len(line_rates)):
            moved = list(shares)
            moved[giver] -= 1e-6
            moved[taker] += 1e-6
            if moved[giver] >= 0 and giver != taker:
                assert busy_s(moved, line_rates) >= best_s * (1 - 1e-12)


@pytest.mark.parametrize("line_rates", [(), (0, 0, 0), (5, 5, 5, 5), (100, 104, 97), (1, 9), (1, *[9] * ONE_ROW)])
def test_like_or_unknown_lines_pairs_and_groups_in_rows_stay_even(line_rates: tuple[int, ...]) -> None:
    group = names(max(2, len(line_rates)))
    assert owned(line_rates) == () and split(1000, group, 300, 1, line_rates) == split(1000, group, 300, 1)


def test_a_line_that_is_not_known_is_taken_for_the_narrowest() -> None:
    assert owned((0, 400, 100, 400)) == owned((100, 400, 100, 400)) == (0, 800, 0, 800)


@pytest.mark.parametrize("line_rates", [(100, 400, 50, 400), (25, 25, 25, 100), *UNLIKE[:8]])
@pytest.mark.parametrize(("length", "most"), [(1, 0), (7, 0), (20_007, 0), (20_007, 3000)])
def test_chunks_cover_the_gradient_once_and_each_owner_has_its_share_of_every_slice(
    line_rates: tuple[int, ...], length: int, most: int
) -> None:
    at, group, shares, used = 0, names(len(line_rates)), owned(line_rates), set[int]()
    for layout in layouts(line_rates, length, most):
        assert layout.bounds[0] == at and list(layout.bounds) == sorted(set(layout.bounds))
        at, size = layout.bounds[-1], layout.bounds[-1] - layout.bounds[0]
        values = Counter[Peer]()
        for owner, (low, high) in zip(layout.owners, pairwise(layout.bounds), strict=True):
            values[owner] += high - low
        for peer, share in zip(group, shares, strict=True):
            assert values[peer] == pytest.approx(size * share / sum(shares), abs=SLICES)
            place = layout.role(peer)
            mine = [number for number, owner in zip(layout.numbers, layout.owners, strict=True) if owner == peer]
            assert place.adds == dict.fromkeys(mine, group) and set(place.sends) == set(place.receives)
            assert len(mine) <= early_parts(len(group))
            assert set(place.broadcasts) == set(mine) and all(
                len(to) == len(group) - 1 for to in place.broadcasts.values()
            )
            if most:
                assert (len(group) - 1) * values[peer] <= most + len(group) * SLICES, (
                    "the parts that an even owner holds"
                )
        assert not used & set(layout.numbers) and {number // layout.stride for number in layout.numbers} == {
            layout.first // layout.stride
        }
        used |= set(layout.numbers)
    assert at == length


def test_slices_go_one_after_the_other_and_within_one_the_next_owner_first() -> None:
    line_rates = (400, 400, 400, 50)
    layout = split(8000, names(4), 0, 0, line_rates)
    orders = [list(layout.role(peer).sends.values()) for peer in names(4)]
    assert orders[0] == ["p01", "p02", "p00"] * SLICES and orders[1] == ["p02", "p00", "p01"] * SLICES
    assert orders[3] == ["p00", "p01", "p02"] * SLICES
    for peer in names(4):
        numbers = list(layout.role(peer).sends)
        assert [number // 3 for number in numbers] == sorted(number // 3 for number in numbers)


def test_sums_of_slices_go_before_parts_and_both_before_a_joiners_state() -> None:
    """Those of even owners do not: a narrow line that takes sums first has the parts for its own sum last, for which all others wait."""
    first = GatherChunk(0, 0, 0, 0, first=True)
    ranks = [
        rank(message)
        for message in (
            Forward(0, 0, 0, 0, 0, 0),
            BoundaryTensor(0, 0, 0, 0, True),
            first,
            ReduceChunk(0, 0, 0, 0),
            Chunk(0, 0, 0, 0),
            Chunk(0, 0, 0, 0, shard="a checkpoint's"),
        )
    ]
    assert ranks == sorted(set(ranks)) and ranks[-1] == RANKS - 1
    assert rank(Backward(0, 0, 0, 0, 0, 0)) == ranks[0], "the tokens that a first stage computes with are small"
    assert rank(GatherChunk(0, 0, 0, 0)) == rank(ReduceChunk(0, 0, 0, 0))
    for line_rates, owners in (((), 4), ((100, 400, 50, 400), 2 * SLICES)):
        play = Group(names(4), 2000, line_rates=line_rates)
        play.begin()
        play.run()
        sums = [message for _, _, message in play.sent if isinstance(message, GatherChunk)]
        assert len(sums) == 3 * owners and all(message.first is bool(line_rates) for message in sums)


# -------------------------------------------------------------------------------------------------------- whole rounds


def whole(play: Group) -> None:
    """Everybody has gathered the same, each chunk added up in the listed order."""
    assert set(play.reduced) == set(play.names) and not play.failures
    assert len({one.digest for one in play.reduced.values()}) == 1
    for name in play.names:
        runner = play.runner[name]
        assert isinstance(runner, Symbols)
        assert all(held == tuple((peer,) for peer in play.names) for _, _, held in runner.gathered[7])


@pytest.mark.parametrize("piece_values", [0, 700])
@pytest.mark.parametrize("line_rates", [(100, 400, 50, 400), (25, 25, 25, 100), *UNLIKE[:4]])
def test_every_replica_is_added_once_and_nothing_is_asked_for_twice(
    line_rates: tuple[int, ...], piece_values: int
) -> None:
    group = names(len(line_rates))
    play = Group(group, 2000, piece_values, seed=len(line_rates), line_rates=line_rates)
    play.begin()
    play.run()
    whole(play)
    assert not any(isinstance(message, Resend) for _, _, message in play.sent)
    for name in group:
        play.carry(name, play.rounds[name].turn())
        assert held(play, name) == {}, "all is let go of"


def test_what_comes_before_its_round_or_its_piece_is_kept() -> None:
    """One that is to add up parts hears of the round when all the others wait for it. Nobody has to ask for anything again."""
    group = names(5)
    late = group[1]
    play = Group(group, 2000, 500, seed=4, line_rates=(100, 900, 50, 400, 400))
    play.begin(*(peer for peer in group if peer != late))
    play.run(until=lambda: not any(play._lines.values()) and not any(play._doing.values()))
    assert not play.reduced
    play.begin(late)
    play.run()
    whole(play)
    assert not any(isinstance(message, Resend) for _, _, message in play.sent)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_lost_is_asked_for_and_comes(seed: int) -> None:
    group = names(4 + seed)
    play = Group(group, 1500, 600, seed=seed, line_rates=(100, 900, 50, 400, 400, 100, 300)[: len(group)])
    play.lost = lambda *_: play.rng.random() < 0.2
    play.begin()
    play.run(until=lambda: len(play.reduced) == len(group))
    assert any(isinstance(message, Resend) for _, _, message in play.sent)
    whole(play)


def test_listeners_hear_every_chunk_once_from_its_owner() -> None:
    group, joiners, line_rates = names(4), ("p03.1", "p09.1"), (100, 400, 50, 400)
    play = Group(group, 2000, 700, joiners, line_rates=line_rates)
    play.begin()
    play.run()
    whole(play)
    wanted = Counter[tuple[Peer, Peer, int]]()
    for layout in layouts(line_rates, 2000, 700):
        wanted.update((teller, one, number) for one in joiners for number, teller in layout.receives(one).items())
    assert Counter((source, target, message.chunk) for source, target, message in play.heard) == wanted

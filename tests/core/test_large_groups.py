"""Groups that stand in rows: who adds what, that each replica counts once, and what becomes of what is lost or comes early."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from tests.rounds import Group, Symbols, held

from shoal.core.allreduce.layout import Layout, connections, early_parts, rows_of, split, stride
from shoal.core.messages import Add, AddRow, Cut, Gather, GatherChunk, Member, Peer, ReduceChunk, Resend, View

LENGTHS = ((1, 0), (40, 0), (1000, 400), (20_007, 0))  # of the gradient and its pieces


def names(count: int) -> tuple[Peer, ...]:
    return tuple(f"p{number:02}" for number in range(count))


def layouts(replicas: int, length: int, most: int = 0) -> list[Layout]:
    """Of all pieces."""
    layouts = [split(length, names(replicas), most)]
    while not layouts[-1].last:
        layouts.append(split(length, names(replicas), most, len(layouts)))
    return layouts


@pytest.mark.parametrize("replicas", range(17, 101))
def test_chunks_of_all_owners_cover_the_gradient_once_in_every_exchange(replicas: int) -> None:
    group = names(replicas)
    for length, most in LENGTHS:
        at = 0
        for layout in layouts(replicas, length, most):
            assert layout.bounds[0] == at and list(layout.bounds) == sorted(set(layout.bounds))
            at = layout.bounds[-1]
            spans = dict(zip(layout.numbers, pairwise(layout.bounds), strict=True))
            places = {peer: layout.role(peer) for peer in group}
            added = Counter(number for place in places.values() for number in place.adds if number in spans)
            assert added == Counter(layout.numbers), "every chunk of the group's sum is added up by one replica"
            for row in layout.rows:
                cuts = {places[peer].cuts for peer in row}
                assert len(cuts) == 1 and (cut := cuts.pop())[0] == layout.bounds[0] and cut[-1] == layout.bounds[-1]
                passed = [number for peer in row for number in sorted(places[peer].forwards)]
                assert passed == list(layout.numbers), "every row has its sum of everything, once"
                for peer in row:
                    place = places[peer]
                    held = [spans[number] for number in sorted(place.forwards)]
                    assert place.seams == tuple(dict.fromkeys(bound for span in held for bound in span))
                    inner = [number for number in place.adds if number not in spans]
                    assert [number for number, owner in place.sends.items() if owner == peer] == inner
                    if inner:
                        chunk = inner[0] - layout.inner
                        assert cut[chunk : chunk + 2] == (place.seams[0], place.seams[-1])
        assert at == length


@pytest.mark.parametrize("replicas", [*range(17, 41), 50, 63, 64, 99])
def test_what_one_brings_another_adds_and_what_one_tells_another_hears_of_it_alone(replicas: int) -> None:
    group = names(replicas)
    for length in (40, 20_007):
        layout = split(length, group)
        places = {peer: layout.role(peer) for peer in group}
        for peer, place in places.items():
            for number, owner in {**place.sends, **place.forwards}.items():
                assert peer in places[owner].adds[number]
            for number, bringers in place.adds.items():
                senders = [
                    places[one].sends if number not in place.receives else places[one].forwards for one in bringers
                ]
                assert all(one[number] == peer for one in senders)
            assert list(place.receives) == list(layout.numbers)
            for number, teller in place.receives.items():
                assert number in place.adds if teller == peer else peer in places[teller].broadcasts[number]
        receivers = Counter(
            (peer, number) for place in places.values() for number, to in place.broadcasts.items() for peer in to
        )
        wanted = Counter(
            (peer, n) for peer, place in places.items() for n, one in place.receives.items() if one != peer
        )
        assert receivers == wanted, "once each"


def neighbours(group: tuple[Peer, ...], length: int) -> dict[Peer, set[Peer]]:
    """Of every replica, those of its row, and those whose chunk of another row has values of its own: told from the rows alone."""
    spans, rows = dict[Peer, tuple[float, float]](), rows_of(group)
    for row in rows:
        size, longer = divmod(length, len(row))
        low = 0
        for number, peer in enumerate(row):
            high = low + size + (number < longer)
            spans[peer] = low, high
            low = high
    peers_of = {peer: set(row) - {peer} for row in rows for peer in row}
    for peer, (low, high) in spans.items():
        for other, (start, stop) in spans.items():
            if other != peer and max(low, start) < min(high, stop):
                peers_of[peer].add(other)
    return peers_of


@pytest.mark.parametrize("replicas", range(17, 101))
def test_nobody_meets_but_its_row_and_its_columns_and_bytes_are_those_of_the_bound(replicas: int) -> None:
    length, group = 1 << 40, names(replicas)
    layout, near = split(length, group), neighbours(group, length)
    spans = dict(zip(layout.numbers, pairwise(layout.bounds), strict=True))
    for peer in group:
        place = layout.role(peer)
        cuts = dict(zip(sorted(place.sends), pairwise(place.cuts), strict=True))
        sends = [(owner, *cuts[number]) for number, owner in place.sends.items() if owner != peer]
        sends += [(owner, *spans[number]) for number, owner in place.forwards.items() if owner != peer]
        sends += [(other, *spans[number]) for number, others in place.broadcasts.items() for other in others]
        assert {other for other, _, _ in sends} <= near[peer]
        assert len(near[peer]) <= connections(replicas)
        nbytes = sum(high - low for _, low, high in sends) / length
        assert nbytes == pytest.approx(2 * (replicas - 1) / replicas, rel=0.012), "of the gradient"
        assert max(Counter(place.forwards.values()).values()) <= early_parts(replicas)


def test_what_all_send_at_once_goes_to_another_first_from_each() -> None:
    layout = split(20_000, group := names(64))
    places = [layout.role(peer) for peer in group]
    firsts = [Counter(next(iter(sends.values())) for sends in (one.sends, one.forwards)) for one in places]
    assert sum(firsts, Counter()) == Counter(2 * group), "one of its row and one of its column"
    for exchange in zip(
        *(zip(*[one.sends.values(), one.forwards.values()], strict=True) for one in places), strict=True
    ):
        assert len({first for first, _ in exchange}) == len({second for _, second in exchange}) == 64


def test_more_replicas_need_few_more_connections() -> None:
    assert [connections(replicas) for replicas in (16, 17, 20, 24, 32, 64, 100)] == [15, 8, 7, 8, 10, 14, 18]
    assert all(connections(replicas) < 15 for replicas in range(17, 40))


def test_a_group_of_sixteen_stands_in_one_row_and_one_of_seventeen_in_three() -> None:
    assert [len(row) for row in rows_of(names(16))] == [16]
    assert [len(row) for row in rows_of(names(17))] == [6, 6, 5]
    place = split(160, names(16)).role("p03")
    assert place.adds == {3: names(16)} and not place.forwards
    assert place.broadcasts == {3: (*names(16)[4:], *names(16)[:3])}


def test_numbers_of_two_pieces_never_meet() -> None:
    for replicas in (3, 16, 17, 23, 40, 64):
        for piece, layout in enumerate(layouts(replicas, 30_000, 7000)):
            used = {number for peer in names(replicas) for number in layout.role(peer).sends} | set(layout.numbers)
            assert min(used) == layout.first and {number // stride(replicas) for number in used} == {piece}


def test_a_listener_hears_every_chunk_from_one_row_and_rows_share_the_listeners() -> None:
    group = names(24)
    layout, rows = split(20_000, group), Counter[int]()
    for number in range(24):
        listener = f"p{number:02}.1"
        tellers = set(layout.receives(listener).values())
        assert tellers == set(layout.rows[layout.row_of(listener)])
        rows[layout.row_of(listener)] += 1
    assert set(rows.values()) == {6}


# -------------------------------------------------------------------------------------------------------- whole rounds


def in_rows(group: tuple[Peer, ...]) -> tuple[object, ...]:
    """The order of additions: within a row as listed, then the rows."""
    return tuple(tuple((peer,) for peer in row) for row in rows_of(group))


def whole(play: Group, *, of: object, number: int = 7) -> None:
    """Everybody has gathered the same, each chunk added up in that order; nothing is held but what may be asked for again."""
    assert set(play.reduced) == set(play.names) and not play.failures
    for name in play.names:
        runner = play.runner[name]
        assert isinstance(runner, Symbols)
        assert all(held == of for _, _, held in runner.gathered[number])
    assert len({one.digest for one in play.reduced.values()}) == 1


@pytest.mark.parametrize("piece_values", [0, 700])
@pytest.mark.parametrize("replicas", [17, 18, 20, 23, 24, 33])
def test_every_replica_is_added_once_and_in_the_same_order_everywhere(replicas: int, piece_values: int) -> None:
    group = names(replicas)
    play = Group(group, 2000, piece_values, seed=replicas)
    play.begin()
    play.run()
    whole(play, of=in_rows(group))
    near = neighbours(group, 1 << 40)
    assert all(other in near[peer] for peer, other, _ in play.sent)
    assert not any(isinstance(message, Resend) for _, _, message in play.sent)
    pieces = 3 if piece_values else 1
    assert play.tasks[Cut] == play.tasks[AddRow] == play.tasks[Gather] == pieces * replicas
    *_, before, last = (None, *layouts(replicas, 2000, piece_values))
    for name in group:
        place = last.role(name)
        copies = len(place.broadcasts) + (len(before.role(name).broadcasts) if before is not None else 0)
        asked = copies + sum(owner != name for owner in place.sends.values())
        assert len(held(play, name)) == asked, "what may be asked for again"
        play.carry(name, play.rounds[name].turn())
        assert held(play, name) == {}, "all is let go of"


def test_a_group_of_one_row_adds_in_the_listed_order() -> None:
    group = names(16)
    play = Group(group, 2000)
    play.begin()
    play.run()
    whole(play, of=tuple((peer,) for peer in group))
    assert play.tasks[AddRow] == 0 and play.tasks[Add] == 16
    assert len(play.sent) == 2 * 16 * 15


@pytest.mark.parametrize("seed", range(4))
def test_what_is_lost_in_any_exchange_is_asked_for_and_comes(seed: int) -> None:
    group = names(17 + seed)
    play = Group(group, 1500, 600, seed=seed)
    dropped = Counter[str]()

    def lost(source: Peer, target: Peer, message: object) -> bool:
        if play.rng.random() > 0.2:
            return False
        dropped[kind(group, message)] += 1
        return True

    play.lost = lost
    play.begin()
    play.run(until=lambda: len(play.reduced) == len(group))
    assert set(dropped) == {"row part", "column part", "sum", "Resend"}
    whole(play, of=in_rows(group))


def kind(group: tuple[Peer, ...], message: object) -> str:
    if isinstance(message, ReduceChunk):
        inner = split(1500, group, 600, message.chunk // stride(len(group))).inner
        return "row part" if message.chunk >= inner else "column part"
    return "sum" if isinstance(message, GatherChunk) else type(message).__name__


def test_what_comes_before_its_round_or_its_piece_is_kept() -> None:
    """One replica hears of the round when all the others wait for it. Nobody has to ask for anything again."""
    group = names(23)
    layout = split(2000, group, 500)
    late = group[2]
    assert max(list(layout.role(peer).forwards.values()).count(late) for peer in group if peer != late) == 2
    play = Group(group, 2000, 500, seed=4)
    play.begin(*(peer for peer in group if peer != late))
    play.run(until=lambda: not any(play._lines.values()) and not any(play._doing.values()))
    assert not play.reduced
    play.begin(late)
    play.run()
    whole(play, of=in_rows(group))
    assert not any(isinstance(message, Resend) for _, _, message in play.sent)


def test_listeners_hear_every_chunk_once_from_the_row_that_they_expect() -> None:
    group, joiners = names(21), ("p03.1", "p09.1", "p20.1")
    play = Group(group, 2000, 700, joiners)
    play.begin()
    play.run()
    whole(play, of=in_rows(group))
    wanted = Counter[tuple[Peer, Peer, int]]()
    for layout in layouts_of(group):
        wanted.update((teller, one, number) for one in joiners for number, teller in layout.receives(one).items())
    assert Counter((source, target, message.chunk) for source, target, message in play.heard) == wanted


def layouts_of(group: tuple[Peer, ...]) -> list[Layout]:
    return [split(2000, group, 700, piece) for piece in range(3)]


@pytest.mark.parametrize("task", [Cut, AddRow, Add, Gather])
def test_a_death_in_any_exchange_ends_the_round_and_the_next_one_is_laid_out_without_the_dead(task: type) -> None:
    group = names(24)
    play = Group(group, 2000, seed=9)
    play.begin()
    play.run(until=lambda: play.tasks[task] >= (30 if task is Add else 5))
    dead, left = group[7], tuple(name for name in group if name != group[7])
    again = Group(left, 2000, seed=9)
    members = tuple(Member(name, 0) for name in left)
    view = View(number=6, step=3, members=members, owners=(*range(23), 0))
    play.names, play.view = left, view
    del play.rounds[dead], play._doing[dead]
    play._lines = {pair: line for pair, line in play._lines.items() if dead not in pair}
    play.shares = {name: again.shares[name] for name in left}
    play.shares[left[0]] = type(play.shares[left[0]])(left[0], (0, 23))
    for name in left:
        play.rounds[name]._replica.view = view
        play.carry(name, play.rounds[name].on_view(view))
        assert play.rounds[name].active is None
    play.reduced.clear()
    play.begin(number=8)
    play.run()
    whole(play, of=in_rows(left), number=8)
    assert {message.round for message in play.reduced.values()} == {8}
    for name in left:
        play.carry(name, play.rounds[name].turn())
        assert held(play, name) == {}

"""A replica that has booked nothing brings nothing into a round: it sends no part, owns no chunk, and has the same sums as the others."""

from __future__ import annotations

import math
from collections import Counter
from random import Random

import msgspec
import pytest
from tests.rounds import Group, Symbols, held

from shoal.core.allreduce.bounds import lengths
from shoal.core.allreduce.checked import SumChecks, wrong_sums
from shoal.core.allreduce.layout import ONE_ROW, SLICE_VALUES, SLICES, Layout, layout_of
from shoal.core.messages import (
    Cut,
    GatherChunk,
    OwnedSums,
    Peer,
    ReduceChunk,
    Reduced,
    Resend,
    Result,
    Settings,
    Share,
    Sketch,
)


def a_group(idle: str, names: str = "abcd", length: int = 2000, seed: int = 0, piece_values: int = 0) -> Group:
    """The first that is not idle has booked the microbatches of those that are, too."""
    play = Group(tuple(names), length, piece_values, seed=seed)
    first = next(name for name in names if name not in idle)
    for name in idle:
        taken = play.shares[name].indices
        play.shares[name] = Share(name, ())
        play.shares[first] = Share(first, (*play.shares[first].indices, *taken))
    return play


def whole(play: Group, brings: str) -> None:
    """All have the same sums, of those parts alone, in the listed order."""
    assert set(play.reduced) == set(play.names) and not play.failures
    assert len({one.digest for one in play.reduced.values()}) == 1
    for name in play.names:
        runner = play.runner[name]
        assert isinstance(runner, Symbols)
        parts = {parts for _, _, parts in runner.gathered[7]}
        assert parts in ({tuple((peer,) for peer in brings)}, {(peer,) for peer in brings})  # one alone adds nothing up


@pytest.mark.parametrize(("idle", "brings"), [("d", "abc"), ("ac", "bd"), ("bc", "a"), ("ab", "c"), ("b", "a")])
@pytest.mark.parametrize("length", [2000, 10 * SLICE_VALUES])
def test_it_sends_no_part_and_has_all_sums(idle: str, brings: str, length: int) -> None:
    play = a_group(idle, "".join(sorted(idle + brings)), length)
    play.begin()
    play.run()
    whole(play, brings)
    senders = Counter(source for source, _, _ in play.sent)
    assert not any(senders[name] for name in idle)
    assert play.tasks[Cut] == len(brings)
    assert not any(target in idle for _, target, message in play.sent if isinstance(message, ReduceChunk))
    assert not any(isinstance(message, Resend) for _, _, message in play.sent)
    for name in play.names:
        play.carry(name, play.rounds[name].turn())
        assert held(play, name) == {}, "all is let go of"


def test_sums_that_come_before_it_has_begun_are_kept() -> None:
    play = a_group("c", length=10 * SLICE_VALUES)
    play.begin("a", "b", "d")
    play.run(until=lambda: {"a", "b", "d"} <= set(play.reduced) and not any(play._lines.values()))
    play.begin("c")
    play.run()
    whole(play, "abd")
    assert not any(isinstance(message, Resend) for _, _, message in play.sent)


@pytest.mark.parametrize("seed", range(4))
def test_a_sum_that_is_lost_on_its_way_to_it_is_asked_for_and_comes(seed: int) -> None:
    play = a_group("b", seed=seed)
    play.lost = lambda source, target, message: (
        target == "b" and isinstance(message, GatherChunk) and play.rng.random() < 0.5
    )
    play.begin()
    play.run(until=lambda: len(play.reduced) == 4)
    whole(play, "acd")


def test_in_several_pieces_everybody_takes_part_since_the_others_could_be_pieces_ahead() -> None:
    play = a_group("b", piece_values=700)
    play.begin()
    play.run()
    whole(play, "abcd")


def test_a_group_in_rows_and_encoded_sums_have_no_listeners() -> None:
    shares = [Share(f"p{n}", (n,) if n else ()) for n in range(ONE_ROW + 1)]
    settings = Settings(1, len(shares), steps=1)
    assert layout_of(2000, shares, settings).listeners == ()
    assert layout_of(2000, shares[:4], settings).listeners == ("p0",)
    assert layout_of(2000, shares[:4], Settings(1, 4, steps=1, averaging_error=0.1)).listeners == ()


def busiest_s(layout: Layout, shares: list[Share]) -> float:
    """Of the lines, each way, as many seconds as values: what every replica sends and receives by its role."""
    sent, received, seconds = Counter[Peer](), Counter[Peer](), []
    for share in shares:
        role = layout.role(share.peer)
        hears = [(owner, share.peer, number) for number, owner in role.receives.items()]
        brings = [(share.peer, owner, number) for number, owner in role.sends.items()]
        for source, target, number in hears + brings:
            if source != target:
                sent[source] += layout.values(number)
                received[target] += layout.values(number)
    seconds = [max(sent[share.peer], received[share.peer]) / share.line_rate for share in shares]
    return max(seconds)


@pytest.mark.parametrize("seed", range(40))
def test_those_that_bring_something_own_by_line_and_everybody_owns_where_that_is_much_quicker(seed: int) -> None:
    """Two of six on unlike lines owned a half each, and sent it to five: 35 s for what takes all six 14."""
    rng, length, settings = Random(seed), 10_000_000, Settings(1, 16, steps=1)
    rates = [int(2000 * 12 ** rng.random()) for _ in range(rng.randint(3, ONE_ROW))]
    bring = rng.sample(range(len(rates)), rng.randint(1, len(rates)))
    indices = {one: (place,) for place, one in enumerate(bring)}
    shares = [Share(f"p{at}", indices.get(at, ()), rate) for at, rate in enumerate(rates)]
    everybody = [msgspec.structs.replace(share, indices=(at,)) for at, share in enumerate(shares)]
    chosen_s = busiest_s(layout_of(length, shares, settings), shares)
    all_s = busiest_s(layout_of(length, everybody, settings), shares)
    assert chosen_s <= all_s * 1.5 * (1 + 1 / SLICES)
    mine = [rates[at] for at in bring]
    if layout_of(length, shares, settings).listeners:
        even_s = length * (1 + (len(rates) - 2) / len(mine)) / min(mine)
        assert chosen_s <= max(even_s, length / min(rates)) * 1.001, "by their lines, where that is quicker than evenly"


def test_two_of_six_own_by_what_their_lines_have_to_send_to_all_six() -> None:
    """As two of two they would own a half each; the narrower line sent its half to five others for 35 s."""
    shares = [Share("a", (0,), 6962), Share("b", (1,), 2213), *(Share(name, (), 10_000) for name in "cdef")]
    layout = layout_of(7_764_819, shares, Settings(1, 6, steps=1))
    owned = sum(
        layout.values(number) for number, owner in zip(layout.numbers, layout.owners, strict=True) if owner == "b"
    )
    assert layout.listeners == tuple("cdef")
    assert owned == pytest.approx((6 / 9175 * 2213 - 1) / 4 * 7_764_819, rel=1e-3)
    assert busiest_s(layout, shares) == pytest.approx(6 / 9175 * 7_764_819, rel=1e-3)


def test_all_that_bring_nothing_take_part_as_ever() -> None:
    """As in a step that is skipped."""
    shares = [Share(name, ()) for name in "ab"]
    assert layout_of(2000, shares, Settings(1, 2, steps=1)).listeners == ()


# ----------------------------------------------------------------------------------------------------- what is checked


def reports(idle_says: OwnedSums | None = None) -> tuple[list[Share], dict[Peer, Reduced]]:
    """Of a, b and an idle c: a owns the sum 1 + 2, b the sum 3 + 4, as sketches."""

    def a_sketch(value: float) -> Sketch:
        return Sketch((value,) * 4, value * value)

    group, parts = "abc", {"a": (1.0, 2.0), "b": (3.0, 4.0)}
    reduced: dict[Peer, Reduced] = {}
    for place, me in enumerate(group):
        checks = SumChecks()
        if me in parts:
            sketches = (*map(a_sketch, parts[me]), Sketch())
            checks.on_added(me, Result(sketches=sketches), "ab", group)
        mine = [a_sketch(parts[owner][place]) if place < 2 and owner != me else Sketch() for owner in "ab"]
        sums = [a_sketch(sum(parts[owner])) for owner in "ab"]
        flat = (sums[0], mine[0], sums[1], mine[1])
        checks.on_gathered("ab", Result(digests=("x", "y"), sketches=flat))
        known = list(checks.of(group))
        if me == "c" and idle_says is not None:
            known[2] = idle_says
        reduced[me] = Reduced(0, 3, 7, "d", 1.0, tuple(known))
    return [Share("a", (0,)), Share("b", (1,)), Share("c", ())], reduced


def test_honest_sums_of_a_group_with_a_listener_are_found_right_and_its_part_has_no_length() -> None:
    shares, reduced = reports()
    assert wrong_sums("abc", reduced, 0.0) is None
    assert lengths(shares, reduced) == pytest.approx((math.sqrt(1 + 9), math.sqrt(4 + 16), 0.0))


def test_one_that_claims_sums_it_never_made_is_found() -> None:
    _, reduced = reports(OwnedSums("z", Sketch((5.0,) * 4, 25.0)))
    judged = wrong_sums("abc", reduced, 0.0)
    assert judged is not None and "c" in [peer for peer, _ in judged.guilty]

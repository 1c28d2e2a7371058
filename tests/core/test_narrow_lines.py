"""What the leader makes of the peers' measured lines: who owns how much of a round, who has how many turns, and who is left out."""

from __future__ import annotations

from math import inf
from random import Random

import msgspec
import pytest

from shoal.core.leader.evictions import FIRST_PAUSE, Pauses
from shoal.core.leader.facts import Facts
from shoal.core.leader.history import FADES, History
from shoal.core.leader.ledger import Ledger
from shoal.core.leader.rules.lines import (
    ALIKE,
    CLOSE,
    FAR,
    SHOWN,
    SLOW_kBps,
    by_pace,
    expected_pace,
    line_rates,
    measured,
    shown,
    too_narrow,
)
from shoal.core.leader.rules.lines import turns_of as turns_by_pace
from shoal.core.leader.rules.removal import remove
from shoal.core.messages import TURNS, Booking, Complaint, Heartbeat, Member, Phase, Settings, View
from shoal.core.trainer.turns import turns_of

MEMBERS = tuple(Member(peer, stage) for peer, stage in (("a", 0), ("b", 1), ("c", 0), ("d", 1)))
NEWCOMER = Member("e", 0)
SETTINGS = Settings(stages=2, microbatches=24, steps=9, peers=4, join_slowdown=1.1)
GRADIENT = 1_250_000  # 5 MB
USUAL = 2500  # kB/s


def known(
    members: tuple[Member, ...],
    joining: tuple[Member, ...] = (),
    settings: Settings = SETTINGS,
    step_s: float = 5.0,
    **lines: int,
) -> tuple[View, Facts]:
    """Everybody has reported its line (usual where none is named; 0: not measured), at the beginning of step 3."""
    view = View(number=9, step=3, members=members, joining=joining, owners=(0,) * 24, phase=Phase.TRAINING)
    facts = Facts("a", settings, Random(1).random)
    facts.on_view(view, 0.0)
    facts.requests.joined_in = {one.peer: 9 for one in joining}
    facts.history.step_s = step_s
    for one in members + joining:
        rate = lines.get(one.peer, USUAL)
        beat = Heartbeat(
            1, 9, 3, True, stage=one.stage, work=3, digest=f"{one.stage}", gradient=GRADIENT, tensor_bytes=1_000_000,
            up_kBps=rate, down_kBps=2 * rate,
        )  # fmt: skip
        facts.on_message(one.peer, beat, 1.0)
    return view, facts


def test_equal_lines_that_are_measured_unequal_own_evenly() -> None:
    _, facts = known(MEMBERS, a=2000, b=2900, c=2500, d=3300)
    assert set(line_rates(MEMBERS, facts, SETTINGS).values()) == {2700}


def test_a_narrow_line_counts_as_measured_and_one_that_boasts_as_a_few_usual_ones() -> None:
    _, facts = known(MEMBERS, a=400, d=10**9)
    assert line_rates(MEMBERS, facts, SETTINGS) == {"a": 400, "b": USUAL, "c": USUAL, "d": FAR * USUAL}


def test_who_is_not_measured_counts_as_usual_and_without_any_measurement_nothing_is_said() -> None:
    _, facts = known(MEMBERS, b=0)
    assert line_rates(MEMBERS, facts, SETTINGS)["b"] == USUAL
    _, facts = known(MEMBERS, a=0, b=0, c=0, d=0)
    assert line_rates(MEMBERS, facts, SETTINGS) == {}


def test_the_pace_of_peers_has_their_lines_where_both_are_measured() -> None:
    _, facts = known(MEMBERS, d=500)
    assert measured(MEMBERS, facts, SETTINGS) == ((), {}, {}), "no rate is known, so that a second means nothing"
    for one in MEMBERS:
        facts.on_message(one.peer, msgspec.structs.replace(facts.heartbeats[one.peer], rate=4.0), 2.0)
    seconds, speeds, lines = measured((*MEMBERS, NEWCOMER), facts, SETTINGS)
    assert seconds == (0.25, 0.25) and set(speeds) == set("abcd")
    assert lines == {"a": 2.5, "b": 2.5, "c": 2.5, "d": 0.5, "e": 2.5}, (
        "tensors of 1 MB; a newcomer's line is a usual one"
    )


def test_what_a_first_step_can_pass_follows_the_narrowest_line_of_its_thinnest_stage() -> None:
    """Tensors of 1 MB; a peer that says its line is next to nothing counts as one with a part of the usual line."""
    expected = [expected_pace(MEMBERS, known(MEMBERS, a=rate)[1], SETTINGS) for rate in (USUAL, 1000, 1)]
    assert expected == [5.0, 2.0, 2 * USUAL / 1000 / FAR]
    _, facts = known(MEMBERS, a=0, b=0, c=0, d=0)
    assert expected_pace(MEMBERS, facts, SETTINGS) == 2 * SLOW_kBps / 1000
    middle = msgspec.structs.replace(SETTINGS, stages=3)
    three = (*MEMBERS, Member("e", 2), Member("f", 2))
    assert expected_pace(three, known(three)[1], middle) == 2.5, "stage 1 passes two tensors of each"
    for one in MEMBERS:
        facts.on_message(one.peer, msgspec.structs.replace(facts.heartbeats[one.peer], rate=0.25), 2.0)
    assert expected_pace(MEMBERS, facts, SETTINGS) == 0.5, "what is computed"
    assert expected_pace(MEMBERS, Facts("a", SETTINGS, Random(1).random), SETTINGS) == 0.0


def test_an_unanswered_request_is_nobodys_fault_while_a_first_steps_books_are_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, facts = known(MEMBERS)
    for in_time in (True, False):
        monkeypatch.setattr(facts.evidence.jams, "in_time", lambda _, answer=in_time: answer)
        for accuser in ("a", "b", "d"):
            facts.on_message(accuser, Complaint("c", "has answered nothing for 9.0 s", kind="unreachable"), 2.0)
        assert bool(facts.evidence.guilty) != in_time


def test_a_plan_knows_better() -> None:
    settings = msgspec.structs.replace(SETTINGS, seats=(0, 1), line_rates=(70, 80))
    members = tuple(msgspec.structs.replace(one, seat=seat) for one, seat in zip(MEMBERS, (0, 1, -1, -1), strict=True))
    _, facts = known(members)
    assert line_rates(members, facts, settings) == {"a": 70, "b": 80, "c": 0, "d": 0}


def test_a_newcomer_with_a_quarter_of_the_others_line_is_left_out_in_words() -> None:
    view, facts = known(MEMBERS, (NEWCOMER,), e=USUAL // 4)
    (said,) = too_narrow(view, facts, SETTINGS, 2.0).items()
    assert said[0] == "e" and "0.62 MB/s, the others' 2.5" in said[1] and "without it 5.0 s" in said[1]
    after = remove(view, facts, SETTINGS, 2.0)
    assert after is not None and after.view.joining == () and after.view.members == MEMBERS
    pauses = Pauses(SETTINGS)
    pauses.on_view(after.view.evicted, 2.0)
    assert pauses.until("e", ("a",)) == 2.0 + FIRST_PAUSE * SETTINGS.ban_s, "each try is a download for the others"


@pytest.mark.parametrize(
    ("why", "changes"),
    [
        ("its line is usual", {"e": USUAL}),
        ("half of it is evened out by the owners' shares", {"e": int(USUAL * 0.6)}),
        ("nobody has measured it", {"e": 0}),
        ("steps last long beside averaging", {"e": USUAL // 4, "step_s": 200.0}),
        ("no step has been timed", {"e": USUAL // 4, "step_s": inf}),
    ],
)
def test_a_newcomer_stays_where(why: str, changes: dict[str, int]) -> None:
    view, facts = known(MEMBERS, (NEWCOMER,), **changes)
    assert too_narrow(view, facts, SETTINGS, 2.0) == {}, why


def test_a_run_that_asked_for_as_many_peers_takes_them_as_they_are() -> None:
    wanted = msgspec.structs.replace(SETTINGS, peers=5)
    view, facts = known(MEMBERS, (NEWCOMER,), e=USUAL // 4)
    assert too_narrow(view, facts, wanted, 2.0) == {}
    view, facts = known((*MEMBERS, NEWCOMER), e=USUAL // 4)
    assert too_narrow(view, facts, wanted, 2.0) == {}
    assert too_narrow(view, facts, msgspec.structs.replace(SETTINGS, join_slowdown=0.0), 2.0) == {}


def test_a_member_whose_uplink_shows_only_in_a_round_is_left_out_then_and_never_a_stages_last() -> None:
    view, facts = known((*MEMBERS, NEWCOMER), step_s=14.0, e=USUAL // 4)
    assert set(too_narrow(view, facts, SETTINGS, 2.0)) == {"e"}
    alone = (MEMBERS[0], MEMBERS[2], NEWCOMER, Member("f", 0), MEMBERS[1])
    view, facts = known(alone, step_s=14.0, b=USUAL // 4)
    assert too_narrow(view, facts, SETTINGS, 2.0) == {}


def test_a_newcomer_whose_computing_is_worth_more_than_its_line_costs_stays() -> None:
    """One stage is served by one replica: hops are the step, and a second one halves them."""
    thin = (Member("a", 0), Member("b", 1), Member("d", 1))
    settings = msgspec.structs.replace(SETTINGS, peers=3)
    view, facts = known(thin, (NEWCOMER,), settings, step_s=40.0, e=USUAL // 4)
    assert too_narrow(view, facts, settings, 2.0) == {}


def test_turns_follow_what_a_line_carries_beside_what_a_replica_computes() -> None:
    _, facts = known((*MEMBERS, NEWCOMER), e=USUAL // 4)
    assert [one.turns for one in by_pace((*MEMBERS, NEWCOMER), facts, SETTINGS)] == [TURNS] * 4 + [TURNS // 4]
    for peer, beat in facts.heartbeats.items():  # computing takes longer than the narrow line
        facts.heartbeats[peer] = msgspec.structs.replace(beat, rate=0.5)
    assert [one.turns for one in by_pace((*MEMBERS, NEWCOMER), facts, SETTINGS)] == [TURNS] * 5
    _, facts = known((*MEMBERS, NEWCOMER), e=int(USUAL / CLOSE) + 1)
    assert [one.turns for one in by_pace((*MEMBERS, NEWCOMER), facts, SETTINGS)] == [TURNS] * 5


@pytest.mark.parametrize(
    ("rates", "turns"),
    [
        ((2.0, 1.0, 2.0), (TURNS, TURNS // 2, TURNS)),
        ((1.0, 1.0 / ALIKE + 0.01, ALIKE - 0.01), (TURNS, TURNS, TURNS)),  # noise changes nothing
        ((1.0, 1.0, 100.0), (TURNS / FAR, TURNS / FAR, TURNS)),  # nor is anybody believed to be that quick
        ((1.0, 1.0, 0.001), (TURNS, TURNS, TURNS / FAR)),
        ((1.0, 0.0, 0.5), (TURNS, TURNS // 2, TURNS // 2)),  # not known: as usual, the lower of the two
        ((0.0, 0.0, 0.0), (TURNS, TURNS, TURNS)),
    ],
)
def test_turns_follow_what_replicas_compute(rates: tuple[float, ...], turns: tuple[float, ...]) -> None:
    turns_of_each = turns_by_pace(dict.fromkeys("abc", 0), 1.0, dict(zip("abc", rates, strict=True)))
    assert tuple(turns_of_each.values()) == turns


def test_a_rate_above_its_stages_usual_one_counts_as_far_as_it_has_been_shown() -> None:
    """Else one that says too much has its stage to itself, and everybody waits for it."""
    said = {"a": 1.0, "b": 1.2, "c": 1e9}
    assert shown(said, {"a": 0.5, "b": 1.0, "c": 1.0}) == {"a": 1.0, "b": 1.2, "c": max(1.2, SHOWN)}
    assert shown(said, {"c": 0.1})["c"] == 1.2, "and its stage's usual rate is believed"
    assert shown({"a": 1.0, "c": 1e9}, {"c": 1.0})["c"] == SHOWN, "of two the lower is usual"
    assert shown(said, {"a": 0.5})["c"] == 1.2, "who has booked nothing has shown nothing"
    assert shown(said, {}) == said, "a new leader knows nothing"


def test_what_a_step_has_shown_of_a_peer_counts_in_the_next_one_too() -> None:
    history, ledger = History(), Ledger.of(SETTINGS, 0, False)
    ledger.books["a"] = tuple(Booking(index, 1.0) for index in range(6))
    assert history.booked_paces(ledger) == {}, "nothing is whole yet"
    history.step_at, history.complete_at = 10.0, 13.0
    assert history.booked_paces(ledger) == {"a": 2.0}
    history.on_step(None, ledger, 14.0)
    assert history.booked_paces(Ledger.of(SETTINGS, 1, False)) == {"a": 2.0}
    history.step_at, history.complete_at = 14.0, 74.0  # somebody died
    assert history.booked_paces(ledger) == {"a": 2.0 * FADES}


def test_turns_are_spread_evenly_and_replicas_alike_have_one_each() -> None:
    assert turns_of(list(MEMBERS)) == ["a", "b", "c", "d"]
    narrow = msgspec.structs.replace(NEWCOMER, turns=2)
    turns = turns_of([MEMBERS[0], MEMBERS[2], narrow])
    assert turns.count("e") == 1 and turns.count("a") == turns.count("c") == TURNS // 2
    assert turns_of([MEMBERS[0], msgspec.structs.replace(NEWCOMER, turns=0)]) == ["a"]
    assert turns_of([msgspec.structs.replace(one, turns=0) for one in MEMBERS[:2]]) == ["a", "b"]

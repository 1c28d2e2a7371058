"""Stochastic wiring: who gets the next hop, and for how long an answer is waited for."""

from __future__ import annotations

from collections import Counter
from math import gcd
from random import Random

import msgspec
import pytest

from shoal.core.messages import TURNS, Member, Settings, View
from shoal.core.trainer.choice import in_progress
from shoal.core.trainer.microbatch import Hop, Kind, new_microbatch
from shoal.core.trainer.routing import BACKWARD_SIZE, COLD_S, MOST_WAIT_S, OTHERS, PATIENCE, Routes
from shoal.core.trainer.wiring import TURN, UNEVEN_TURN, WAITS

SETTINGS = Settings(stages=2, microbatches=4, steps=1, ban_s=10.0, min_request_timeout_s=2.0, heartbeat_timeout_s=4.0)


def some_routes(*peers: str, settings: Settings = SETTINGS) -> Routes:
    routes = Routes(settings, Random(0))
    routes.on_view(tuple(Member(peer, 0) for peer in peers), 0.0)
    return routes


def chosen(routes: Routes, now: float, avoid: str = "") -> str:
    choice = routes.choose(0, now, avoid=avoid)
    assert choice is not None
    return choice[0]


def shares(routes: Routes, latency_s: dict[str, float], hops: int, size: float = 1.0) -> Counter[str]:
    count: Counter[str] = Counter()
    for _ in range(hops):
        choice = routes.choose(0, 0.0, size)
        assert choice is not None
        count[choice[0]] += 1
        routes.answered(choice[0], latency_s[choice[0]] * size, size, 0.0)
    return count


@pytest.mark.parametrize("size", [1.0, BACKWARD_SIZE])
def test_a_peers_share_is_inversely_proportional_to_its_latency(size: float) -> None:
    count = shares(some_routes("a", "b", "c"), {"a": 0.1, "b": 0.2, "c": 0.4}, 7000, size)
    assert count["a"] == pytest.approx(4000, rel=0.03)
    assert count["b"] == pytest.approx(2000, rel=0.03)
    assert count["c"] == pytest.approx(1000, rel=0.03)


def test_a_new_peer_is_tried_soon_and_not_flooded() -> None:
    routes = some_routes("a", "b")
    shares(routes, {"a": 0.1, "b": 0.1}, 500)
    routes.on_view((Member("a", 0), Member("b", 0), Member("c", 0)), 0.0)
    count = shares(routes, {"a": 0.1, "b": 0.1, "c": 0.1}, 30)
    assert 8 <= count["c"] <= 12


def test_a_stage_without_replicas_has_no_choice_and_nothing_to_wait_for() -> None:
    routes = some_routes("a")
    assert routes.choose(1, 0.0) is None
    assert routes.wake(1) is None


def test_an_owner_that_serves_the_stage_gets_its_own_and_is_waited_for_while_busy() -> None:
    routes = some_routes("a", "b")
    for _ in range(5):
        assert routes.choose(0, 0.0, home="b") == ("b", "its owner serves that stage")
    assert routes.choose(1, 0.0, home="b") is None  # nobody serves that one
    routes.busy("b", 1.0, 1.0, 0.0)
    assert routes.choose(0, 0.0, home="b") is None
    wake = routes.wake(0)
    assert wake is not None and routes.choose(0, wake, home="b") is not None
    routes.failed("b", 5.0)
    assert routes.choose(0, 5.0, home="b") == ("a", "expected to answer first")


def test_the_avoided_peer_is_chosen_only_if_it_is_alone() -> None:
    routes = some_routes("a", "b")
    assert [chosen(routes, 0.0, avoid="a") for _ in range(10)] == ["b"] * 10
    assert chosen(some_routes("a"), 0.0, avoid="a") == "a"


def test_a_timeout_is_a_slow_sample() -> None:
    routes = some_routes("a", "b")
    for _ in range(50):
        routes.answered("a", 0.1, 1.0, 0.0)
        routes.answered("b", 0.1, 1.0, 0.0)
    for _ in range(5):
        routes.slow("b", 2.0, 1.0, 0.0)
    count: Counter[str] = Counter(chosen(routes, 0.0) for _ in range(100))
    assert 0 < count["b"] < 20


def test_whoever_is_late_again_and_has_answered_nothing_in_between_gets_no_requests_for_a_while() -> None:
    """A server that says that it has each request was tried every few steps, each time for 2.5 s."""
    routes = some_routes("a", "b")
    shares(routes, {"a": 0.1, "b": 0.1}, 20)
    for now in (2.5, 2.6):  # two that it was sent together are one time
        routes.slow("b", 2.5, 1.0, now)
    assert routes.claim("a", 0, 3.0, 1.0) and not routes.claim("b", 0, 3.0, 1.0), (
        "nor what goes on from its own tensors"
    )
    assert "b" in {chosen(routes, 3.0) for _ in range(100)}
    routes.slow("b", 2.5, 1.0, 6.0)
    assert {chosen(routes, 6.0 + SETTINGS.ban_s * at / 200) for at in range(199)} == {"a"}
    routes.answered("b", 0.1, 1.0, 20.0)
    routes.slow("b", 2.5, 1.0, 30.0)
    assert "b" in {chosen(routes, 31.0) for _ in range(100)}, "an honest one that answers begins anew"


def test_timeouts_do_not_lengthen_everybodys_deadline() -> None:
    routes = some_routes("a", "b")
    for _ in range(50):
        routes.answered("a", 1.0, 1.0, 0.0)
    for _ in range(50):
        routes.slow("b", routes.patience("b", 1.0), 1.0, 0.0)
    assert routes.patience("a", 1.0) == pytest.approx(4.0)
    assert routes.patience("b", 1.0) <= 4 * 4.0


def test_a_deadline_follows_what_was_measured() -> None:
    routes = some_routes("a", settings=Settings(stages=1, microbatches=1, steps=1, stage_seconds=(0.1,)))
    assert routes.patience("a", 1.0) == 2.0, "the floor"
    for _ in range(200):
        routes.answered("a", 3.0, 1.0, 0.0)
    assert routes.patience("a", 1.0) == pytest.approx(12.0)
    assert routes.patience("a", BACKWARD_SIZE) == pytest.approx(30.0)
    routes.busy("a", 5.0, 1.0, 0.0)
    assert routes.patience("a", 1.0) == pytest.approx(17.0)


def test_one_slow_answer_does_not_make_a_deadline_of_minutes() -> None:
    """Found by simulation (fleet 5370): the first answer came after 9 s, from a peer that had been stopped; the next hop of that stage, to
    another peer, was lost and not missed for 94 s."""
    routes = some_routes("a", "b")
    routes.answered("a", 9.4, 1.0, 0.0)
    assert routes.patience("b", BACKWARD_SIZE) == pytest.approx(10.0)
    for _ in range(2):
        routes.answered("a", 9.4, 1.0, 0.0)
    assert routes.patience("b", 1.0) == pytest.approx(4 * 9.4), "most of what was measured: the stage is that slow"


def test_an_answer_to_a_repetition_is_no_measure_of_its_stage() -> None:
    routes = some_routes("a", "b")
    for _ in range(20):
        routes.answered("a", 9.4, 1.0, 0.0, again=True)
    assert routes.patience("b", 1.0) == pytest.approx(4.0)


def test_before_anything_is_measured_the_plan_is_believed() -> None:
    planned = Settings(stages=2, microbatches=1, steps=1, stage_seconds=(7.0, 1.0))
    assert some_routes("a", settings=planned).patience("a", 1.0) == 28.0


def test_a_failing_peer_is_banned_then_tried_once_then_banned_for_longer() -> None:
    routes = some_routes("a", "b")
    assert routes.failed("a", 0.0) == 10.0
    assert {chosen(routes, 9.9) for _ in range(20)} == {"b"}
    assert Counter(chosen(routes, 10.0) for _ in range(20))["a"] == 1, "one probation request"
    assert routes.failed("a", 10.1) == 20.0
    assert {chosen(routes, 30.0) for _ in range(20)} == {"b"}
    assert Counter(chosen(routes, 30.2) for _ in range(20))["a"] == 1
    routes.answered("a", 0.1, 1.0, 30.3)
    assert Counter(chosen(routes, 30.3) for _ in range(100))["a"] > 5, "in good standing again"
    assert routes.failed("a", 31.0) == 10.0, "and what it did is forgiven"


def test_bans_are_bounded() -> None:
    routes = some_routes("a", "b")
    now, bans = 0.0, []
    for _ in range(7):
        bans.append(routes.failed("a", now))
        now += bans[-1]
        assert "a" in {chosen(routes, now) for _ in range(20)}
    assert bans == [10.0, 20.0, 40.0, 80.0, 80.0, 80.0, 80.0]


def test_failures_of_requests_sent_before_a_ban_do_not_lengthen_it() -> None:
    routes = some_routes("a", "b")
    assert [routes.failed("a", 0.0), routes.failed("a", 0.0), routes.failed("a", 1.0)] == [10.0, 0.0, 0.0]


def test_a_probation_request_without_an_answer_is_followed_by_another() -> None:
    routes = some_routes("a", "b")
    routes.failed("a", 0.0)
    assert "a" in {chosen(routes, 10.0) for _ in range(20)}
    assert "a" not in {chosen(routes, 19.9) for _ in range(20)}
    assert "a" in {chosen(routes, 20.1) for _ in range(20)}


def test_a_sole_replica_is_always_chosen_even_when_banned() -> None:
    routes = some_routes("a")
    for now in range(20):
        routes.failed("a", float(now))
        assert chosen(routes, float(now)) == "a"


def test_with_everybody_banned_requests_go_round() -> None:
    routes = some_routes("a", "b", "c")
    for peer in "abc":
        routes.failed(peer, 0.0)
    assert Counter(chosen(routes, 1.0) for _ in range(30)) == {"a": 10, "b": 10, "c": 10}


def test_a_busy_peer_is_left_alone_for_its_wait() -> None:
    routes = some_routes("a", "b")
    routes.busy("a", 2.0, 1.0, 0.0)
    assert {chosen(routes, 1.99) for _ in range(20)} == {"b"}
    assert "a" in {chosen(routes, 2.5) for _ in range(20)}


def test_a_busy_sole_replica_is_not_chosen_before_its_wait_is_over() -> None:
    routes = some_routes("a")
    routes.failed("a", 0.0)
    routes.busy("a", 2.0, 1.0, 0.0)
    assert routes.choose(0, 1.0) is None
    wake = routes.wake(0)
    assert wake is not None and 2.0 <= wake <= 2.5
    assert chosen(routes, wake) == "a"


@pytest.mark.parametrize("wait_s", [float("nan"), float("inf"), -1.0, 1e300])
def test_no_peer_can_retire_by_saying_that_it_is_busy(wait_s: float) -> None:
    routes = some_routes("a")
    routes.busy("a", wait_s, 1.0, 0.0)
    assert chosen(routes, 1.25 * MOST_WAIT_S) == "a"


def test_whoever_has_no_room_for_forwards_keeps_the_backwards_whose_input_it_holds() -> None:
    """Another replica would be sent the input again, and a narrow line would carry it."""
    routes = some_routes("a", "b")
    routes.busy("a", 2.0, 1.0, 0.0)
    assert not routes.claim("a", 0, 1.0, 1.0) and routes.claim("a", 0, 1.0, BACKWARD_SIZE, backward=True)
    routes.busy("a", 2.0, BACKWARD_SIZE, 1.0, backward=True)
    assert not routes.claim("a", 0, 2.0, BACKWARD_SIZE, backward=True)
    assert routes.claim("a", 0, 4.0, BACKWARD_SIZE, backward=True)


def a_wide_and(turns: int) -> Routes:
    """`a` has a wide line, `b` has so many turns; both have answered."""
    routes = Routes(SETTINGS, Random(0))
    routes.on_view((Member("a", 0), Member("b", 0, turns=turns)), 0.0)
    for _ in range(20):
        for peer in "ab":
            routes.answered(peer, 1.0, 1.0, 0.0)
    return routes


@pytest.mark.parametrize(("turns", "waits"), [(2, True), (TURNS * 3 // 4, True), (TURNS, False)])
def test_a_replica_without_room_is_waited_for_where_the_other_passes_less(turns: int, waits: bool) -> None:
    """All owners would ask the slower one at once, and the step would wait for it."""
    routes = a_wide_and(turns)
    routes.busy("a", 1.0, 1.0, 0.0)
    chosen_at_once = [routes.choose(0, 0.5, index=index) for index in range(5)]
    assert (None in chosen_at_once) is waits
    assert any(choice is not None for choice in chosen_at_once), "the other has its own turns"
    wake = routes.wake(0)
    assert wake is not None and routes.choose(0, wake, index=0) == ("a", "its turn")


@pytest.mark.parametrize(("turns", "times"), [(TURNS, 1 / TURN), (TURNS // 2, 1 / UNEVEN_TURN)])
def test_where_turns_follow_the_pace_another_is_chosen_out_of_turn_only_if_it_is_far_sooner(
    turns: int, times: float
) -> None:
    """Else both correct the same, and the slow one gets too little."""
    routes = a_wide_and(turns)
    slow_s = (TURNS + turns) / 2 / turns  # a hop at b, as its turns say
    for waiting, wanted in ((0.9 * times * slow_s - 1, "a"), (1.1 * times * slow_s - 1, "b")):
        choice = routes.choose(0, 1.0, load={"a": waiting}, index=0)
        assert choice is not None and choice[0] == wanted, (waiting, choice)


def test_a_peer_that_never_has_room_is_waited_for_a_few_times() -> None:
    routes, now = a_wide_and(2), 0.0
    for _ in range(WAITS):
        routes.busy("a", 1.0, 1.0, now)
        assert routes.choose(0, now, index=0) is None
        now += 2.0
    routes.busy("a", 1.0, 1.0, now)
    assert (routes.choose(0, now, index=0) or "")[0] == "b"


def test_a_busy_wait_of_nothing_is_still_a_wait() -> None:
    routes = some_routes("a")
    routes.busy("a", 0.0, 1.0, 5.0)
    assert routes.choose(0, 5.0) is None


def test_a_peer_that_was_busy_does_not_catch_up_on_what_it_missed() -> None:
    routes = some_routes("a", "b")
    shares(routes, {"a": 0.1, "b": 0.1}, 100)
    routes.busy("a", 20.0, 1.0, 0.0)
    for _ in range(500):
        assert chosen(routes, 1.0) == "b"
    assert 8 <= Counter(chosen(routes, 30.0) for _ in range(20))["a"] <= 12


def test_a_peer_that_left_is_never_chosen_and_may_be_spoken_of() -> None:
    routes = some_routes("a", "b")
    routes.busy("a", 1.0, 1.0, 0.0)
    routes.on_view((Member("b", 0),), 0.5)
    assert {chosen(routes, 10.0 + now) for now in range(20)} == {"b"}
    routes.answered("a", 1.0, 1.0, 2.0)
    routes.slow("a", 1.0, 1.0, 2.0)
    assert routes.failed("a", 2.0) == 0.0
    assert not routes.missed("a", 2.0)


def test_a_silent_peer_is_noticed_once_per_silence_and_not_after_an_answer() -> None:
    routes = some_routes("a", settings=Settings(stages=1, microbatches=1, steps=1, stage_seconds=(0.1,)))
    routes.asked("a", 0.0)
    assert not any(routes.missed("a", now) for now in (1.0, 2.0, 3.0, 4.0))
    assert routes.missed("a", 5.0) == 5.0
    assert not routes.missed("a", 6.0)
    assert routes.missed("a", 10.0)
    routes.received("a")
    routes.asked("a", 24.0)
    assert not routes.missed("a", 39.0), "one request that ran out is no silence"


def test_a_peer_that_serves_no_hop_is_noticed_whatever_else_it_answers() -> None:
    routes = some_routes("a", settings=Settings(stages=1, microbatches=1, steps=1, stage_seconds=(0.1,)))
    for now in (1.0, 3.0, 5.0):
        routes.received("a")
        assert not routes.not_served("a", "", now, late=False)
    assert routes.not_served("a", "", 5.5, late=False) == 4.5
    assert not routes.not_served("a", "", 9.0, late=False), "counted anew"
    routes.answered("a", 0.1, 1.0, 9.0)
    assert not any(routes.not_served("a", "", now, late=False) for now in (10.0, 12.0)), "it has served one"


def two_stages() -> Routes:
    routes = Routes(Settings(stages=2, microbatches=1, steps=1, stage_seconds=(0.1, 0.1)), Random(1))
    routes.on_view((Member("a", 0), Member("b", 0), Member("c", 1), Member("d", 1)), 0.0)
    return routes


def test_a_peer_that_lacks_what_one_other_makes_may_be_that_ones_victim() -> None:
    routes = two_stages()
    assert not any(routes.not_served("c", "a", now, late=False) for now in (0.0, 3.0, 6.0, 9.0))
    assert routes.not_served("c", "b", 10.0, late=False) == 10.0
    assert not any(routes.not_given("a", "c", now) for now in (0.0, 3.0, 6.0, 9.0))
    assert routes.not_given("a", "d", 10.0) == 10.0


def test_a_slow_peer_has_the_time_of_its_longest_hop() -> None:
    routes = some_routes("a", settings=Settings(stages=1, microbatches=1, steps=1, stage_seconds=(1.0,)))
    assert not any(routes.not_served("a", "", now, late=True) for now in (0.0, 5.0, 10.0, 19.0))
    assert routes.not_served("a", "", 21.0, late=True) == 21.0


def test_a_peer_that_gives_no_tensor_is_noticed_until_one_is_had() -> None:
    routes = two_stages()
    assert not any(routes.not_given("a", by, now) for by, now in (("c", 0.0), ("d", 2.0), ("d", 4.0)))
    assert routes.not_given("a", "c", 4.5) == 4.5
    assert not any(routes.not_given("a", by, now) for by, now in (("c", 5.0), ("d", 9.0)))
    routes.given(("a",))
    assert not any(routes.not_given("a", by, now) for by, now in (("c", 9.5), ("d", 9.6)))


def test_a_peer_that_never_answers_does_not_earn_ever_longer_deadlines() -> None:
    routes = some_routes("a")
    for _ in range(100):
        routes.slow("a", routes.patience("a", 1.0), 1.0, 0.0)
    assert routes.patience("a", 1.0) <= 16.0


def test_what_equal_trainers_choose_together_is_even() -> None:
    """Each balances its own requests only. By virtual time alone the shares of one stage were up to 52 and 44 of 96."""
    peers = ("a", "b", "c")
    trainers = [Routes(SETTINGS, Random(seed)) for seed in range(6)]
    count: Counter[str] = Counter()
    for routes in trainers:
        routes.on_view(tuple(Member(peer, 0) for peer in peers), 0.0)
    for index in range(90):
        routes = trainers[index % 6]
        peer, reason = routes.choose(0, 0.0, index=index) or ("", "")
        assert reason == "its turn"
        routes.answered(peer, 1.0 + 0.3 * Random(index).random(), 1.0, 0.0)
        count[peer] += 1
        if index % 18 == 17:
            assert len(set(count.values())) == 1, count


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("owners", [6, 7, 8, 9, 12])
def test_every_owner_meets_every_replica_and_their_turns_are_even(owners: int, replicas: int) -> None:
    """Shifted by one with every round, each of seven owners met the same one of two replicas for ever, and 16 turns were 9 and 7."""
    peers = [f"p{number:02}" for number in range(owners)]
    routes = Routes(SETTINGS, Random(0))
    routes.on_view(tuple(Member(peer, int(number >= replicas)) for number, peer in enumerate(peers)), 0.0)
    met: dict[int, set[str]] = {owner: set() for owner in range(owners)}
    count = Counter(peers[:replicas])
    for index in range(owners * replicas):
        peer, _ = routes.choose(0, 0.0, index=index) or ("", "")
        met[index % owners].add(peer)
        count[peer] += 1
        routes.answered(peer, 1.0, 1.0, 0.0)
        if gcd(owners, replicas) == 1:
            assert max(count.values()) - min(count.values()) <= 1, (index, count)
    assert all(len(each) == replicas for each in met.values()) and len(set(count.values())) == 1


def test_the_turns_of_the_dead_are_given_to_those_who_stay_and_theirs_remain() -> None:
    """They were dealt out anew, so that one had twice as much of the step as others, or one had all of the dead's."""
    everybody = tuple(Member(peer, 0) for peer in "abcd")
    routes = Routes(msgspec.structs.replace(SETTINGS, microbatches=40), Random(0))
    routes.on_view(everybody, 0.0)

    def turns() -> list[str]:
        return [(routes.choose(0, 0.0, index=index) or ("", ""))[0] for index in range(40)]

    def without(*dead: str) -> list[str]:
        routes.on_view(tuple(one for one in everybody if one.peer not in dead), 0.0, begins=False)
        return turns()

    first, second, last = turns(), without("b"), without("b", "c")
    for dead, before, after in (("b", first, second), ("c", second, last)):
        pairs = list(zip(before, after, strict=True))
        assert all(old == new for old, new in pairs if old != dead)
        given = Counter(new for old, new in pairs if old == dead)
        assert set(given) == set(after) and max(given.values()) - min(given.values()) <= 1, given
    routes.on_view(everybody, 0.0)
    assert turns() == first, "a new step begins"


def test_what_a_trainer_has_at_a_replica_does_not_make_it_slow() -> None:
    """Two equal replicas: one answered when nothing was there before, the other behind four hops of this trainer."""
    routes = some_routes("a", "b")
    for _ in range(10):
        routes.answered("a", 1.0, 1.0, 0.0)
        routes.answered("b", 5.0, 1.0, 0.0, ahead=4.0)
    turns = [routes.choose(0, 0.0, index=index, load={"a": 1.0, "b": 1.0}) for index in (0, 1)]
    assert turns == [("a", "its turn"), ("b", "its turn")]


def test_a_microbatch_whose_tokens_are_read_is_in_progress_nowhere() -> None:
    """Counted at its owner it kept owners from their own replicas' turns: steps of like machines took up to 8 % longer."""
    read, sent = (new_microbatch(index, ["", ""], View(number=0, step=0, members=())) for index in (0, 1))
    read.hop, sent.hop = Hop(Kind.FETCH, 0, "a", 0.0), Hop(Kind.FORWARD, 0, "b", 0.0, to="c")
    load = in_progress([read, sent])
    assert (load.get("a", 0.0), load["b"], load["c"]) == (0.0, 1.0, 1.0)


def test_a_newcomer_is_as_quick_as_its_stage_until_it_is_measured() -> None:
    """Its stage's usual time leaves out what was asked after, so that every owner gave a newcomer all it could."""
    routes = some_routes("a", "b")
    shares(routes, {"a": 0.1, "b": 0.1}, 20)
    for _ in range(40):
        for peer in ("a", "b"):
            routes.answered(peer, 4.0, 1.0, 0.0, again=True)
    routes.on_view(tuple(Member(peer, 0) for peer in ("a", "b", "c")), 1.0)
    turns = [routes.choose(0, 1.0, index=index, load={"a": 0.5, "b": 0.5}) for index in range(6)]
    assert [peer for peer, _ in filter(None, turns)].count("c") == 2, turns


def test_a_replica_that_was_late_has_its_turn_again_once_it_answers() -> None:
    """Until its average was down again it was skipped, and without requests an average stays as it is."""
    routes = some_routes("a", "b")
    shares(routes, {"a": 1.0, "b": 1.0}, 20)
    routes.slow("b", 8.0, 1.0, 0.0)
    assert routes.choose(0, 0.0, index=1) == ("a", "expected to answer first")
    routes.answered("b", 9.0, 1.0, 0.0, again=True, ahead=2.5)
    assert routes.choose(0, 0.0, index=1) == ("b", "its turn")


def test_a_turn_is_skipped_where_another_replica_answers_much_sooner() -> None:
    routes = some_routes("a", "b")
    shares(routes, {"a": 1.0, "b": 5.0}, 100)
    assert routes.choose(0, 0.0, index=0) == ("a", "its turn")
    assert {routes.choose(0, 0.0, index=1, load={"b": 1.0}) for _ in range(4)} == {("a", "expected to answer first")}
    assert routes.choose(0, 0.0, index=0, load={"a": 30.0}) == ("b", "expected to answer first")
    routes.failed("a", 0.0)
    assert routes.choose(0, 0.0, index=0) == ("b", "expected to answer first"), "a banned replica has no turn"


def test_what_other_stages_take_bounds_the_guess_of_one_that_nothing_is_known_of() -> None:
    routes = Routes(msgspec.structs.replace(SETTINGS, stages=3), Random(0))
    routes.on_view((Member("a", 0), Member("b", 1), Member("c", 2)), 0.0)
    for seconds in (0.01, 0.02):  # a first stage's hops need no tensor
        routes.answered("a", seconds, 1.0, 0.0)
    assert not routes.knows("c") and routes.due("c", BACKWARD_SIZE) == PATIENCE * BACKWARD_SIZE * COLD_S
    for seconds in (0.1, 0.2):
        routes.answered("b", seconds, 1.0, 0.0)
    assert routes.knows("c") and routes.due("c", BACKWARD_SIZE) == PATIENCE * BACKWARD_SIZE * OTHERS * 0.2
    routes.answered("b", 20.0, 1.0, 0.0)
    assert routes.due("c", BACKWARD_SIZE) == PATIENCE * BACKWARD_SIZE * 20.0, "tensors that long are nobody's fault"


def test_a_deadline_has_time_for_what_its_trainer_has_there() -> None:
    """The last of twelve that were sent at once was called slow when the first had been answered, and sent elsewhere, too."""
    routes = some_routes("a", "b")
    assert routes.due("a", 1.0, ahead=11.0) == PATIENCE * COLD_S, "nothing is known of its pace"
    for ahead in (0.0, 1.0, 2.0):
        routes.answered("a", 0.5 * (1.0 + ahead), 1.0, 0.0, ahead=ahead)
    assert routes.due("b", 1.0) == pytest.approx(PATIENCE * 1.0)
    assert routes.due("b", 1.0, ahead=11.0) == pytest.approx(PATIENCE * 0.5 * 12)
    routes.slow("b", 1000.0, 1.0, 0.0)
    assert routes.due("a", 1.0, ahead=11.0) == pytest.approx(PATIENCE * 0.5 * 12), "timeouts do not lengthen it"

"""Who tells the leader that it waits in a round, for whom, and who does not: a round that gets on complains of nobody."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from tests.rounds import Group

from shoal.core.allreduce.waiting import (
    LEAST,
    NEWCOMER,
    SHARED,
    TELL,
    TELL_BEATS,
    COLD_Bps,
    Copies,
    LEAST_Bps,
    Pace,
    RoundTimes,
    Waiting,
)
from shoal.core.messages import GatherChunk, Peer, ReduceChunk, Resend, RoundWaits, Share

NAMES = ("a", "b", "c", "d")


def played(lost: Callable[[Peer, Peer, object], bool], until_waits: int = 1, seed: int = 0) -> Group:
    """Until so many have told of what they wait for, or all are done."""
    play = Group(NAMES, 4000, seed=seed)
    play.lost = lost
    play.begin()
    play.run(until=lambda: len(play.reduced) == len(NAMES) or len({peer for peer, _ in play.waits}) >= until_waits)
    return play


def first_of(lost: Callable[[Peer, Peer, object], bool]) -> Callable[[Peer, Peer, object], bool]:
    """Each part and sum is lost once at the most."""
    seen: set[tuple[Peer, Peer, int, bool]] = set()

    def once(source: Peer, target: Peer, message: object) -> bool:
        if not isinstance(message, ReduceChunk | GatherChunk):
            return False
        key = source, target, message.chunk, isinstance(message, GatherChunk)
        first = key not in seen
        seen.add(key)
        return first and lost(source, target, message)

    return once


def waiting(play: Group) -> dict[Peer, tuple[set[Peer], set[Peer]]]:
    """Whose parts and whose sums each has said that it lacks."""
    return {peer: (set(waits.parts), set(waits.sums)) for peer, waits in play.waits}


def test_a_round_that_gets_on_complains_of_nobody() -> None:
    for seed in range(8):
        play = played(lambda *_: False, seed=seed)
        assert len(play.reduced) == 4 and play.waits == []


def test_a_message_lost_now_and_then_is_asked_for_and_no_reason_to_complain() -> None:
    play = Group(NAMES, 4000, 500)
    play.lost = first_of(lambda source, target, message: play.rng.random() < 0.05)
    play.begin()
    play.run(until=lambda: len(play.reduced) == 4)
    assert len(play.reduced) == 4 and play.waits == []


def test_whoever_sends_no_parts_is_named_by_all_others() -> None:
    play = played(lambda source, target, message: source == "c" and isinstance(message, ReduceChunk), until_waits=3)
    assert play.reduced == {}
    complaints = waiting(play)
    assert all(complaints[peer][0] == {"c"} for peer in "abd")


def test_whoever_receives_nothing_names_all_others_and_is_named_for_its_sums() -> None:
    play = played(lambda source, target, message: target == "c", until_waits=4)
    complaints = waiting(play)
    assert complaints["c"][0] == {"a", "b", "d"}
    assert all(complaints[peer] == (set(), {"c"}) for peer in "abd")


def test_whoever_sends_no_sums_is_named_for_them_and_for_nothing_else() -> None:
    play = played(lambda source, target, message: source == "b" and isinstance(message, GatherChunk), until_waits=3)
    complaints = waiting(play)
    assert all(complaints[peer] == (set(), {"b"}) for peer in "acd") and "b" not in complaints


def test_it_is_told_of_the_round_under_way_and_to_the_leader_alone() -> None:
    play = played(lambda source, target, message: source == "c" and isinstance(message, ReduceChunk))
    assert all((waits.epoch, waits.step, waits.round) == (0, 3, 7) for _, waits in play.waits)
    assert not [message for _, _, message in play.sent if isinstance(message, RoundWaits)]


@pytest.mark.parametrize("kind", [ReduceChunk, GatherChunk])
def test_nothing_is_told_before_several_usual_times_without_anything_new(kind: type) -> None:
    play = Group(NAMES, 4000)
    play.lost = lambda source, target, message: source == "c" and isinstance(message, kind)
    play.begin()
    patience_s = max(LEAST * play.settings.min_request_timeout_s, 4 * 4000 / COLD_Bps)
    play.run(until=lambda: bool(play.waits))
    assert play.now >= max(TELL * patience_s, TELL_BEATS * play.settings.heartbeat_s)
    assert [1 for _, _, message in play.sent if isinstance(message, Resend)], "what is missing was asked for first"


def test_a_round_in_which_something_new_comes_now_and_then_is_slow_and_not_in_vain() -> None:
    """Every part of c is lost at first, piece after piece: long in all, but never long without anything new."""
    play = Group(NAMES, 8000, 500)
    play.lost = first_of(lambda source, target, message: source == "c" and isinstance(message, ReduceChunk))
    play.begin()
    play.run(until=lambda: len(play.reduced) == 4)
    assert len(play.reduced) == 4 and play.now > 4 * TELL * play.settings.min_request_timeout_s and play.waits == []


def test_whoever_waits_in_vain_says_so_with_every_beat() -> None:
    play = Group(NAMES, 4000)
    play.lost = lambda source, target, message: source == "c" and isinstance(message, ReduceChunk)
    play.begin()
    reported: list[float] = []

    def of_a() -> int:
        return sum(peer == "a" for peer, _ in play.waits)

    for many in range(1, 7):
        play.run(until=lambda many=many: of_a() == many)
        reported.append(play.now)
    pauses = [after - before for before, after in pairwise(reported)]
    assert pauses == pytest.approx([play.settings.heartbeat_s] * 5), "one of them may be lost"


def test_what_comes_after_all_withdraws_the_report() -> None:
    play = Group(NAMES, 4000)
    play.lost = lambda source, target, message: not play.waits and source == "c" and isinstance(message, ReduceChunk)
    play.begin()
    play.run(until=lambda: len(play.reduced) == 4)
    assert len(play.reduced) == 4
    newest = dict(play.waits)
    assert newest and all(not (waits.parts or waits.sums) for waits in newest.values())


def test_what_was_asked_for_in_vain_is_sent_at_once_although_it_was_sent_before() -> None:
    """Its first copy was lost, and all that asked for it before."""
    play = Group(NAMES, 4000)
    vain_s = TELL * play.settings.min_request_timeout_s

    def lost(source: Peer, target: Peer, message: object) -> bool:
        return play.now < vain_s and (
            isinstance(message, Resend) or (source == "c" and isinstance(message, ReduceChunk))
        )

    play.lost = lost
    play.begin()
    play.run(until=lambda: len(play.reduced) == 4)
    assert len(play.reduced) == 4 and play.now == vain_s


def test_with_the_first_report_what_is_missing_is_asked_for_at_once() -> None:
    pace = Pace(beat_s=0.5, least_s=2.0, usual_s=0.1, slow_s=0.1, piece_s=0.1)
    waiting = Waiting(ask_at=100.0, last_new=0.0)
    waiting.on_report(8.0)
    assert waiting.ask_at == 8.0
    waiting.on_asking(pace, 8.0)
    waiting.on_report(8.2)
    assert waiting.ask_at == 8.5


def test_while_the_leader_judges_what_is_missing_is_asked_for_with_every_beat_however_often_it_was_before() -> None:
    pace = Pace(beat_s=0.5, least_s=2.0, usual_s=0.1, slow_s=0.1, piece_s=0.1)
    waiting, at = Waiting(ask_at=0.0, last_new=0.0), 0.0
    for _ in range(20):
        waiting.on_asking(pace, at)
        at = waiting.ask_at
    assert at > 20 * 0.5, "less and less often"
    waiting.on_report(at)
    asked = []
    for _ in range(8):
        asked.append(waiting.ask_at - at)
        waiting.on_asking(pace, waiting.ask_at)
    assert asked[:5] == [0.0, 0.5, 1.0, 1.5, 2.0] and asked[-1] > 4.0


def test_whoever_is_asked_in_vain_for_a_sum_says_whose_part_it_lacks_itself() -> None:
    """b got the last that came to it later than the others, so that it does not wait in vain yet."""
    play = Group(NAMES, 4000)
    late: list[tuple[Peer, Peer]] = []

    def lost(source: Peer, target: Peer, message: object) -> bool:
        if (source, target) == ("d", "b") and isinstance(message, ReduceChunk) and play.now < 2.5:
            late.append((source, target))
            return True
        return (source, target) == ("c", "b") and isinstance(message, ReduceChunk)

    play.lost = lost
    play.begin()
    play.run(until=lambda: any(peer == "b" for peer, _ in play.waits))
    of_b = next(waits for peer, waits in play.waits if peer == "b")
    assert late and of_b.parts == ("c",) and not of_b.vain
    assert all(waits.sums == ("b",) and waits.vain for peer, waits in play.waits if peer != "b")


def test_a_report_says_at_which_piece_its_author_is() -> None:
    """b waits for c's sum of the first piece, and the others for b's parts of the second."""
    play = Group(NAMES, 8000, 4000)
    play.lost = lambda source, target, message: (source, target) == ("c", "b") and isinstance(message, GatherChunk)
    play.begin()
    play.run(until=lambda: len({peer for peer, _ in play.waits}) == 4)
    newest = dict(play.waits)
    assert newest["b"].sums == ("c",) and newest["b"].piece == 0
    assert all("b" in newest[peer].parts and newest[peer].piece == 1 for peer in "acd")


def usual_s(times: RoundTimes) -> float:
    return times.pace(1).usual_s


def slow_s(times: RoundTimes) -> float:
    return times.pace(1).slow_s


def shares(names: str, *rates: int) -> tuple[Share, ...]:
    return tuple(Share(name, (), rate) for name, rate in zip(names, rates or (0,) * len(names), strict=True))


def test_a_usual_round_is_one_in_which_nothing_was_lost() -> None:
    times = RoundTimes(0.5, 2.0)
    times.begin(1000, shares("ab"))
    for _ in range(5):
        times.end(3.0, lost=False)
    for _ in range(20):
        times.end(30.0, lost=True)
    assert usual_s(times) == 3.0, "the next loss would be asked for later and later"
    for _ in range(20):
        times.end(30.0, lost=False)
    assert usual_s(times) == 30.0 and times.pace(100).piece_s == pytest.approx(3.0)


def test_a_round_of_one_replica_says_nothing_of_lines() -> None:
    times = RoundTimes(0.5, 2.0)
    times.begin(10_000_000, shares("a"))
    times.end(0.1, lost=False)
    times.begin(10_000_000, shares("ab"))
    times.end(20.0, lost=False)
    times.end(20.0, lost=False)
    assert usual_s(times) == 20.0


def test_a_round_after_abandoned_ones_may_take_longer_and_one_with_new_peers_or_a_narrow_line() -> None:
    """What is asked for again is asked for as soon as ever: only the leader hears of it later."""
    times = RoundTimes(0.5, 2.0)
    times.begin(10_000_000, shares("abc", 0, 1000, 2000))
    assert (usual_s(times), slow_s(times)) == (8.0, 40.0), "1 MB/s"
    times.begin(10_000_000, shares("ab"))
    assert slow_s(times) == 8.0
    for _ in range(3):
        times.end(1.0, lost=False)
    for abandoned in (1, 2, 3, 3, 3):
        times.end(None, lost=False)
        assert (usual_s(times), slow_s(times)) == (1.0, 1.0 + abandoned), "their chunks fill the lines"
    times.end(8.0, lost=True)
    times.begin(10_000_000, shares("ab"))
    assert slow_s(times) == 1.0
    times.begin(10_000_000, shares("abc"))
    assert (usual_s(times), slow_s(times)) == (1.0, NEWCOMER)
    times.begin(100_000, shares("abc"))
    assert slow_s(times) == 1.0, "as narrow as lines are thought to be, it is quick"


def test_a_long_chunk_is_sent_again_less_and_less_often_and_a_short_one_whenever_it_is_asked_for() -> None:
    copies, chunk = Copies(), ("b", 0, False)
    copies.add(chunk, 500, 0.0)
    assert not copies.again(chunk, 5_000_000, vain=False, now=0.0), "the first copy may be on its way"
    sent = [now for now in range(1, 100) if copies.again(chunk, 5_000_000, vain=True, now=float(now))]
    assert sent == [1, 9, 25, 57], "20 MB take 4 s where a line is not known"
    copies.add(chunk, 500, 100.0)
    assert all(copies.again(chunk, 500, vain=True, now=100 + now / 2) for now in range(1, 8))
    copies.keep(lambda one: one[0] != "b")
    assert copies.again(chunk, 5_000_000, vain=False, now=104.0), "its connection has broken"


@pytest.mark.parametrize(("line_rate", "passed_s"), [(2_000, 10), (0, 4), (50_000, 0.4), (1, 20e6 / LEAST_Bps)])
def test_nothing_is_sent_again_before_my_line_has_passed_all_that_was_sent(line_rate: int, passed_s: float) -> None:
    """Copies that stand behind what they are to replace made a round of 35 s on a line of 2.2 MB/s one of 80."""
    copies, chunks = Copies(line_rate), [(peer, number, True) for peer in "bc" for number in range(4)]
    for chunk in chunks:
        copies.add(chunk, 5_000_000 // 8, 0.0)
    for place, chunk in enumerate(chunks, 1):
        left_at = SHARED * passed_s / 8 * place
        assert not copies.again(chunk, 625_000, vain=True, now=left_at * 0.999)
    passed_s *= SHARED
    assert copies.again(chunks[0], 625_000, vain=True, now=passed_s)
    assert not copies.again(chunks[0], 625_000, vain=True, now=passed_s * 1.124), "the second copy is on its way"
    copies.keep(lambda chunk: chunk[0] != "b")
    assert copies.again(chunks[1], 625_000, vain=False, now=passed_s), "its connection has broken"


def test_what_joiners_still_get_of_rounds_before_is_on_my_line_too() -> None:
    """A line of 3 MB/s passed a joiner's sums for 13 s of the next round, whose chunks were asked for and sent twice meanwhile."""
    play = Group(("a", "b"), 1_000_000, joiners=("j", "k"), line_rates=(2_000, 2_000))
    play.begin()
    play.run()
    assert {to for source, to, _ in play.heard if source == "a"} == {"j", "k"}, "each gets half a gradient of 4 MB"

    def free_at() -> float:
        current = play.rounds["a"].current
        assert current is not None
        return current.copies.free_at

    assert free_at() == pytest.approx(after := SHARED * 4 * 1.0, abs=0.01), "a part, a sum, and two joiners' sums"
    play.rounds["a"].turn(everything=False)
    play.begin("a", number=8)
    assert free_at() == pytest.approx(after, abs=0.01)
    play.rounds["a"].fail(play.a_round(8), "what was sent of it is withdrawn")
    play.begin("a", number=9)
    assert free_at() == pytest.approx(after, abs=0.01)


def test_a_chunk_that_came_late_was_slow_unless_it_is_a_copy() -> None:
    play = Group(NAMES, 4000)
    play.lost = first_of(lambda source, target, message: (source, target) == ("c", "b"))
    play.begin()
    play.run(until=lambda: len(play.reduced) == 4)
    copied = {(source, target) for source, target, message in play.sent if getattr(message, "again", False)}
    assert copied == {("c", "b")}


def test_without_a_leader_nobody_is_told() -> None:
    play = Group(NAMES, 4000)
    for rounds in play.rounds.values():
        rounds._replica.leader = None
    play.lost = lambda source, target, message: source == "c"
    play.begin()
    play.run(until=lambda: play.now > 200.0)
    assert play.waits == []

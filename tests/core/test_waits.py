"""Who tells the leader that it waits in a round, for whom, and who does not: a round that gets on complains of nobody."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.rounds import Group

from shoal.core.allreduce.rounds import TELL, TELL_BEATS
from shoal.core.messages import GatherChunk, Peer, ReduceChunk, Resend, RoundWaits

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
    patience_s = max(play.settings.min_request_timeout_s, play.rounds["a"]._patience_s)
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


def test_without_a_leader_nobody_is_told() -> None:
    play = Group(NAMES, 4000)
    for rounds in play.rounds.values():
        rounds._replica.leader = None
    play.lost = lambda source, target, message: source == "c"
    play.begin()
    play.run(until=lambda: play.now > 200.0)
    assert play.waits == []

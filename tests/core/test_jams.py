"""When nothing is booked: who is evicted by what owners and servers say, who loses a microbatch, and who is left in peace."""

from __future__ import annotations

from math import inf

import msgspec
import pytest

from shoal.core.leader.books.jams import (
    ALONE,
    ASK_BEATS,
    DISPUTE_FLOORS,
    FRESH_BEATS,
    GAPS,
    HOLD_BEATS,
    LONGEST,
    MANY,
    MANY_LONGEST,
    PARTS,
    QUICK_BEATS,
    UNSURE,
    USUAL,
    WITNESSES,
    Jams,
    Outcome,
)
from shoal.core.leader.books.stalls import FIRST, HOPS, Stalls
from shoal.core.leader.ledger import Ledger
from shoal.core.messages import Booker, BookerRequest, Booking, Member, Phase, Send, Settings, View

SETTINGS = Settings(stages=2, microbatches=6, steps=9)
MEMBERS = tuple(Member(peer, "abcdef".index(peer) // 3) for peer in "abcdef")  # a, b, c at stage 0, d, e, f at stage 1
VIEW = View(number=5, step=3, members=MEMBERS, owners=tuple(range(6)), phase=Phase.TRAINING, since=4)
BEAT_S = SETTINGS.heartbeat_s
QUICK_S = max(QUICK_BEATS * BEAT_S, SETTINGS.min_request_timeout_s)


class Jam:
    """The last three microbatches lack at stage 1, those of d, e and f; the others took 0.2 s."""

    def __init__(self, view: View = VIEW) -> None:
        self.view, self.now, self.slowest_s, self.expected = view, 0.0, 0.0, 0.0
        self.stalls, self.jams, self.ledger = Stalls(SETTINGS), Jams(SETTINGS), Ledger(2, 6)
        self.heard = dict.fromkeys("abcdef", 0.0)
        self.stalls.on_step(0.0, first=False)
        self.stalls.on_view(view)
        self.now = 0.2
        assert not self.ledger.report("a", tuple(map(Booking, range(6))))
        assert not self.ledger.report("d", tuple(map(Booking, range(3))), 1)
        self.look()

    def look(self, silent: str = "") -> Outcome:
        self.heard |= {peer: self.now for peer in "abcdef" if peer not in silent}
        self.stalls.ask(self.view, self.ledger, 0.0, inf, self.now)
        return self.jams.look(
            self.view, self.ledger, self.stalls, self.slowest_s, inf, self.expected, self.heard, self.now
        )

    def beat(self, *answers: tuple[str, int, str, int], silent: str = "") -> Outcome:
        """A beat later, and what each says to what it is asked: peer, microbatch, for whom it waits, how many were late with it."""
        self.now += BEAT_S
        outcome = self.look(silent)
        asked = {(send.peer, send.message.index) for send in outcome.commands if isinstance(send, Send)}
        assert all(isinstance(send.message, BookerRequest) for send in outcome.commands if isinstance(send, Send))
        for peer, index, at, slow in answers:
            if (peer, index) in asked:
                self.jams.on_answer(peer, Booker(0, 3, index, 1, at=at, slow=slow), self.now)
        return outcome

    def until(self, *answers: tuple[str, int, str, int], most_s: float = 60.0, silent: str = "") -> Outcome:
        """Until somebody is found, or nobody is."""
        while self.now < most_s:
            outcome = self.beat(*answers, silent=silent)
            if outcome.verdicts or outcome.moves:
                return outcome
        return Outcome()

    def convicted(self, *answers: tuple[str, int, str, int], silent: str = "") -> list[str]:
        """Whoever is evicted within a minute, whatever goes to other owners."""
        while self.now < 60.0:
            if outcome := self.beat(*answers, silent=silent).verdicts:
                return [peer for peer, _ in outcome]
        return []


def peers(outcome: Outcome) -> list[str]:
    return [peer for peer, _ in outcome.verdicts]


def test_nobody_is_asked_while_books_grow_and_nobody_is_judged_at_once() -> None:
    jam = Jam()
    assert jam.beat().commands == []
    outcome = jam.beat()
    assert {send.peer for send in outcome.commands if isinstance(send, Send)} == {"d", "e", "f"}
    jam.ledger.report("e", (Booking(3),), 1)
    assert jam.beat().commands == []


def test_a_server_that_two_owners_find_late_is_evicted_within_a_few_beats() -> None:
    jam = Jam()
    outcome = jam.until(("d", 3, "a", 1), ("e", 4, "a", 1), ("a", 3, "a", 0), ("a", 4, "a", 0))
    assert peers(outcome) == ["a"] and "d and e" in outcome.verdicts[0][1]
    assert jam.now <= 0.2 + QUICK_S + (HOLD_BEATS + 3) * BEAT_S


@pytest.mark.parametrize("answers", [
    (("d", 3, "a", 1), ("a", 3, "a", 0)),
    (("d", 3, "a", 1), ("e", 4, "b", 1), ("a", 3, "a", 0), ("b", 4, "b", 0)),
])  # fmt: skip
def test_one_owner_alone_evicts_no_server(answers: tuple[tuple[str, int, str, int], ...]) -> None:
    assert Jam().convicted(*answers) == []


def test_owners_without_a_measure_are_believed_after_longer_than_anything_took() -> None:
    jam = Jam()
    jam.stalls.gaps.longest_s = 3.0
    said = ("d", 3, "a", 0), ("e", 4, "a", 0), ("a", 3, "a", 0), ("a", 4, "a", 0)
    assert jam.convicted(*said) == ["a"] and jam.now > LONGEST * 3.0


def test_a_peer_that_is_silent_is_not_judged_its_process_may_have_been_stopped() -> None:
    jam = Jam()
    assert jam.convicted(("d", 3, "a", 1), ("e", 4, "a", 1), silent="a") == []
    assert jam.now > FRESH_BEATS * BEAT_S
    assert jam.beat(("d", 3, "a", 1), ("e", 4, "a", 1)).verdicts == [], "it is heard again, and may answer now"


def test_a_server_that_waits_for_a_tensor_names_whoever_does_not_give_it() -> None:
    """All owners wait for d and e, which wait for a."""
    jam = Jam()
    outcome = jam.until(("d", 3, "e", 1), ("f", 5, "d", 1), ("e", 3, "a", 0), ("d", 5, "a", 0))
    assert peers(outcome) == ["a"]


def test_one_server_alone_evicts_no_maker_of_tensors_and_is_not_evicted_for_its_word() -> None:
    assert Jam().convicted(("d", 3, "e", 1), ("f", 5, "e", 1), ("e", 3, "a", 0), ("e", 5, "a", 0)) == []


def test_servers_are_remembered_while_owners_go_from_one_to_the_next() -> None:
    jam = Jam()
    for _ in range(6):
        assert jam.beat(("d", 3, "e", 1), ("e", 3, "a", 0)).verdicts == []
    outcome = jam.until(("d", 3, "f", 2), ("f", 3, "a", 0))
    assert peers(outcome) == ["a"]


def test_of_a_stage_with_one_replica_nobody_is_evicted() -> None:
    alone = tuple(member for member in MEMBERS if member.peer not in "bc")
    jam = Jam(msgspec.structs.replace(VIEW, members=alone, owners=(0, 0, 0, 1, 2, 3)))
    assert jam.convicted(("d", 3, "a", 1), ("e", 4, "a", 1), ("a", 3, "a", 0), ("a", 4, "a", 0)) == []


def test_a_microbatch_that_its_server_never_got_goes_to_another_owner() -> None:
    jam = Jam()
    outcome = jam.until(("d", 3, "a", 0), ("a", 3, "", 0))
    assert outcome.verdicts == [] and list(outcome.moves) == [3] and "which has not got it" in outcome.moves[3]
    decided = jam.stalls.takeovers(VIEW, outcome.moves, "b")
    assert decided.struck == {"d": 0} and VIEW.members[decided.owners[3]].peer not in "da"


def test_an_owner_has_time_to_ask_before_its_server_is_said_to_have_got_nothing() -> None:
    jam, first = Jam(), inf
    while not (outcome := jam.beat(("d", 3, "a", 0), ("a", 3, "", 0))).moves:
        if any(isinstance(send, Send) and send.peer == "a" for send in outcome.commands):
            first = min(first, jam.now)
    assert jam.now - first >= HOLD_BEATS * BEAT_S + DISPUTE_FLOORS * SETTINGS.min_request_timeout_s


def test_an_owner_that_several_servers_got_nothing_from_is_evicted() -> None:
    jam = Jam(msgspec.structs.replace(VIEW, owners=(0, 1, 2, 3, 3, 5)))
    outcome = jam.until(("d", 3, "a", 0), ("d", 4, "b", 0), ("a", 3, "", 0), ("b", 4, "", 0))
    assert set(peers(outcome)) == {"d"} and WITNESSES == 2


def test_a_server_that_never_gets_what_several_owners_send_is_evicted() -> None:
    jam = Jam()
    outcome = jam.until(("d", 3, "a", 0), ("e", 4, "a", 0), ("a", 3, "", 0), ("a", 4, "", 0))
    assert set(peers(outcome)) == {"a"}


def test_of_two_owners_and_two_servers_in_dispute_nobody_can_tell_who_lies() -> None:
    jam = Jam(msgspec.structs.replace(VIEW, owners=(0, 1, 3, 3, 4, 4)))
    jam.ledger = Ledger(2, 6)
    jam.ledger.report("a", tuple(map(Booking, range(6))))
    jam.ledger.report("d", tuple(map(Booking, range(2))), 1)
    said = [("d", 2, "a", 0), ("d", 3, "b", 0), ("e", 4, "a", 0), ("e", 5, "b", 0)]
    outcome = jam.until(*said, *((at, index, "", 0) for _, index, at, _ in said))
    assert outcome.verdicts == [] and set(outcome.moves) == {2, 3, 4, 5}


def test_a_swarm_whose_hops_or_bookings_take_long_is_left_alone_for_as_long() -> None:
    said = ("d", 3, "a", 1), ("e", 4, "a", 1), ("a", 3, "a", 0), ("a", 4, "a", 0)
    slow, rare = Jam(), Jam()
    slow.slowest_s, rare.stalls.gaps.before_s = 3.0, 8.0
    assert peers(slow.until(*said)) == ["a"] and slow.now >= HOPS * 3.0
    assert peers(rare.until(*said)) == ["a"] and rare.now >= GAPS * 8.0


def test_who_has_booked_what_two_owners_wait_for_is_late_by_no_measure() -> None:
    jam = Jam()
    jam.stalls.gaps.longest_s = 3.0
    for _ in range(60):
        outcome = jam.beat(("d", 3, "a", 0), ("e", 4, "a", 0))
        for index in (3, 4):
            jam.jams.on_answer("a", Booker(0, 3, index, 1, peer="a"), jam.now)
        if outcome.verdicts:
            break
    assert peers(outcome) == ["a"] and jam.now < LONGEST * 3.0


def test_an_owner_that_waits_alone_for_a_server_hands_its_microbatch_over() -> None:
    jam = Jam()
    outcome = jam.until(("d", 3, "a", 1), ("a", 3, "a", 0))
    assert outcome.verdicts == [] and list(outcome.moves) == [3] and jam.now >= ALONE * QUICK_S
    assert jam.stalls.takeovers(VIEW, outcome.moves, "b").verdicts == ()


def handed_over(said: str) -> Jam:
    """Microbatch 3, the only one for which anybody waits, is e's now: d waited alone for a, which said that of it."""
    jam = Jam()
    assert list(jam.until(("d", 3, "a", 1), ("a", 3, said, 0)).moves) == [3]
    jam.view = msgspec.structs.replace(VIEW, number=6, owners=(0, 1, 2, 4, 4, 5))
    jam.stalls.on_view(jam.view)
    return jam


def test_the_second_that_waits_alone_for_a_server_convicts_it() -> None:
    """One microbatch is left, so that never two owners wait at once: it went from owner to owner, 5 s each, and an honest one was
    evicted in the end (strangers, seed 127)."""
    jam = handed_over("a")
    handed_s = jam.now
    outcome = jam.until(("e", 3, "a", 1), ("a", 3, "a", 0))
    assert peers(outcome) == ["a"] and "d and e" in outcome.verdicts[0][1] and outcome.moves == {}
    assert jam.now - handed_s <= QUICK_S + (HOLD_BEATS + 3) * BEAT_S


def test_who_waited_alone_before_is_forgotten_when_books_grow() -> None:
    jam = handed_over("a")
    jam.ledger.report("e", (Booking(4),), 1)
    outcome = jam.until(("e", 3, "a", 1), ("a", 3, "a", 0))
    assert outcome.verdicts == [] and list(outcome.moves) == [3]


def test_the_word_of_who_waited_alone_and_was_evicted_is_void() -> None:
    jam = handed_over("a")
    members = tuple(member for member in MEMBERS if member.peer != "d")
    jam.view = msgspec.structs.replace(VIEW, number=7, members=members, owners=(0, 1, 2, 3, 3, 4))
    jam.stalls.on_view(jam.view)
    outcome = jam.until(("e", 3, "a", 1), ("a", 3, "a", 0))
    assert outcome.verdicts == [] and list(outcome.moves) == [3]


def test_who_waited_for_a_server_that_waits_for_another_convicts_nobody() -> None:
    jam = handed_over("b")
    assert peers(jam.until(("e", 3, "a", 1), ("a", 3, "a", 0))) == []


def test_a_leader_that_came_in_the_middle_of_a_step_hands_nothing_over() -> None:
    """It does not know who has had it. A hand-over that is decided again and again and never made would keep the rules for all that hangs
    from ever deciding (strangers/member/rate, seed 0: no commit for six minutes)."""
    jam = Jam()
    jam.stalls.on_step(0.0, first=True)
    outcome = jam.until(("d", 3, "a", 0), ("a", 3, "", 0))
    assert outcome.moves == {} and outcome.verdicts == []


def test_what_a_wait_took_for_which_somebody_is_to_blame_is_no_measure_and_asking_needs_none() -> None:
    """The second of two liars had three times as long as the first: what that one had cost was taken for usual."""
    jam = Jam()
    for _ in range(8):
        jam.beat(("d", 3, "a", 1), ("a", 3, "a", 0))
    jam.ledger.report("e", tuple(map(Booking, (3, 4))), 1)
    jam.beat()
    assert jam.stalls.gaps.now_s < 1.0
    jam.stalls.gaps.now_s = 8.0
    assert not any(jam.beat().commands for _ in range(1)) and jam.beat().commands, "asked after two beats all the same"


def test_a_wait_for_which_nobody_is_to_blame_is_a_measure() -> None:
    jam = Jam()
    for _ in range(8):
        jam.beat(("d", 3, "a", 0), ("a", 3, "a", 0))
    jam.ledger.report("e", tuple(map(Booking, (3, 4))), 1)
    jam.beat()
    assert jam.stalls.gaps.now_s > 7 * BEAT_S


def test_a_server_that_several_are_about_to_convict_keeps_what_it_has_until_then() -> None:
    """Owners have waited for long when judging begins: handing over at once would take the word of each away."""
    jam = Jam()
    jam.stalls.gaps.before_s = 8.0
    outcome = jam.until(("d", 3, "a", 1), ("e", 4, "a", 1), ("a", 3, "a", 0), ("a", 4, "a", 0))
    assert outcome.moves == {} and peers(outcome) == ["a"]


def test_an_owner_that_waits_for_itself_loses_it_without_blame() -> None:
    jam = Jam()
    outcome = jam.until(("d", 3, "d", 1))
    assert outcome.verdicts == [] and list(outcome.moves) == [3] and "waits for itself" in outcome.moves[3]
    assert jam.now <= 0.2 + ASK_BEATS * BEAT_S + QUICK_S + 2 * BEAT_S
    assert jam.stalls.takeovers(VIEW, outcome.moves, "b").struck == {"d": 0}
    jam = Jam()
    jam.stalls.gaps.longest_s = 3.0
    assert jam.until(("d", 3, "d", 0)).moves and jam.now >= LONGEST * 3.0, "not before longer than anything took"


def test_a_maker_that_four_servers_wait_for_is_judged_sooner_than_one_that_two_wait_for() -> None:
    many = tuple(Member(peer, "abcdefgh".index(peer) // 4) for peer in "abcdefgh")
    view = msgspec.structs.replace(VIEW, members=many, owners=(0, 1, 2, 4, 5, 6))
    times = []
    for count in (2, MANY):
        jam = Jam(view)
        jam.heard |= dict.fromkeys("gh", 0.0)
        jam.stalls.gaps.longest_s = 3.0
        jam.ledger = Ledger(2, 6)
        jam.ledger.report("a", (Booking(0),))
        at = "efgh"[:count]
        said = [(owner, index, at[index % count], 0) for index, owner in enumerate("abcefg")]
        outcome = jam.until(*said, *((server, index, "d", 0) for _, index, server, _ in said))
        assert peers(outcome) == ["d"]
        times.append(jam.now)
    assert times[1] < times[0] and times[1] > MANY_LONGEST * 3.0


def test_in_a_first_step_nobody_is_judged_before_books_can_have_grown() -> None:
    """Hops end one in a second by what lines carry: all forwards come first, and owners find late what waits in line."""
    said = ("d", 3, "a", 1), ("e", 4, "a", 1), ("a", 3, "a", 0), ("a", 4, "a", 0)
    quick, slow = Jam(), Jam()
    slow.expected = 1.0
    assert quick.convicted(*said) == slow.convicted(*said) == ["a"]
    grown_s = USUAL * UNSURE * (6 / PARTS) / slow.expected  # a part of half of the step
    assert quick.now < 6.0 and grown_s < slow.now < grown_s + 3.0
    assert not quick.jams.in_time(quick.now) and not slow.jams.in_time(slow.now)
    slow.jams.clear()
    slow.look()
    assert slow.jams.in_time(slow.now), "books begin anew"
    assert not slow.jams.in_time(slow.now + (ASK_BEATS + 1) * BEAT_S), "all is booked: nobody looks"


def after_a_step_of(seconds: float, booked: int, count: int = 96) -> tuple[Jam, float]:
    """A jam in the step after one of so long, in which so many of its bookings are in the books; when that step began."""
    view = msgspec.structs.replace(VIEW, owners=tuple(index % 6 for index in range(count)))
    jam = Jam(view)
    jam.jams, jam.ledger = Jams(SETTINGS), Ledger(2, count)
    jam.jams.on_step(0.0)
    for index in range(count):
        jam.now = seconds * (index + 1) / count
        jam.ledger.report("a", tuple(map(Booking, range(index + 1))))
        jam.ledger.report("d", tuple(map(Booking, range(index + 1))), 1)
        jam.look()
    jam.jams.on_step(jam.now)
    jam.stalls.on_step(jam.now, first=False)
    jam.ledger = Ledger(2, count)
    if booked:
        jam.ledger.report("a", tuple(map(Booking, range(booked))))
    jam.look()
    return jam, jam.now


@pytest.mark.parametrize(("booked", "times"), [(0, FIRST), (24, USUAL)])
@pytest.mark.parametrize("step_s", [1.0, 50.0])
def test_where_steps_are_long_books_are_given_the_time_that_they_usually_take(
    step_s: float, booked: int, times: float
) -> None:
    """On lines of 50 Mbit/s in eight regions the first eighth was booked after 12 s of steps of 50 s, when owners found hops late that
    stood in the lines: four honest peers of eight were evicted."""
    jam, began = after_a_step_of(step_s, booked)
    jam.stalls.gaps.before_s = 0.0
    owners = [(owner, index, "b", 1) for index, owner in enumerate("abcdef") if owner != "b"]
    owners = [(owner, index + booked, at, slow) for owner, index, at, slow in owners]
    outcome = jam.until(*owners, *(("b", index, "b", 0) for _, index, _, _ in owners), most_s=200.0)
    part_s = step_s * (192 - booked) / 192 / PARTS
    assert peers(outcome) == ["b"]
    least_s = max(QUICK_S, times * part_s)
    assert least_s < jam.now - began <= least_s + (HOLD_BEATS + 4) * BEAT_S

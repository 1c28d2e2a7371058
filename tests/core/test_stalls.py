"""When books stop growing: who is asked, what is made of the answers, who gets a microbatch that hangs, and who goes."""

from __future__ import annotations

from math import inf

import msgspec
import pytest

from shoal.core.leader.books.stalls import (
    ANSWER_BEATS,
    ASKED,
    FIRST,
    FLOORS,
    HOPS,
    KNOWN,
    LONGER,
    QUIET_BEATS,
    REST,
    SLOW,
    STRIKES,
    TOO_LONG,
    Stalls,
    Takeovers,
)
from shoal.core.leader.evictions import COMPLAINTS, Conduct
from shoal.core.leader.ledger import Ledger
from shoal.core.leader.membership import most_resting, owners_of
from shoal.core.messages import Booker, BookerRequest, Booking, Member, Phase, Send, Settings, View

SETTINGS = Settings(stages=2, microbatches=4, steps=9)
MEMBERS = (Member("a", 0), Member("b", 0), Member("c", 1), Member("d", 1))
VIEW = View(
    number=5, step=3, members=MEMBERS, owners=(0, 1, 2, 3), phase=Phase.TRAINING, since=4
)  # owned by a, b, c, d
LONG_S = max(QUIET_BEATS * SETTINGS.heartbeat_s, FLOORS * SETTINGS.min_request_timeout_s)
ANSWER_S = ANSWER_BEATS * SETTINGS.heartbeat_s


class Step:
    """Leader a has led since the step began. Everything is booked but what is named; the rest hangs."""

    def __init__(
        self, open_: tuple[tuple[int, int], ...] = ((1, 1),), view: View = VIEW, *, first: bool = False
    ) -> None:
        self.now, self.view = 0.0, view
        self.conduct, self.stalls = Conduct(), Stalls(SETTINGS)
        self.ledger = Ledger(2, 4)
        for stage, peers in enumerate(("ab", "cd")):
            self.book(peers[0], *(index for index in range(4) if (index, stage) not in open_))
        self.stalls.on_step(0.0, first=first)
        self.stalls.on_view(view)
        self.asked: list[tuple[str, int, int]] = []
        self.ask()

    def book(self, peer: str, *indices: int) -> None:
        held = self.ledger.books.get(peer, ())
        assert self.ledger.report(peer, held + tuple(Booking(index) for index in indices)) == ""

    def ask(self, slowest_s: float = 0.0, most_s: float = inf) -> list[tuple[str, int, int]]:
        """Who is asked for which microbatch of which stage."""
        commands = self.stalls.ask(self.view, self.ledger, slowest_s, most_s, self.now)
        sends = [one for one in commands if isinstance(one, Send)]
        self.asked = [
            (one.peer, one.message.index, one.message.stage) for one in sends if isinstance(one.message, BookerRequest)
        ]
        return self.asked

    def hang(self) -> None:
        """Nothing is booked for long, and owners are asked."""
        self.now += LONG_S
        assert self.ask()

    def answer(self, owner: str, index: int = 1, stage: int = 1, **fields: object) -> None:
        """Late by its owner's own measure, unless it is said to be in time (`slow=0`)."""
        fields = {"slow": 1} | fields
        self.stalls.on_answer(owner, msgspec.structs.replace(Booker(0, 3, index, stage), **fields), self.now)

    def judge(self, after_s: float = 0.0) -> tuple[list[str], dict[int, str]]:
        self.now += after_s
        verdicts, moves = self.stalls.judge(self.view, self.ledger, self.conduct, self.now)
        return [f"{peer}: {why}" for peer, why in verdicts], moves

    def reassign(self, moves: dict[int, str]) -> tuple[list[str], list[str]]:
        """Owners afterwards, and who is evicted instead."""
        decided = self.stalls.takeovers(self.view, moves, "a")
        self.stalls.settle(decided)
        owners, verdicts = decided.owners, decided.verdicts
        self.view = msgspec.structs.replace(self.view, number=self.view.number + 1, owners=owners)
        self.stalls.on_view(self.view)
        return [MEMBERS[at].peer for at in owners], [peer for peer, _ in verdicts]


# -------------------------------------------------------------------------------------------------------------- asking


def test_owners_are_asked_when_nothing_is_booked_for_long_and_not_before() -> None:
    step = Step(((1, 0), (3, 1)))
    step.now = LONG_S - 0.1
    assert step.ask() == []
    step.now = LONG_S
    assert step.ask() == [("b", 1, 0), ("d", 3, 1)]


def test_a_slow_step_that_gets_on_is_left_alone() -> None:
    step = Step(((0, 1), (1, 1), (2, 1)))
    for index in range(3):
        step.now += LONG_S - 0.1
        assert step.ask() == []
        step.book("d", index)
        assert step.ask() == []


def test_neither_beats_nor_hops_may_be_too_short_for_a_stall() -> None:
    for heartbeat_s, min_request_timeout_s, quiet_s in ((0.5, 10.0, FLOORS * 10.0), (3.0, 2.0, QUIET_BEATS * 3.0)):
        step = Step()
        step.stalls = Stalls(
            msgspec.structs.replace(SETTINGS, heartbeat_s=heartbeat_s, min_request_timeout_s=min_request_timeout_s)
        )
        step.ask()
        step.now = quiet_s - 0.1
        assert step.ask() == []
        step.now = quiet_s
        assert step.ask() == [("b", 1, 1)]


def test_the_slowest_peers_hops_are_waited_for() -> None:
    step = Step()
    step.now = HOPS * 5.0 - 0.1
    assert step.ask(slowest_s=5.0) == []
    step.now = HOPS * 5.0
    assert step.ask(slowest_s=5.0) == [("b", 1, 1)]


def test_the_first_booking_of_a_step_gets_more_time() -> None:
    step = Step(tuple((index, stage) for index in range(4) for stage in range(2)))
    step.now = FIRST * LONG_S - 0.1
    assert step.ask() == []
    step.now = FIRST * LONG_S
    assert step.ask() == [(peer, index, 1) for index, peer in enumerate("abcd")]


def test_a_few_microbatches_are_asked_after_at_a_time() -> None:
    many = ASKED + 4
    stalls, ledger = Stalls(SETTINGS), Ledger(2, many)
    view = msgspec.structs.replace(VIEW, owners=(0,) * many)
    ledger.report("a", (Booking(0),))
    stalls.ask(view, ledger, 0.0, inf, 0.0)
    assert len(stalls.ask(view, ledger, 0.0, inf, LONG_S)) == ASKED


def test_however_slow_a_peer_says_it_is_the_leader_asks_and_acts_before_its_followers_doubt_it() -> None:
    """Found 2026-11-25: a leader waited 80 times a median hop, its followers 24 s, and leader after leader was doubted."""
    step, most_s = Step(), 9.0
    step.now = most_s - 0.1
    assert not step.ask(slowest_s=30.0, most_s=most_s)
    step.now = most_s
    assert step.ask(slowest_s=30.0, most_s=most_s) == [("b", 1, 1)]
    step.answer("b", at="c", slow=0)
    step.now += most_s - 0.1
    assert step.stalls.judge(step.view, step.ledger, step.conduct, step.now) == ([], {})
    step.now += 0.2
    _, moves = step.stalls.judge(step.view, step.ledger, step.conduct, step.now)
    assert moves == {1: "b waits for microbatch 1 of stage 1 at c"}


def test_a_leader_that_was_stopped_waits_anew() -> None:
    step = Step()
    step.hang()
    step.now += 500.0
    step.stalls.forgive(step.now)
    assert step.ask() == [] and step.judge() == ([], {})


# ------------------------------------------------------------------------------------------------------------- judging


def test_an_owner_that_does_not_answer_loses_that_microbatch_and_not_its_place() -> None:
    step = Step()
    step.hang()
    assert step.judge(ANSWER_S) == ([], {})
    assert step.judge(0.1) == ([], {1: "b does not say where microbatch 1 of stage 1 is"})


def test_answers_of_others_about_other_stages_and_unasked_ones_count_for_nothing() -> None:
    step = Step()
    step.hang()
    step.answer("c", at="d")
    step.answer("b", stage=0, at="d")
    step.answer("a", index=0, at="d")
    assert step.judge(ANSWER_S + 0.1)[1] == {1: "b does not say where microbatch 1 of stage 1 is"}


def test_an_owner_that_has_just_begun_to_wait_for_a_server_goes_on_waiting() -> None:
    step = Step()
    step.hang()
    for at in ("c", "d", "c", "d"):
        step.answer("b", at=at)
        assert step.judge(LONG_S - 0.1) == ([], {})


def test_a_microbatch_that_waits_for_one_server_for_long_gets_another_owner() -> None:
    step = Step()
    step.hang()
    for _ in range(16):
        step.answer("b", at="d")
        assert step.judge(LONG_S / 16) == ([], {})
    step.answer("b", at="d")
    assert step.judge(0.1) == ([], {1: "b waits for microbatch 1 of stage 1 at d"})


def test_one_owner_alone_evicts_no_server_however_many_of_its_microbatches_wait() -> None:
    view = msgspec.structs.replace(VIEW, owners=(1, 1, 1, 1))
    step = Step(((0, 1), (1, 1), (2, 1)), view)
    step.hang()
    for index in range(3):
        step.answer("b", index, at="d")
    verdicts, moves = step.judge(LONG_S + 0.1)
    assert verdicts == [] and moves.keys() == {0, 1, 2}


def test_a_server_that_two_owners_wait_for_is_evicted() -> None:
    step = Step(((0, 1), (1, 1)))
    step.hang()
    step.answer("a", 0, at="d")
    step.answer("b", 1, at="d")
    verdicts, moves = step.judge(LONG_S + 0.1)
    assert verdicts == ["d: keeps 2 owners waiting, the last for microbatch 1 of stage 1"] and moves.keys() == {0}


def test_two_processes_of_one_key_are_one_owner() -> None:
    view = msgspec.structs.replace(VIEW, members=(Member("k.1", 0), Member("k.2", 0), *MEMBERS[2:]))
    step = Step(((0, 1), (1, 1)), view)
    step.book("k.1", 0, 1, 2, 3)
    step.ask()
    step.hang()
    step.answer("k.1", 0, at="d")
    step.answer("k.2", 1, at="d")
    verdicts, moves = step.judge(LONG_S + 0.1)
    assert verdicts == [] and moves.keys() == {0, 1}


def test_accusers_of_a_step_before_are_forgotten() -> None:
    step = Step(((0, 1), (1, 1)))
    step.hang()
    step.answer("a", 0, at="d")
    step.judge(LONG_S + 0.1)
    step.stalls.on_step(step.now, first=False)
    step.ask()
    step.hang()
    step.answer("b", 1, at="d")
    assert step.judge(LONG_S + 0.1)[0] == []


def test_an_owner_that_waits_for_what_the_server_has_booked_loses_it_and_a_second_one_convicts_the_server() -> None:
    step = Step()
    step.hang()
    step.answer("b", at="c")
    step.ledger.books["c"] += (Booking(1),)
    assert step.judge(LONG_S + 0.1) == (
        [],
        {1: "b waits for microbatch 1 of stage 1 at c"},
    )
    step = Step(((1, 0), (2, 0)))
    step.hang()
    for owner, index in (("b", 1), ("c", 2)):
        step.answer(owner, index, 0, at="a")
        step.ledger.books["a"] += (Booking(index),)
    assert step.judge(LONG_S + 0.1)[0] == ["a: keeps 2 owners waiting, the last for microbatch 2 of stage 0"]


def test_whoever_has_booked_the_stage_above_and_does_not_say_so_is_late_however_patient_the_owner_is() -> None:
    step = Step(((1, 0),))
    step.hang()
    step.answer("b", 1, 0, at="c", slow=0)
    assert step.judge(LONG_S + 0.1) == ([], {1: "b waits for microbatch 1 of stage 0 at c"})


def test_a_hop_that_is_said_to_run_far_longer_than_any_is_late_although_its_owner_has_no_measure() -> None:
    step = Step()
    step.now += LONG_S
    assert step.ask(slowest_s=0.1)
    step.answer("b", 1, 1, at="d", slow=0)
    assert step.judge(TOO_LONG * LONG_S) == ([], {})
    assert step.judge(0.1) == ([], {1: "b waits for microbatch 1 of stage 1 at d"})
    step = Step()
    step.hang()
    step.answer("b", 1, 1, at="d", slow=0)
    assert step.judge(100 * LONG_S) == ([], {}), "where no hop is measured the first one may take minutes"


def test_owners_are_asked_sooner_where_steps_are_known_to_be_quick() -> None:
    step, short_s = Step(), FLOORS * SETTINGS.min_request_timeout_s
    for _ in range(KNOWN):
        assert step.ask() == []
        step.now += 0.1
        step.book("d", 1)
        assert step.ask() == []
        step.ledger = Ledger(2, 4)
        step.stalls.on_step(step.now, first=False)
    step.ask()
    step.now += short_s
    assert step.ask()


def test_a_wait_that_a_remedy_ended_is_no_measure_of_the_next() -> None:
    """One owner that does nothing would make the others wait three times as long for it, again and again."""
    step = Step(((1, 1), (2, 1)))
    step.hang()
    step.reassign(step.judge(ANSWER_S + 0.1)[1])
    step.book("d", 1)
    step.ask()
    step.now += LONG_S
    assert step.ask()


def test_an_owner_that_gets_nowhere_with_one_hands_over_all_that_hang() -> None:
    view = msgspec.structs.replace(VIEW, owners=(0, 1, 1, 3))
    step = Step(((1, 1), (2, 1)), view)
    step.hang()
    step.answer("b", 1, at="d", slow=SLOW)
    step.answer("b", 2, at="d", slow=SLOW - 1)
    assert step.judge()[1].keys() == {1, 2}


def test_an_owner_that_names_nobody_for_long_loses_it_too() -> None:
    """It cannot read its data, say, or finds no free replica."""
    step = Step()
    step.hang()
    step.answer("b")
    assert step.judge(LONG_S) == ([], {})
    assert step.judge(0.1) == ([], {1: "b has asked nobody for microbatch 1 of stage 1"})
    step = Step()
    step.hang()
    for at in ("d", "", "c", ""):
        step.answer("b", at=at)
        assert step.judge(LONG_S - 0.1) == ([], {}), "it gets on"


def test_an_owner_that_gives_up_on_several_servers_or_waits_for_itself_loses_the_microbatch() -> None:
    step = Step()
    step.hang()
    step.answer("b", at="d", slow=SLOW - 1)
    assert step.judge() == ([], {}), "one slow server is the server's affair"
    step.answer("b", at="d", slow=SLOW)
    assert step.judge() == ([], {1: "b gets no answer for microbatch 1 of stage 1 from 2 peers"})
    step = Step()
    step.hang()
    step.answer("b", at="b")
    assert step.judge(LONG_S + 0.1) == ([], {1: "b gets nowhere with microbatch 1 of stage 1"})


def test_a_server_whose_books_lack_what_its_owner_has_is_convicted_by_several_complaints() -> None:
    step = Step()
    step.hang()
    step.answer("b", peer="d")
    assert step.judge(ANSWER_S) == ([], {}), "its book may be on its way"
    for _ in range(COMPLAINTS - 1):
        assert step.judge(ANSWER_S + 0.1) == ([], {})
    verdicts, moves = step.judge(ANSWER_S + 0.1)
    assert verdicts[0].startswith("d: after complaints by b, the last: its books lack microbatch 1") and not moves


@pytest.mark.parametrize(("index", "owner", "named"), [(1, "b", "b"), (1, "b", "x"), (1, "b", "a"), (3, "d", "d")])
def test_an_owner_that_names_who_cannot_be_convicted_loses_it(index: int, owner: str, named: str) -> None:
    """Itself, who is in no view, a replica of another stage: otherwise the step would hang for ever."""
    step = Step(((index, 1),))
    step.hang()
    step.answer(owner, index, peer=named)
    assert step.judge(ANSWER_S) == ([], {})
    assert step.judge(0.1) == (
        [],
        {index: f"{owner} has microbatch {index} of stage 1 from {named}, which has not booked it"},
    )


# --------------------------------------------------------------------------------------------------------- reassigning

TO_B = {1: "b does not say where microbatch 1 is"}


def test_another_member_takes_over_and_all_others_keep_theirs() -> None:
    step = Step()
    step.hang()
    owners, evicted = step.reassign(TO_B)
    assert owners[1] != "b" and [owners[0], *owners[2:]] == ["a", "c", "d"] and evicted == []


def test_a_microbatch_never_comes_back_to_who_has_had_it_in_this_step() -> None:
    step = Step()
    had = ["b"]
    for _ in range(3):
        step.hang()
        step.answer(had[-1], at="")
        owners, evicted = step.reassign(step.judge(LONG_S + 0.1)[1])
        assert owners[1] not in had and evicted == []
        had.append(owners[1])
    step.hang()
    owners, evicted = step.reassign({1: "nobody gets on with it"})
    if had[-1] == "a":  # a leader does not evict itself
        assert (owners[1], evicted) == ("a", [])
    else:
        assert (owners[1], evicted) == (had[-1], [had[-1]])


def test_who_had_it_in_the_step_before_may_have_it_again() -> None:
    step = Step()
    step.hang()
    step.reassign(TO_B)
    step.view = VIEW
    step.stalls.on_step(step.now, first=False)
    step.stalls.on_view(VIEW)
    step.ask()
    step.hang()
    owners, evicted = step.reassign(TO_B)
    assert owners[1] != "b" and evicted == []


def test_a_member_that_lost_its_place_to_another_counts_as_having_had_it() -> None:
    """It owned the microbatch in a view of this step, and its requests may still run."""
    step = Step()
    step.stalls.on_view(msgspec.structs.replace(VIEW, owners=(0, 0, 2, 3)))
    step.stalls.on_view(msgspec.structs.replace(VIEW, owners=(0, 2, 2, 3)))
    step.stalls.on_view(VIEW)
    step.hang()
    owners, evicted = step.reassign(TO_B)
    assert owners[1] == "d" and evicted == []


def test_whom_it_waits_for_does_not_get_it() -> None:
    step = Step()
    step.stalls.on_view(msgspec.structs.replace(VIEW, owners=(0, 0, 2, 3)))
    step.stalls.on_view(VIEW)
    step.hang()
    step.answer("b", at="d")
    _, moves = step.judge(LONG_S + 0.1)
    assert step.reassign(moves) == (["a", "c", "c", "d"], [])


def test_a_leader_that_came_in_the_middle_of_a_step_evicts_instead() -> None:
    """It does not know who has had it before."""
    step = Step(first=True)
    step.hang()
    assert step.reassign(TO_B) == (["a", "b", "c", "d"], ["b"])
    step.stalls.on_step(step.now, first=False)
    step.stalls.on_view(VIEW)
    step.ask()
    step.hang()
    assert step.reassign(TO_B)[1] == [], "in the next step it does know"


def test_a_leader_keeps_its_own_where_nobody_else_can_have_it() -> None:
    step = Step(((0, 1),), first=True)
    step.hang()
    owners, evicted = step.reassign({0: "a gets nowhere with microbatch 0"})
    assert evicted == [] and owners[0] != "a"
    step = Step(((0, 1),))
    for at in (1, 2, 3, 0):
        step.stalls.on_view(msgspec.structs.replace(VIEW, owners=(at, 1, 2, 3)))
    step.hang()
    assert step.reassign({0: "a gets nowhere with microbatch 0"}) == (["a", "b", "c", "d"], [])


def test_an_owner_that_others_had_to_take_over_from_again_and_again_is_evicted() -> None:
    step = Step()
    for strike in range(STRIKES):
        step.view = VIEW
        step.stalls.on_step(step.now, first=False)
        step.stalls.on_view(VIEW)
        step.ask()
        step.hang()
        _, evicted = step.reassign(TO_B)
        assert evicted == (["b"] if strike == STRIKES - 1 else [])


@pytest.mark.parametrize("at", ["d", ""])
def test_an_owner_that_waits_for_others_is_not_to_blame(at: str) -> None:
    step = Step()
    for _ in range(3 * STRIKES):
        step.view = VIEW
        step.stalls.on_step(step.now, first=False)
        step.stalls.on_view(VIEW)
        step.ask()
        step.hang()
        step.answer("b", at=at)
        _, moves = step.judge(LONG_S + 0.1)
        assert moves and step.reassign(moves)[1] == []
        assert step.stalls.resting("abcd"), "but it gets none for a while: nobody can tell"


def test_an_owner_from_whom_others_took_over_rests_ever_longer() -> None:
    step, rests = Step(), []
    for _ in range(2):
        step.hang()
        step.reassign(step.judge(ANSWER_S + 0.1)[1])
        rests.append(0)
        while step.stalls.resting("abcd"):
            step.stalls.on_step(step.now, first=False)
            rests[-1] += 1
        step.view = VIEW
        step.stalls.on_view(VIEW)
        step.ask()
    assert rests == [REST, REST * LONGER]
    assert owners_of(MEMBERS, 4, {"b"}) == (0, 2, 3, 0) and owners_of(MEMBERS, 4, set("abcd")) == (0, 1, 2, 3)


def test_where_most_owners_get_nowhere_a_third_rests_and_no_more() -> None:
    """Followers take a leader that lets more rest for one that keeps microbatches for itself."""
    stalls, peers = Stalls(SETTINGS), [f"p{number}" for number in range(9)]
    often = Takeovers((), (), (), dict.fromkeys(peers[:2], 1), (), {})
    for struck in (often, Takeovers((), (), (), dict.fromkeys(peers, 1), (), {})):
        stalls.settle(struck)
    assert len(stalls.resting(peers)) == most_resting(9) == 3
    assert set(peers[:2]) < stalls.resting(peers), "those from whom others took over most often"
    assert stalls.resting(peers[7:]) == set(peers[7:]), "two in any case"


def test_several_microbatches_at_once_are_one_strike() -> None:
    view = msgspec.structs.replace(VIEW, owners=(1, 1, 1, 1))
    step = Step(((0, 1), (1, 1), (2, 1), (3, 1)), view)
    step.book("c")
    step.hang()
    owners, evicted = step.reassign(dict.fromkeys(range(4), "b says nothing"))
    assert evicted == [] and "b" not in owners and len(set(owners)) > 1, "and they go to several"


def test_an_owner_that_is_gone_has_no_case() -> None:
    step = Step()
    step.hang()
    step.stalls.on_view(msgspec.structs.replace(VIEW, owners=(0, 2, 2, 3)))
    assert step.judge(ANSWER_S + 0.1) == ([], {})


def test_a_server_that_its_owner_does_not_find_late_is_left_in_peace() -> None:
    """Tensors of half a gigabyte over a slow line take minutes, by right."""
    step = Step()
    step.hang()
    step.answer("b", at="d", slow=0)
    assert step.judge(100 * LONG_S) == ([], {})


def test_books_that_have_grown_slowly_are_waited_for_in_proportion() -> None:
    step = Step(open_=((1, 1), (2, 1)))
    step.now += 10 * LONG_S
    step.book("c", 2)
    assert step.ask() == []
    step.now += 2 * LONG_S
    assert step.ask() == [], "the one before took ten times as long"
    step.now += 30 * LONG_S
    assert step.ask()

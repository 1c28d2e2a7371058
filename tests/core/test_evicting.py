"""What the leader does about peers that mean harm, and that it leaves the honest alone. Rules that need no leader are in
test_conduct.py, test_progress.py and test_stalls.py."""

from __future__ import annotations

import math

import msgspec
import pytest
from tests.core.test_leader import LeaderRig, places

from shoal.core.leader.averaging import PAUSES
from shoal.core.leader.books.stalls import QUIET_BEATS
from shoal.core.leader.evictions import FIRST_PAUSE, Misfit
from shoal.core.leader.facts import FAILURES, GIVEN_UP, JOINS, SAME
from shoal.core.leader.progress import LEAST_BEATS
from shoal.core.leader.rules.checks import HEARD_BEATS, STALLED
from shoal.core.leader.rules.rounds import OWNER_BEATS
from shoal.core.messages import (
    Booker,
    BookerRequest,
    Complaint,
    Evicted,
    Holding,
    Join,
    Member,
    Published,
    Reduced,
    RoundFailed,
    RoundWaits,
    Saved,
    SaveRequest,
    Settings,
)

LONG = Settings(stages=2, microbatches=4, steps=99, peers=3, ban_s=10.0)
BEAT_S = LONG.heartbeat_s
QUIET_S = QUIET_BEATS * BEAT_S


def a_run(others: str = "bc", **changes: object) -> LeaderRig:
    """a, c, e serve stage 0, b, d, f stage 1, as far as they are there."""
    leader = LeaderRig(msgspec.structs.replace(LONG, peers=1 + len(others), **changes))
    for peer in others:
        leader.join(peer)
    for peer in "a" + others:
        leader.heartbeat(peer)
    assert leader.view.started and leader.view.step == 0
    return leader


def members(leader: LeaderRig) -> str:
    return "".join(sorted(member.peer for member in leader.view.members))


def joiners(leader: LeaderRig) -> str:
    return "".join(sorted(member.peer for member in leader.view.joining))


def complain(leader: LeaderRig, accuser: str, about: str, kind: str = "faulty", times: int = 1) -> None:
    for _ in range(times):
        leader.hear(accuser, Complaint(about, "is wrong", kind))  # type: ignore[arg-type]


def whole_books(leader: LeaderRig, without: str = "") -> None:
    """The first members of both stages book everything."""
    first: dict[int, str] = {}
    for member in leader.view.members:
        if member.peer not in without:
            first.setdefault(member.stage, member.peer)
    for member in leader.view.members:
        if member.peer in first.values():
            leader.heartbeat(member.peer, (0, 1, 2, 3))


def reduce(leader: LeaderRig, norms: dict[str, float] | None = None, digests: dict[str, str] | None = None) -> None:
    """Everybody in the open round is done with it."""
    round_ = leader.rounds()[-1]
    for stage, group in enumerate(round_.groups):
        for share in group:
            digest = (digests or {}).get(share.peer, f"sum {stage}")
            norm_sq = (norms or {}).get(share.peer, 4.5)
            leader.hear(share.peer, Reduced(round_.epoch, round_.step, round_.round, digest, norm_sq))


def again(leader: LeaderRig, peers: tuple[str, ...]) -> None:
    """Until the round is tried again."""
    asked = len(leader.rounds())
    for _ in range(200):
        if len(leader.rounds()) > asked:
            return
        leader.wait(0.5, alive=peers)
    raise AssertionError("no other round")


def commit(leader: LeaderRig) -> None:
    step = leader.view.step
    whole_books(leader)
    reduce(leader)
    assert leader.view.step == step + 1, leader.reasons


def late_leader(leader: LeaderRig) -> None:
    """Another term, of a leader that knows only the view."""
    leader.said += leader.machine.lead(leader.view, 2, leader.now)


# --------------------------------------------------------------------------------------------------------- complaints


def test_the_complaints_of_joiners_do_not_count() -> None:
    leader = a_run("bcd")
    leader.join("j")
    leader.heartbeat("j", ready=False, digest="")
    complain(leader, "j", "c", times=9)
    complain(leader, "b", "c")
    assert members(leader) == "abcd"


def test_complaints_about_joiners_do_not_count_either() -> None:
    leader = a_run("bcd")
    leader.join("j")
    leader.heartbeat("j", ready=False, digest="")
    for peer in "abc":
        complain(leader, peer, "j", times=3)
    assert joiners(leader) == "j"


def test_a_single_accuser_among_several_evicts_nobody() -> None:
    for kind in ("faulty", "unreachable"):
        leader = a_run("bcd")
        complain(leader, "b", "c", kind, times=20)
        assert members(leader) == "abcd"


def test_who_is_stopped_is_silent_and_not_convicted_for_answering_nothing() -> None:
    leader = a_run("bcd")
    leader.now += 4 * leader.settings.heartbeat_s
    for peer in "acd":
        leader.heartbeat(peer)
    for accuser in "aca":
        complain(leader, accuser, "b", "unreachable")
    assert members(leader) == "abcd" and not leader.view.evicted
    leader.heartbeat("b")
    for accuser in "aca":
        complain(leader, accuser, "b", "unreachable")
    assert members(leader) == "acd", "it is heard, and answers nothing"


def test_a_stages_last_replica_stays_where_a_link_may_be_to_blame_and_goes_for_wrong_values() -> None:
    leader = a_run("bc")
    for accuser in "acac":
        complain(leader, accuser, "b", "unreachable")
    assert members(leader) == "abc"
    leader = a_run("bcd")
    for accuser in "aca":
        complain(leader, accuser, "b", "unreachable")
    assert members(leader) == "acd", "of two replicas one can go"
    leader = a_run("bc")
    for accuser in "aca":
        complain(leader, accuser, "b")
    assert "b" not in members(leader)


def test_a_complaint_of_a_peer_about_itself_does_not_count() -> None:
    leader = a_run("bcd")
    complain(leader, "c", "c", times=9)
    complain(leader, "c", "c", "unreachable", times=9)
    complain(leader, "b", "c", times=2)
    assert members(leader) == "abcd" and not leader.view.fenced


def test_nobody_makes_another_download_its_state() -> None:
    leader = a_run("bcd")
    for peer in "abd":
        complain(leader, peer, "c", "stale", times=9)
    assert members(leader) == "abcd"
    complain(leader, "c", "c", "stale")
    assert members(leader) == "abd" and Member("c", 0, back=True) in places(leader.view.joining)
    assert leader.view.evicted == (), "and that is no eviction"


def test_accusations_against_the_leader_make_it_resign_and_not_evict() -> None:
    leader = a_run("bcd")
    for peer in "bc":
        complain(leader, peer, "a", times=2)
    assert members(leader) == "abcd" and "complaints by b and c" in leader.machine.facts.evidence.resigns


def test_whoever_dies_is_not_remembered_as_evicted_and_may_come_back_at_once() -> None:
    leader = a_run("bcd")
    leader.wait(6.0, alive=("b", "d"))
    assert members(leader) == "abd" and leader.view.evicted == ()
    leader.join("c")
    assert joiners(leader) == "c"


# --------------------------------------------------------------------------------------------------------------- books

IMPOSSIBLE = {"twice": (0, 1, 0), "of none": (0, 4), "far": (2**20 - 1,)}


@pytest.mark.parametrize("books", IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_books_that_cannot_be_evict_whoever_sends_them(books: tuple[int, ...]) -> None:
    leader = a_run("bcd")
    leader.heartbeat("c", books)
    leader.decide()
    assert members(leader) == "abd" and leader.view.evicted == (Evicted("c", 1),)


def test_books_that_change_evict_and_older_ones_do_not() -> None:
    leader = a_run("bcd")
    leader.heartbeat("c", (2, 3))
    leader.heartbeat("c", (2,))
    leader.heartbeat("c", ())
    leader.decide()
    assert members(leader) == "abcd"
    leader.heartbeat("c", (3, 2, 1))
    leader.decide()
    assert members(leader) == "abd" and "c has changed what it booked" in leader.reasons


def doubled() -> LeaderRig:
    """c and e, of stage 0, have booked microbatch 1, which b owns; nothing else is wrong."""
    leader = a_run("bcde")
    assert leader.view.members[leader.view.owners[1]].peer == "b"
    leader.heartbeat("a", (0,))
    leader.heartbeat("c", (1, 2))
    leader.heartbeat("e", (1,))
    leader.heartbeat("b", (0, 1))
    leader.heartbeat("d", (2, 3))
    leader.wait(1.0, alive=tuple("bcde"))
    return leader


@pytest.mark.parametrize(("right", "liar"), [("c", "e"), ("e", "c")])
def test_of_two_that_have_booked_one_microbatch_its_owner_says_which_is_wrong(right: str, liar: str) -> None:
    leader = doubled()
    assert members(leader) == "abcde" and {peer for peer, _ in leader.sent(BookerRequest)} == {"b"}
    leader.hear("b", Booker(0, 0, 1, 0, peer=right))
    assert members(leader) == "abcde".replace(liar, "") and leader.view.evicted == (Evicted(liar, 1),)


@pytest.mark.parametrize(
    ("peer", "answer"),
    [
        ("d", Booker(0, 0, 1, 0, peer="c")),
        ("e", Booker(0, 0, 1, 0, peer="c")),
        ("b", Booker(0, 0, 2, 0, peer="c")),
        ("b", Booker(0, 0, 1, 1, peer="c")),
        ("b", Booker(0, 1, 1, 0, peer="c")),
        ("b", Booker(1, 0, 1, 0, peer="c")),
        ("b", Booker(0, 0, 1, 0)),
        ("b", Booker(0, 0, 1, 0, peer="a")),
        ("b", Booker(0, 0, 1, 0, peer="x")),
    ],
)
def test_an_answer_of_another_or_about_something_else_convicts_nobody(peer: str, answer: Booker) -> None:
    leader = doubled()
    leader.hear(peer, answer)
    assert members(leader) == "abcde"


def test_where_the_owner_does_not_say_the_one_with_fewer_bookings_goes() -> None:
    leader = doubled()
    leader.wait(OWNER_BEATS * BEAT_S - 2.0, alive=tuple("bcde"))
    assert members(leader) == "abcde"
    leader.wait(3.0, alive=tuple("bcde"))
    assert members(leader) == "abcd"


def test_a_leader_that_was_stopped_waits_for_the_owners_answer() -> None:
    leader = doubled()
    leader.now += 60.0
    leader.machine.forgive(60.0, leader.now)
    leader.wait(1.0, alive=tuple("bcde"))
    leader.hear("b", Booker(0, 0, 1, 0, peer="e"))
    assert members(leader) == "abde"


def at_odds() -> LeaderRig:
    """Microbatches 1 and 2, of b and c, are in the books of e, and of a or c."""
    leader = a_run("bcdef")
    leader.heartbeat("a", (0, 1))
    leader.heartbeat("c", (2,))
    leader.heartbeat("e", (1, 2))
    leader.heartbeat("b", (0, 1, 2))
    return leader


def test_whoever_has_booked_what_several_had_booked_is_judged_by_an_owner_that_is_none_of_them() -> None:
    """Two liars that call missing what they have booked are at odds with the honest one, and not with one another."""
    leader = at_odds()
    leader.wait(1.0, alive=tuple("bcdef"))
    leader.hear("b", Booker(0, 0, 1, 0, peer="e"))
    assert members(leader) == "bcdef" or leader.machine.resigns


def test_whoever_has_booked_what_several_had_booked_goes_where_the_owner_does_not_say() -> None:
    leader = at_odds()
    leader.wait((OWNER_BEATS + 2) * BEAT_S, alive=tuple("bcdef"))
    assert "e" not in members(leader) and "e booked what a and c had booked" in leader.reasons
    assert members(leader) == "abcdf"


# -------------------------------------------------------------------------------------------------------------- rounds


def test_equal_gradients_whose_norms_differ_by_rounding_are_committed() -> None:
    leader = a_run("bcd")
    whole_books(leader)
    reduce(leader, norms={"c": 4.5 * (1.0 + 5e-7)})
    assert leader.view.step == 1 and leader.view.last is not None and leader.view.last.norm == pytest.approx(3.0)
    leader = a_run("bcd")
    whole_books(leader)
    reduce(leader, norms=dict.fromkeys("abcd", 0.0))
    assert leader.view.step == 1


@pytest.mark.parametrize("norm_sq", [4.5 * (1.0 + 5e-6), 1e150, 0.0])
def test_one_replicas_norm_does_not_reach_the_optimizer(norm_sq: float) -> None:
    for liar in "ac":
        leader = a_run("bcde")
        whole_books(leader)
        for _ in range(2):
            reduce(leader, norms={liar: norm_sq})
            assert leader.view.step == 0
            leader.wait(0.5, alive=tuple("bcde"))
        if liar == "a":
            assert leader.machine.facts.evidence.stale.keys() == {"a"} or Member("a", 0, back=True) in places(
                leader.view.joining
            )
        else:
            assert Member("c", 0, back=True) in places(leader.view.joining)
        assert "norm of the same sums differs" in leader.reasons and leader.view.evicted == ()


def test_once_different_sums_cost_nobody_its_state() -> None:
    leader = a_run("bcde")
    whole_books(leader)
    reduce(leader, digests={"c": "another"})
    assert leader.view.step == 0 and members(leader) == "abcde"
    again(leader, tuple("bcde"))
    reduce(leader)
    assert leader.view.step == 1 and members(leader) == "abcde"


def test_whoever_has_differed_before_is_not_given_another_round() -> None:
    """A damaged message explains one difference. A second round cost a second each time that a liar met another replica."""
    leader = a_run("bcdef")
    whole_books(leader)
    leader.machine.facts.evidence.conduct.differs("c", "its sums differ")
    reduce(leader, digests={"e": "another sum"})
    again(leader, tuple("bcdef"))
    assert "e" not in members(leader) and "e downloads its state again: its sums differ" in leader.reasons


def test_twice_different_sums_send_the_minority_to_download_and_not_the_majority() -> None:
    leader = a_run("bcdef")
    whole_books(leader)
    for _ in range(2):
        reduce(leader, digests={"b": "another"})
        leader.wait(0.5, alive=tuple("bcdef"))
    assert members(leader) == "acdef" and joiners(leader) == "b" and leader.view.evicted == ()


def test_in_a_tie_the_leaders_own_replica_is_right() -> None:
    leader = a_run("bcd")
    whole_books(leader)
    for _ in range(2):
        reduce(leader, digests={"a": "another"})
        leader.wait(0.5, alive=tuple("bcd"))
    assert "c" not in members(leader) and joiners(leader) == "c"


def test_a_replica_that_differs_for_the_third_time_is_evicted() -> None:
    leader = a_run("bcde")
    for time in range(3):
        assert members(leader) == "abcde", leader.reasons
        leader.heartbeat("c", digest="something else")
        leader.wait(1.0, alive=tuple("bde"))
        if time < 2:
            assert joiners(leader) == "c" and leader.view.evicted == ()
            leader.heartbeat("c")
            commit(leader)
            assert joiners(leader) == "c", "the step in which it differed is averaged without it"
            leader.heartbeat("c")
            commit(leader)
    assert "c" not in members(leader) + joiners(leader) and leader.view.evicted == (Evicted("c", 1),)
    assert "3 times by now" in leader.reasons


def test_a_joiner_with_another_state_begins_anew_and_is_evicted_at_the_third_time() -> None:
    leader = a_run("bcd")
    for time in range(3):
        leader.join("e")
        leader.heartbeat("e", digest="made up")
        leader.wait(1.0, alive=tuple("bcd"))
        assert "e" not in members(leader) + joiners(leader)
        assert leader.view.evicted == ((Evicted("e", 1),) if time == 2 else ())
    leader.join("e")
    assert joiners(leader) == ""


def test_a_leader_that_comes_back_with_another_state_lets_another_lead() -> None:
    """It cannot remove itself, and as a joiner for ever it would keep its stage's donors from making newer copies for others."""
    leader = a_run("bcd")
    for one in "ca":
        assert not leader.machine.resigns
        leader.machine.facts.note(Misfit(Member(one, 0)), leader.now)
    assert "came with another state" in leader.machine.resigns


def test_a_joiner_whose_state_is_of_another_step_is_not_unfit() -> None:
    leader = a_run("bcd")
    commit(leader)
    leader.join("e")
    leader.heartbeat("e", step=0, digest="of step 0")
    leader.wait(2.0, alive=tuple("bcd"))
    leader.heartbeat("e", step=0, digest="of step 0")
    assert joiners(leader) == "e"


def fail(leader: LeaderRig, peer: str, culprit: str = "", **changes: object) -> None:
    round_ = leader.rounds()[-1]
    failed = RoundFailed(round_.epoch, round_.step, round_.round, "it does not fit", culprit)
    leader.hear(peer, msgspec.structs.replace(failed, **changes))


def test_a_round_goes_on_whatever_says_who_is_not_in_it_or_means_another() -> None:
    leader = a_run("bcd")
    leader.join("j")
    leader.heartbeat("j", ready=False, digest="")
    whole_books(leader)
    fail(leader, "j", "c")
    fail(leader, "x", "c")
    for changes in ({"round": 1}, {"step": 1}, {"epoch": 1}):
        fail(leader, "b", "d", **changes)
    assert leader.machine.facts.rounds.open is not None and leader.machine.facts.rounds.failures.total() == 0
    reduce(leader)
    assert leader.view.step == 1


def test_what_somebody_waits_for_in_another_round_or_from_outside_does_not_count() -> None:
    leader = a_run("bcd")
    leader.join("j")
    leader.heartbeat("j", ready=False, digest="")
    whole_books(leader)
    of = leader.rounds()[-1]
    leader.hear("j", RoundWaits(0, 0, of.round, parts=("a", "c")))
    leader.hear("x", RoundWaits(0, 0, of.round, parts=("a", "c")))
    leader.hear("b", RoundWaits(0, 0, of.round + 1, parts=("d",)))
    leader.hear("b", RoundWaits(0, 1, of.round, parts=("d",)))
    leader.wait(3.0, alive=tuple("bcdj"))
    assert members(leader) == "abcd"


def test_whoever_keeps_others_waiting_for_its_parts_is_evicted() -> None:
    leader = a_run("bcdef")
    whole_books(leader)
    of = leader.rounds()[-1]
    for peer in "bf":
        leader.hear(peer, RoundWaits(0, 0, of.round, parts=("d",)))
    assert members(leader) == "abcdef", "the others are heard first"
    for _ in range(4):
        leader.wait(0.5, alive=tuple("bcdef"))
        for peer in "bf":
            leader.hear(peer, RoundWaits(0, 0, of.round, parts=("d",)))
    assert members(leader) == "abcef" and leader.view.evicted == (Evicted("d", 1),)


def test_the_first_two_that_report_different_parameters_are_not_judged_before_the_others_are_heard() -> None:
    """The leader's optimizer has other bits: of two it would be believed."""
    leader = a_run("bcde")  # a, c and e serve stage 0
    for digest in ("", "", "stage 0"):
        assert members(leader) == "abcde"
        leader.now += 0.5
        leader.heartbeat("e", digest=digest)
        leader.heartbeat("a", digest="something else")
        leader.decide()
    assert members(leader) == "bcde" and "parameters differ" in leader.view.reason


def test_two_that_differ_are_judged_after_a_while_though_a_third_says_nothing() -> None:
    leader = a_run("bcde")
    for _ in range(int(HEARD_BEATS) + 3):
        leader.now += 0.5
        leader.heartbeat("e", digest="")
        leader.heartbeat("a", digest="something else")
        for peer in "bcd":
            leader.heartbeat(peer)
        leader.decide()
    assert "c" not in members(leader) and "parameters differ" in leader.view.reason


def test_whoever_was_waited_for_and_came_after_all_stays() -> None:
    leader = a_run("bcdef")
    whole_books(leader)
    of = leader.rounds()[-1]
    for _ in range(2):
        for peer in "bf":
            leader.hear(peer, RoundWaits(0, 0, of.round, parts=("d",)))
        leader.wait(0.5, alive=tuple("bcdef"))
    for peer in "bf":
        leader.hear(peer, RoundWaits(0, 0, of.round))
    leader.wait(4.0, alive=tuple("bcdef"))
    assert members(leader) == "abcdef"


def test_a_leader_that_lacks_parts_itself_resigns() -> None:
    leader = a_run("bcdef")
    whole_books(leader)
    for _ in range(4):
        leader.hear("a", RoundWaits(0, 0, leader.rounds()[-1].round, parts=("c",)))
        leader.wait(0.5, alive=tuple("bcdef"))
    assert members(leader) == "abcdef" and "does not judge in its own case" in leader.machine.facts.evidence.resigns


def test_the_last_that_is_not_done_with_a_round_is_evicted_but_not_because_the_leader_was_stopped() -> None:
    leader = a_run("bcd")
    whole_books(leader)
    of = leader.rounds()[-1]
    for peer, stage in (("a", 0), ("b", 1), ("d", 1)):
        leader.hear(peer, Reduced(0, 0, of.round, f"sum {stage}", 4.5))
    leader.wait(2.0, alive=tuple("bcd"))
    leader.now += 60.0
    leader.machine.forgive(60.0, leader.now)
    leader.wait(2.0, alive=tuple("bcd"))
    assert members(leader) == "abcd"
    leader.wait(14.0, alive=tuple("bcd"))
    assert members(leader) == "abd" and "c has not got done with a round" in leader.reasons


def test_a_culprit_that_one_peer_names_in_two_rounds_stays_and_in_many_goes() -> None:
    leader = a_run("bcdef")
    whole_books(leader)
    for failures in range(1, SAME + 1):
        fail(leader, "b", "d")
        assert ("d" in members(leader)) is (failures < SAME), failures
        if failures < SAME:
            again(leader, tuple("bcdef"))
    assert members(leader) == "abcef"


@pytest.mark.parametrize("culprit", ["c", "nobody"])
def test_whoever_blames_a_peer_of_another_stage_for_its_round_is_evicted_at_once(culprit: str) -> None:
    """No replica receives a chunk of a peer that is not in its exchange. Fifteen rounds were given up so before."""
    leader = a_run("bcdef")
    whole_books(leader)
    fail(leader, "b", culprit)
    assert members(leader) == "acdef" and "has no part in its stage's exchange" in leader.reasons


def test_whoever_gives_up_rounds_and_blames_nobody_goes_in_the_end() -> None:
    leader = a_run("bcdef")
    whole_books(leader)
    for failures in range(1, FAILURES + 1):
        assert members(leader) == "abcdef", failures
        fail(leader, "b")
        if failures < FAILURES:
            again(leader, tuple("bcdef"))
    assert members(leader) == "acdef" and f"has given up {FAILURES} rounds of a step" in leader.reasons


def test_rounds_that_each_peer_gives_up_once_evict_nobody() -> None:
    leader = a_run("bcdef")
    whole_books(leader)
    for peer in "bcdef":
        fail(leader, peer)
        again(leader, tuple("bcdef"))
    assert members(leader) == "abcdef"


def test_whoever_gives_up_a_round_in_each_of_ten_steps_is_evicted() -> None:
    """Each costs half a second: fifteen were a sixth of a minute."""
    leader = a_run("bcdef")
    for step in range(10):
        assert members(leader) == "abcdef" and leader.view.step == step
        whole_books(leader)
        fail(leader, "b")
        if step < 9:
            again(leader, tuple("bcdef"))
            reduce(leader)
            for peer in "abcdef":
                leader.heartbeat(peer)
    assert members(leader) == "acdef" and GIVEN_UP * FAILURES == 10


def test_failures_of_the_step_before_are_forgotten() -> None:
    leader = a_run("bcdef")
    for _ in range(3):
        whole_books(leader)
        for _ in range(FAILURES // 2):
            fail(leader, "b")
            again(leader, tuple("bcdef"))
        reduce(leader)
    assert leader.view.step == 3 and members(leader) == "abcdef"


def test_a_round_that_fails_again_is_tried_ever_later_but_not_for_ever_later() -> None:
    leader = a_run("bcdef")
    whole_books(leader)
    waited = []
    for peer in "bcdefbcd":
        fail(leader, peer)
        failed_at = leader.now
        again(leader, tuple("bcdef"))
        waited.append(leader.now - failed_at)
    assert waited[:4] == [0.5, 1.0, 2.0, 2.0] and max(waited) == BEAT_S * 2**PAUSES


# ----------------------------------------------------------------------------------------------------------- deadlines


def test_a_member_that_beats_and_does_not_get_ready_is_evicted() -> None:
    leader = a_run("bcd", ready_timeout_s=2.0)
    whole_books(leader)
    for _ in range(2 * round(LEAST_BEATS)):
        leader.heartbeat("c", ready=False)
        leader.wait(0.5, alive=("b", "d"))
    assert members(leader) == "abd" and "c has not been ready for step 0" in leader.reasons
    assert leader.view.evicted == (Evicted("c", 1),)


def test_a_joiner_that_is_still_downloading_stays_and_one_that_stands_still_goes() -> None:
    leader = a_run("bcd", ready_timeout_s=2.0)
    commit(leader)
    for peer in "jk":
        leader.join(peer)
    for chunk in range(round(LEAST_BEATS) + 10):
        leader.heartbeat("j", ready=False, digest="", loaded=chunk)
        leader.heartbeat("k", ready=False, digest="", loaded=1)
        leader.wait(0.5, alive=("b", "c", "d"))
    assert joiners(leader) == "j" and "k has not got on with the state" in leader.reasons


def test_a_leader_that_was_stopped_evicts_nobody_for_that_time() -> None:
    leader = a_run("bcd", ready_timeout_s=2.0)
    leader.heartbeat("c", ready=False)
    leader.now += 200.0
    leader.machine.forgive(200.0, leader.now)
    leader.wait(1.0, alive=("b", "d"))
    assert members(leader) == "abcd"


# ----------------------------------------------------------------------------------------------------------- admission


def test_two_processes_of_one_key_are_admitted_during_a_restart_and_a_third_is_not() -> None:
    leader = a_run()
    for process in ("k.1", "k.2", "k.3"):
        leader.join(process)
    assert {member.peer for member in leader.view.joining} == {"k.1", "k.2"}
    leader.wait(6.0, alive=("b", "c", "k.2"))
    leader.join("k.3")
    assert {"k.2", "k.3"} <= leader.machine.facts.present.keys() and "k.1" not in leader.machine.facts.present


def test_an_invite_admits_as_many_peers_as_it_says_and_others_are_not_in_their_way() -> None:
    leader = a_run()
    for peer in ("k1.1.inv.2", "k2.1.inv.2", "k3.1.inv.2", "k4.1.other.2", "p9"):
        leader.join(peer)
    assert {member.peer for member in leader.view.joining} == {"k1.1.inv.2", "k2.1.inv.2", "k4.1.other.2", "p9"}


def test_those_who_come_in_one_beat_are_counted_together() -> None:
    leader = a_run()
    leader.now += 1.0
    for number in range(4):
        leader.said += leader.machine.on_message(f"k{number}.1.inv.2", Join(), leader.now)
    leader.decide()
    assert len(leader.view.joining) == 2


def test_an_invite_that_admits_nobody_admits_nobody() -> None:
    leader = a_run()
    leader.join("k1.1.inv.0")
    assert joiners(leader) == ""


def test_so_many_that_ask_are_remembered_and_no_more() -> None:
    leader = a_run()
    leader.machine.facts.history.due["admit"] = math.inf
    for number in range(JOINS + 50):
        leader.hear(f"p{number}", Join())
    assert len(leader.machine.facts.requests.joins) == JOINS
    leader.hear("p0", Join(holds=Holding(0, 1, 0)))
    assert leader.machine.facts.requests.joins["p0"].holds is not None, "who is there may ask again"


def evict(leader: LeaderRig, peer: str, by: str) -> None:
    complain(leader, by[0], peer, times=2)
    complain(leader, by[1], peer)
    assert peer not in members(leader), leader.reasons


def back_after(leader: LeaderRig, peer: str, alive: tuple[str, ...]) -> float:
    """Seconds until it is let in, though it asks every beat."""
    began = leader.now
    while peer not in leader.machine.facts.present:
        assert leader.now < began + 500.0
        leader.hear(peer, Join())
        leader.wait(0.5, alive=alive)
    return leader.now - began


def test_a_key_that_was_evicted_stays_out_longer_each_time() -> None:
    leader = a_run("bcd", ban_s=10.0 / FIRST_PAUSE)
    waited = []
    for process in range(3):
        peer = f"k.{process}"
        waited.append(back_after(leader, peer, tuple("bcd")))
        leader.heartbeat(peer)
        commit(leader)
        assert peer in [one.peer for one in leader.view.members]
        for accuser in "bcb":
            complain(leader, accuser, peer)
        assert leader.view.evicted == (Evicted("k", process + 1),)
    waited.append(back_after(leader, "k.9", tuple("bcd")))
    assert [round(seconds / 10.0) for seconds in waited] == [0, 1, 4, 16]


def test_the_pause_survives_a_change_of_the_leader() -> None:
    leader = a_run("bcd")
    complain(leader, "a", "c", times=2)
    complain(leader, "b", "c")
    assert leader.view.evicted == (Evicted("c", 1),)
    leader.wait(2.0, alive=("b", "d"))
    late_leader(leader)
    assert 59.0 <= back_after(leader, "c", ("b", "d")) <= 61.0


def test_later_views_remember_who_was_evicted() -> None:
    leader = a_run("bcd")
    complain(leader, "a", "c", times=2)
    complain(leader, "b", "c")
    leader.join("j")
    commit(leader)
    leader.wait(6.0, alive=("b", "j"))  # d dies
    commit(leader)
    assert leader.view.evicted == (Evicted("c", 1),)


# -------------------------------------------------------------------------------------------------------------- stalls


def hanging(others: str = "bcd") -> LeaderRig:
    """Microbatch 1, of b, lacks at stage 1; everything else is booked."""
    leader = a_run(others)
    assert leader.view.members[leader.view.owners[1]].peer == "b"
    leader.heartbeat("a", (0, 1, 2, 3))
    leader.heartbeat("b", (0, 2, 3))
    return leader


def owner(leader: LeaderRig, index: int = 1) -> str:
    return leader.view.members[leader.view.owners[index]].peer


def test_an_owner_is_asked_when_books_do_not_grow_and_another_takes_over_when_it_is_silent_on_that() -> None:
    leader = hanging()
    leader.wait(QUIET_S - 0.5, alive=tuple("bcd"))
    assert ("b", BookerRequest(0, 0, 1, 1)) in leader.sent(BookerRequest) and owner(leader) == "b"
    leader.wait(1.0, alive=tuple("bcd"))
    leader.wait(6.0, alive=tuple("bcd"))
    assert owner(leader) != "b" and members(leader) == "abcd"
    assert f"{owner(leader)} takes over microbatch 1: b does not say where" in leader.reasons
    leader.heartbeat("d", (1,))
    reduce(leader)
    assert leader.view.step == 1


def test_a_leader_stopped_between_finding_that_a_microbatch_hangs_and_reassigning_it_asks_again() -> None:
    """What its owner answered meanwhile is still to be read."""
    leader = hanging()
    evidence = leader.machine.facts.evidence
    while not evidence.reassigning:
        leader.now += 0.5
        assert leader.now < QUIET_S + 20.0
        for peer in "abcd":
            if not evidence.reassigning:
                leader.heartbeat(peer)
    leader.now += 60.0
    leader.machine.forgive(60.0, leader.now)
    leader.decide()
    assert owner(leader) == "b" and members(leader) == "abcd"
    leader.wait(QUIET_S + 8.0, alive=tuple("bcd"))
    assert owner(leader) != "b" and members(leader) == "abcd"


def test_a_slow_step_that_gets_on_keeps_its_owners() -> None:
    leader = a_run("bcd", microbatches=16)
    owners = leader.view.owners
    for done in range(1, 16):
        leader.wait(QUIET_S - 1.0, alive=tuple("bcd"))
        leader.heartbeat("b", tuple(range(done)))
    assert leader.view.owners == owners and members(leader) == "abcd"


def test_a_microbatch_never_returns_to_an_owner_that_had_it_in_this_step() -> None:
    leader = hanging("bcdef")
    had = [owner(leader)]
    while leader.view.members and len(had) < 5:
        leader.wait(20.0, alive=tuple("bcdef"))
        if owner(leader) == had[-1]:
            break
        assert owner(leader) not in had
        had.append(owner(leader))
    assert len(had) >= 3, leader.reasons


@pytest.mark.parametrize("led_before", [False, True])
def test_a_leader_that_came_in_mid_step_evicts_instead_of_reassigning(led_before: bool) -> None:
    """It does not know who has had the microbatch, also where it led an earlier step."""
    leader = a_run("bcd")
    if led_before:
        before = leader.machine.facts.known
        commit(leader)
        leader.machine.facts.known = before  # what it knew when it led last
    late_leader(leader)
    leader.heartbeat("a", (0, 1, 2, 3))
    leader.heartbeat("b", (0, 2, 3))
    owners = [leader.view.members[at].peer for at in leader.view.owners]
    leader.wait(QUIET_S + 10.0, alive=tuple("bcd"))
    assert "b" not in members(leader) and "takes over" not in leader.reasons
    now = [leader.view.members[at].peer for at in leader.view.owners]
    assert all(now[index] == peer for index, peer in enumerate(owners) if peer != "b")


def test_a_server_that_two_owners_wait_for_is_evicted() -> None:
    leader = a_run("bcdef")
    leader.heartbeat("a", (0, 1, 2, 3))
    leader.heartbeat("b", (0, 3))
    while "d" in members(leader):
        leader.wait(0.5, alive=tuple("bcdef"))
        assert leader.now < QUIET_S
        for index in (1, 2):
            leader.hear(owner(leader, index), Booker(0, 0, index, 1, at="d", slow=1))
    assert members(leader) == "abcef" and "d keeps b and c waiting while nothing is booked" in leader.reasons


# ---------------------------------------------------------------------------------------------------------- why it stalls


def test_why_a_step_is_not_committed_is_said_after_a_while_and_not_after_its_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leader = hanging()
    leader.wait(STALLED * BEAT_S - 0.5, alive=tuple("bcd"))
    assert leader.machine.stall == ""
    leader.wait(2.0, alive=tuple("bcd"))
    assert (
        leader.machine.stall.startswith("step 0 is not committed for 1")
        and "stage 1 has 3 of 4" in leader.machine.stall
    )
    leader.heartbeat("b", (0, 2, 3, 1))
    leader.wait(1.0, alive=tuple("bcd"))
    assert "waits for a, c, b, d" in leader.machine.stall
    with monkeypatch.context() as patch:
        patch.setattr(type(leader.machine.facts.evidence.audits), "passed", lambda *_: False)
        reduce(leader)
        leader.wait(1.0, alive=tuple("bcd"))
        assert leader.view.step == 0 and leader.machine.stall.endswith("its round 1 is done, its audit is not")
    leader.wait(1.0, alive=tuple("bcd"))
    assert leader.view.step == 1 and leader.machine.stall == ""


def test_a_run_whose_steps_are_long_is_not_said_to_be_stalled() -> None:
    leader = a_run("bcd", microbatches=8)
    for _ in range(2):
        for done in range(1, 9):
            leader.wait(4.0, alive=tuple("bcd"))
            if leader.view.step:
                assert leader.machine.stall == ""
            leader.heartbeat("a", tuple(range(done)))
            leader.heartbeat("b", tuple(range(done)))
        reduce(leader)
    assert leader.view.step == 2


def test_a_run_that_waited_long_for_its_peers_is_not_stalled_when_it_begins() -> None:
    leader = LeaderRig(LONG)
    leader.wait(100.0)
    for peer in "bc":
        leader.join(peer)
    for peer in "abc":
        leader.heartbeat(peer)
    leader.wait(2.0, alive=("b", "c"))
    assert leader.view.started and leader.machine.stall == ""


def test_a_run_that_has_not_begun_or_is_over_is_not_stalled() -> None:
    leader = LeaderRig(msgspec.structs.replace(LONG, steps=1, save_last=False))
    leader.wait(30.0)
    assert leader.machine.stall == ""
    for peer in "bc":
        leader.join(peer)
    for peer in "abc":
        leader.heartbeat(peer)
    commit(leader)
    leader.wait(30.0, alive=("b", "c"))
    assert leader.view.finished and leader.machine.stall == ""


# ---------------------------------------------------------------------------------------------------------- checkpoints


def saving() -> LeaderRig:
    leader = a_run("bcd", save_every=1)
    commit(leader)
    leader.wait(0.5, alive=tuple("bcd"))
    assert {peer for peer, _ in leader.sent(SaveRequest)} == {"a", "b"}
    return leader


@pytest.mark.parametrize(
    ("peer", "answer"),
    [
        ("c", Saved(0, 1, 0, record="forged")),
        ("c", Saved(0, 1, 0, failed="forged")),
        ("b", Saved(0, 1, 0, record="forged")),
        ("a", Saved(0, 1, 2, record="forged")),
        ("a", Saved(0, 1, 4095, record="forged")),
        ("a", Saved(0, 0, 0, record="forged")),
        ("a", Saved(1, 1, 0, record="forged")),
        ("b", Published(0, 1, path="forged")),
        ("b", Published(0, 2**53, path="forged")),
    ],
)
def test_only_whoever_was_asked_has_saved_its_stage(peer: str, answer: Saved | Published) -> None:
    leader = saving()
    leader.hear(peer, answer)
    assert (
        leader.machine.facts.saving.shards == {}
        and leader.machine.facts.saving.unable == {}
        and leader.machine.facts.saving.published == 0
    )
    assert not leader.machine.facts.saving.idle


def test_only_whoever_was_asked_has_published() -> None:
    leader = saving()
    for stage, peer in enumerate("ab"):
        leader.hear(peer, Saved(0, 1, stage, record="shard"))
    leader.wait(0.5, alive=tuple("bcd"))
    edition = leader.machine.facts.saving.edition
    for peer, step in (("b", 1), ("c", 1), ("a", 2)):
        leader.hear(peer, Published(0, step, path="forged", edition=edition))
    leader.hear("b", Published(0, 1, failed="forged", edition=edition))
    assert leader.machine.facts.saving.published == 0 and leader.machine.facts.saving.unable == {}
    leader.hear("a", Published(0, 1, path="there", edition=edition))
    assert leader.machine.facts.saving.published == 1


def test_an_answer_that_comes_twice_is_one() -> None:
    leader = saving()
    for record in ("first", "second"):
        leader.hear("a", Saved(0, 1, 0, record=record))
    assert leader.machine.facts.saving.shards[0].record == "first"

"""Whether peers and rounds get on: whoever does is left alone however slow it is, whoever does not goes after a time that fits."""

from __future__ import annotations

import msgspec
import pytest

from shoal.core.leader.evictions import Conduct
from shoal.core.leader.progress import (
    FREED_BEATS,
    HEAR_BEATS,
    HOLDS,
    LAST_BEATS,
    LEAST_BEATS,
    LOAD_HOLDS,
    ROUNDS,
    SOON_BEATS,
    STEPS,
    VIEW_SILENCES,
    Progress,
    RoundWatch,
)
from shoal.core.leader.rebalance import MOVE_S
from shoal.core.messages import Heartbeat, Member, Phase, Reduced, Round, RoundWaits, Settings, Share, View

SETTINGS = Settings(stages=1, microbatches=4, steps=9)
MEMBERS = tuple(Member(peer, 0) for peer in ("a", "b", "c"))
VIEW = View(number=5, step=3, members=MEMBERS, joining=(Member("j", 0),), phase=Phase.TRAINING)
USUAL = float("inf")  # no step has been timed
HOLD_S, SILENCE_S, BEAT_S = SETTINGS.ready_timeout_s, SETTINGS.heartbeat_timeout_s, SETTINGS.heartbeat_s


class Watched:
    """Leader a sees the heartbeats of the others."""

    def __init__(self, view: View = VIEW, settings: Settings = SETTINGS) -> None:
        self.view, self.now = view, 0.0
        self.progress = Progress("a", settings)
        self.progress.on_view(None, view, 0.0)

    def agree(self, **changes: object) -> None:
        before, self.view = self.view, msgspec.structs.replace(self.view, number=self.view.number + 1, **changes)
        self.progress.on_view(before, self.view, self.now)

    def heartbeat(self, peer: str, **changes: object) -> None:
        heartbeat = Heartbeat(term=1, number=self.view.number, step=self.view.step, ready=True, epoch=self.view.epoch)
        self.progress.on_heartbeat(peer, msgspec.structs.replace(heartbeat, **changes), self.view, self.now)

    def late(self, step_s: float = USUAL) -> dict[str, str]:
        return self.progress.late(self.view, step_s, self.now)

    def wait(self, seconds: float, peer: str = "b", **changes: object) -> dict[str, str]:
        """Beats of that peer, each of which says the same; who is late at the end."""
        until = self.now + seconds
        while self.now < until:
            self.now += BEAT_S
            self.heartbeat(peer, **changes)
        return self.late()


# --------------------------------------------------------------------------------------------------- members, joiners


def test_whoever_holds_the_newest_view_and_step_is_never_late() -> None:
    assert Watched().wait(1000.0) == {}


def test_whoever_beats_and_takes_no_view_is_evicted() -> None:
    watched = Watched()
    watched.heartbeat("b")
    watched.agree()
    assert watched.wait(VIEW_SILENCES * SILENCE_S, number=5) == {}
    assert watched.wait(1.0, number=5) == {"b": "has stayed at view 5 for 13 s"}


def test_a_member_that_is_always_one_view_behind_stays() -> None:
    watched = Watched()
    for _ in range(20):
        watched.agree()
        assert watched.wait(3.0, number=watched.view.number - 1) == {}


def test_a_view_that_is_new_can_be_missed_for_a_moment_however_long_the_one_before_stood() -> None:
    watched = Watched()
    watched.heartbeat("b")
    watched.now = 50.0  # no heartbeat of b came meanwhile
    watched.agree()
    assert watched.late() == {}
    assert watched.wait(SILENCE_S / 2, number=5) == {}


def test_a_member_that_does_not_hold_the_step_is_evicted_after_twice_hold_s() -> None:
    watched = Watched()
    watched.heartbeat("b", ready=False)
    assert watched.wait(HOLDS * HOLD_S, ready=False) == {}
    assert watched.wait(1.0, ready=False) == {"b": "has not been ready for step 3 for 61 s"}


def test_a_member_of_a_run_with_long_steps_may_take_several_of_them() -> None:
    watched = Watched()
    watched.wait(STEPS * 60.0, ready=False)
    assert watched.late(step_s=60.0) == {}
    watched.wait(1.0, ready=False)
    assert "b" in watched.late(step_s=60.0)


def test_no_state_is_waited_for_less_than_so_many_beats() -> None:
    settings = msgspec.structs.replace(SETTINGS, ready_timeout_s=1.0)
    for peer in "bj":
        watched = Watched(settings=settings)
        watched.heartbeat(peer, ready=False)
        assert watched.wait(LEAST_BEATS * BEAT_S, peer, ready=False) == {}
        assert peer in watched.wait(1.0, peer, ready=False)


def test_a_member_gets_its_time_anew_with_every_step() -> None:
    watched = Watched()
    for step in range(4, 9):
        assert watched.wait(50.0, ready=False, step=3) == {}
        watched.agree(step=step)


def test_before_the_first_step_nobody_has_to_hold_it() -> None:
    watched = Watched(msgspec.structs.replace(VIEW, phase=Phase.GATHERING))
    assert watched.wait(1000.0, ready=False) == {}


def test_a_joiner_that_goes_on_downloading_stays_for_however_long_it_takes() -> None:
    watched = Watched()
    for chunk in range(20):
        assert watched.wait(100.0, "j", ready=False, loaded=chunk) == {}


def test_a_joiner_whose_download_does_not_grow_is_evicted() -> None:
    watched = Watched()
    watched.heartbeat("j", ready=False, loaded=2)
    assert watched.wait(LOAD_HOLDS * HOLD_S, "j", ready=False, loaded=2) == {}
    assert "has not got on with the state of stage 0" in watched.wait(1.0, "j", ready=False, loaded=2)["j"]


def test_what_loading_a_state_takes_is_measured_once_for_each_that_loads_one() -> None:
    watched = Watched()
    assert watched.progress.loads.value == MOVE_S
    watched.wait(3.0, "j", ready=False, loaded=2)
    watched.wait(2.0, "j", ready=True, stage=7)  # a mover's word of the stage that it comes from
    assert watched.progress.loads.value == MOVE_S
    watched.wait(10.0, "j", ready=True)
    assert watched.progress.loads.value == 5.0 + BEAT_S
    watched.agree(joining=(Member("j", 0, turns=3), Member("k", 0)))  # it still waits for the step to end
    watched.wait(1.0, "j", ready=True)
    assert watched.progress.loads.value == 5.0 + BEAT_S
    watched.wait(7.0, "k", ready=False)
    watched.wait(1.0, "k", ready=True)
    assert watched.progress.loads.value == 8.0 + BEAT_S, "the middle one of these two and the guess"


def test_a_state_that_is_there_before_the_first_step_was_not_downloaded() -> None:
    watched = Watched(msgspec.structs.replace(VIEW, phase=Phase.GATHERING))
    watched.wait(1.0, "j", ready=True)
    assert watched.progress.loads.value == MOVE_S


def test_a_joiner_that_has_its_state_may_wait_for_the_others() -> None:
    assert Watched().wait(1000.0, "j") == {}


@pytest.mark.parametrize(
    "view", [msgspec.structs.replace(VIEW, step=0), msgspec.structs.replace(VIEW, phase=Phase.GATHERING)]
)
def test_a_state_that_is_built_shows_nothing_until_it_stands(view: View) -> None:
    watched = Watched(view)
    watched.heartbeat("j", ready=False)
    assert watched.wait(LOAD_HOLDS * HOLD_S, "j", ready=False) == {}
    assert "j" in watched.wait(1.0, "j", ready=False)


def test_without_a_longest_wait_no_joiner_is_late() -> None:
    watched = Watched(settings=msgspec.structs.replace(SETTINGS, ready_timeout_s=0.0))
    assert watched.wait(5000.0, "j", ready=False) == {}


def test_a_leader_that_was_stopped_blames_nobody_for_that_time() -> None:
    watched = Watched()
    watched.heartbeat("b", ready=False)
    watched.heartbeat("j", ready=False)
    watched.agree()
    watched.wait(1.0, ready=False, number=5)
    watched.now += 500.0
    watched.progress.forgive(500.0, watched.now)
    assert watched.late() == {}
    assert watched.wait(500.0, ready=False, number=5).keys() == {"b", "j"}


def test_a_member_that_was_ready_for_long_is_not_late_when_the_leader_was_stopped() -> None:
    watched = Watched()
    watched.wait(300.0)
    watched.now += 100.0
    watched.progress.forgive(100.0, watched.now)
    assert watched.late() == {}


def test_a_leader_is_not_late_itself_and_whoever_never_beat_is_left_to_its_silence() -> None:
    watched = Watched()
    watched.heartbeat("a", ready=False)
    watched.now = 1000.0
    assert watched.late() == {}


# ------------------------------------------------------------------------------------------------------------- rounds


class Averaging:
    """One stage's round, of which the leader hears."""

    def __init__(self, peers: str = "abcd", leader: str = "z", *others: str) -> None:
        groups = tuple(tuple(Share(peer, ()) for peer in group) for group in (peers, *others))
        self.now, self.leader = 0.0, leader
        self.conduct = Conduct()
        self.watch = RoundWatch(Round(0, 0, 1, 1, groups), SETTINGS, 0.0)
        self.reduced: dict[str, Reduced] = {}
        self.waiting: dict[str, RoundWaits] = {}
        self.hops_s = 0.0

    def reduce(self, *peers: str) -> None:
        for peer in peers:
            self.reduced[peer] = Reduced(0, 0, 1, "sum", 1.0)
            self.watch.on_reduced(self.now)

    def waits(self, peer: str, parts: str = "", sums: str = "", vain: bool = True, piece: int = 0) -> None:
        """It says so now, and with every beat from now on."""
        self.waiting[peer] = RoundWaits(0, 0, 1, tuple(parts), tuple(sums), vain, piece)
        self.watch.on_waits(peer, self.waiting[peer], self.now)

    def verdict(self, after_s: float = HEAR_BEATS * BEAT_S) -> tuple[str, str]:
        until = self.now + after_s
        while self.now + BEAT_S <= until:
            self.now += BEAT_S
            for peer, waits in self.waiting.items():
                if peer not in self.reduced:
                    self.watch.on_waits(peer, waits, self.now)
        self.now = until
        verdicts = self.watch.verdicts(self.reduced, self.conduct, self.leader, self.now, self.hops_s)
        return verdicts[0] if verdicts else ("", "")


def test_whoever_sends_its_parts_to_nobody_is_evicted() -> None:
    round_ = Averaging()
    for peer in "abd":
        round_.waits(peer, parts="c")
    assert round_.verdict() == ("c", "keeps 3 of its stage waiting for its parts of a round, and lacks those of 0")


def test_of_two_stages_each_is_judged_at_once() -> None:
    """They do not wait for one another's exchange. One after the other cost eight seconds more."""
    groups = tuple(tuple(Share(peer, ()) for peer in stage) for stage in ("abc", "def"))
    watch, waits = RoundWatch(Round(0, 0, 1, 1, groups), SETTINGS, 0.0), {"a": "c", "b": "c", "d": "f", "e": "f"}
    for beat in range(int(HEAR_BEATS) + 1):
        for peer, other in waits.items():
            watch.on_waits(peer, RoundWaits(0, 0, 1, (other,), (), True, 0), beat * BEAT_S)
    verdicts = watch.verdicts({}, Conduct(), "a", HEAR_BEATS * BEAT_S)
    assert [peer for peer, _ in verdicts] == ["c", "f"]


def test_whoever_receives_nothing_is_evicted_and_not_those_that_it_waits_for() -> None:
    round_ = Averaging()
    round_.waits("c", parts="abd")
    for peer in "abd":
        round_.waits(peer, sums="c")
    assert round_.verdict()[0] == "c"


def test_whoever_says_that_it_lacks_everybodys_is_evicted() -> None:
    round_ = Averaging()
    round_.waits("c", parts="abd")
    assert round_.verdict()[0] == "c"


def test_the_others_are_heard_before_a_verdict() -> None:
    round_ = Averaging()
    round_.waits("d", parts="c")
    assert round_.verdict(HEAR_BEATS * BEAT_S / 2) == ("", "")
    for peer in "abd":
        round_.waits(peer, parts="c")
    assert round_.verdict() == ("c", "keeps 3 of its stage waiting for its parts of a round, and lacks those of 0")


def test_a_round_beside_the_next_steps_hops_may_wait_for_them() -> None:
    """Found 2026-11-25: with hops of 5 s each piece took as long, and two honest peers were evicted one after the other."""
    round_ = Averaging()
    round_.hops_s = 10.0
    for peer in "abd":
        round_.waits(peer, parts="c")
    assert round_.verdict(HEAR_BEATS * BEAT_S + 9.0) == ("", "")
    assert round_.verdict(1.0 + BEAT_S)[0] == "c"


def test_sums_are_looked_at_only_where_nobody_lacks_parts() -> None:
    round_ = Averaging()
    round_.waits("a", parts="c")
    for peer in "acd":
        round_.waits(peer, parts="c" if peer == "a" else "", sums="b")  # b's sum lacks what c has not sent
    assert round_.verdict()[0] == "c"
    round_ = Averaging()
    for peer in "acd":
        round_.waits(peer, sums="b")
    assert round_.verdict()[0] == "b"


def test_what_came_after_all_convicts_nobody() -> None:
    round_ = Averaging()
    for peer in "abd":
        round_.waits(peer, parts="c")
    assert round_.verdict(HEAR_BEATS * BEAT_S - BEAT_S) == ("", "")
    for parts in ("", "c"):
        for peer in "abd":
            round_.waits(peer, parts=parts)
    assert round_.verdict(BEAT_S) == ("", ""), "the time begins anew"
    for peer in "abd":
        round_.waits(peer)
    assert round_.verdict(100.0) == ("", "")


def test_a_wait_that_is_not_repeated_is_over() -> None:
    round_ = Averaging()
    for peer in "abd":
        round_.waits(peer, parts="c")
    round_.waiting.clear()
    assert round_.verdict() == ("", "")


def test_a_peer_that_waits_itself_though_not_in_vain_yet_is_not_at_fault() -> None:
    round_ = Averaging()
    for peer in "acd":
        round_.waits(peer, sums="b")
    round_.waits("b", parts="c", vain=False)
    assert round_.verdict() == ("", ""), "nor is c, so early"
    assert round_.verdict((SOON_BEATS + HEAR_BEATS) * BEAT_S)[0] == "c", "that cannot go on for ever"
    round_ = Averaging()
    for peer in "acd":
        round_.waits(peer, sums="b")
    assert round_.verdict()[0] == "b"


def test_a_peer_whose_parts_have_just_come_gets_time_to_make_its_sums_once() -> None:
    for _ in range(2):
        round_ = Averaging()
        for peer in "acd":
            round_.waits(peer, sums="b")
        round_.waits("b", parts="c", vain=False)
        assert round_.verdict(2 * BEAT_S) == ("", "")
        round_.waits("b")
        assert round_.verdict((FREED_BEATS - 1) * BEAT_S) == ("", "")
        assert round_.verdict((1 + HEAR_BEATS) * BEAT_S)[0] == "b"


def test_it_gets_that_time_once_for_each_piece_of_the_gradient() -> None:
    """An honest peer was evicted 20 ms after the part came that it had lacked: it had lacked one of another piece before."""
    round_ = Averaging()
    for at, piece in enumerate((2, 4, 4)):
        for peer in "acd":
            round_.waits(peer, sums="b", piece=piece)
        round_.waits("b", parts="c", vain=False, piece=piece)
        assert round_.verdict() == ("", "")
        round_.waits("b")
        assert round_.verdict((FREED_BEATS - 1) * BEAT_S)[0] == ("b" if at == 2 else "")
        for peer in "acd":
            round_.waits(peer)
        assert round_.verdict((FREED_BEATS + 1) * BEAT_S) == ("", "")
    for peer in "acd":
        round_.waits(peer, sums="b", piece=4)
    round_.waits("b", parts="c", vain=False, piece=9)
    round_.verdict(2 * BEAT_S)
    round_.waits("b")
    assert round_.verdict()[0] == "b", "nor for a piece at which nobody waits for it"


def test_of_two_pieces_the_one_before_comes_first() -> None:
    round_ = Averaging()
    round_.waits("b", sums="c", piece=1)
    for peer in "acd":
        round_.waits(peer, parts="b", piece=2)  # it cannot begin with this piece
    assert round_.verdict()[0] == "c"


def test_one_that_waits_for_one_is_believed_once() -> None:
    round_ = Averaging()
    round_.waits("a", parts="c")
    assert round_.verdict() == ("c", "a has waited in vain for its parts of a round")
    again = Averaging("abde")
    again.conduct = round_.conduct
    again.waits("a", parts="d")
    assert again.verdict()[0] == "a", "the second that it alone accuses"


def test_the_only_one_that_is_not_done_is_the_one_that_cannot_receive() -> None:
    round_ = Averaging()
    round_.reduce("b", "c", "d")
    round_.waits("a", sums="c")
    assert round_.verdict()[0] == "a"
    pair = Averaging("ac")
    pair.reduce("c")
    pair.waits("a", sums="c")
    assert pair.verdict()[0] == "c", "of two, it cannot be told by that"


def test_a_leader_does_not_judge_in_its_own_case() -> None:
    round_ = Averaging(leader="a")
    round_.waits("a", parts="c")
    assert round_.verdict() == ("a", "lacks parts of a round, of c, and does not judge in its own case")


def test_of_a_stage_of_two_the_leader_is_believed_as_it_would_be_by_another_and_once() -> None:
    """Another leader would convict on its word, after as long a round again: two mute peers cost two leaders, and 32 s."""
    round_ = Averaging("ac", leader="a")
    round_.waits("a", parts="c")
    assert round_.verdict() == ("c", "a has waited in vain for its parts of a round")
    again = Averaging("ad", leader="a")
    again.conduct = round_.conduct
    again.waits("a", parts="d")
    assert again.verdict()[0] == "a", "it cannot receive, or it lies"


def test_what_is_said_of_strangers_of_oneself_or_after_the_end_counts_for_nothing() -> None:
    round_ = Averaging("abc", "z", "de")
    round_.waits("a", parts="axde")
    assert round_.verdict() == ("", ""), "d and e are of another stage, x of none"
    round_ = Averaging("abc")
    round_.waits("a", parts="bc")
    round_.reduce("a")
    assert round_.verdict() == ("", ""), "it has got done since"


def test_a_round_in_which_nobody_complains_may_take_long() -> None:
    round_ = Averaging()
    for _ in range(100):
        assert round_.verdict(10.0) == ("", "")


def test_the_last_of_a_stage_gets_several_times_what_the_others_took() -> None:
    round_ = Averaging()
    round_.now = 100.0
    round_.reduce("b", "c", "d")
    assert round_.verdict(ROUNDS * 100.0) == ("", "")
    assert round_.verdict(1.0)[0] == "a"
    quick = Averaging()
    quick.reduce("b", "c", "d")
    assert quick.verdict(LAST_BEATS * BEAT_S) == ("", "")
    assert quick.verdict(1.0) == ("a", "has not got done with a round for 13 s in which the others of its stage are")


def test_the_only_replica_of_a_stage_gets_more_time_than_one_that_others_can_replace() -> None:
    round_ = Averaging("ab", "z", "c")
    round_.reduce("a", "b")
    assert round_.verdict(HOLDS * HOLD_S) == ("", ""), "without it the run goes back to a checkpoint"
    assert round_.verdict(1.0) == ("c", "has not got done with a round for 61 s in which the others are")


def test_two_that_are_not_done_are_not_evicted_for_being_slow() -> None:
    round_ = Averaging()
    round_.reduce("c", "d")
    assert round_.verdict(10_000.0) == ("", "")


def test_each_that_gets_done_gives_the_others_time() -> None:
    round_ = Averaging()
    for peer in "bcd":
        round_.now += 10.0
        round_.reduce(peer)
    assert round_.verdict(ROUNDS * 30.0) == ("", "")


def test_a_leader_that_was_stopped_blames_nobody_for_the_length_of_a_round() -> None:
    round_ = Averaging()
    round_.reduce("b", "c", "d")
    round_.now += 500.0
    round_.watch.forgive(500.0, round_.now)
    assert round_.verdict(0.0) == ("", "")
    assert round_.verdict(LAST_BEATS * BEAT_S + 1.0)[0] == "a"

"""Whom the leader evicts for what others say of it, whom it does not, and how long the evicted stay out."""

from __future__ import annotations

import pytest

from shoal.core.leader.evictions import ALONE, COMPLAINTS, DIFFERS, FEW, GROWN, KEPT, TIES, Conduct, Pauses, evicting
from shoal.core.messages import Evicted, Settings

SETTINGS = Settings(stages=1, microbatches=4, steps=9, ban_s=10.0)
MANY = 6  # witnesses


def accused_by(conduct: Conduct, accusers: str, accused: str = "x", witnesses: int = MANY) -> list[str]:
    """Who was to be evicted after each of these complaints, '' where nobody was."""
    verdicts = [conduct.accuse(peer, accused, "is wrong", witnesses) for peer in accusers]
    return [verdict[0] if verdict is not None else "" for verdict in verdicts]


# ------------------------------------------------------------------------------------------------------- accusations


def test_three_complaints_of_two_peers_evict() -> None:
    conduct = Conduct()
    assert accused_by(conduct, "aab") == ["", "", "x"]
    verdict = conduct.accuse("b", "x", "is wrong again", MANY)
    assert verdict is not None and verdict[1] == "after complaints by a and b, the last: is wrong again"


def test_two_complaints_of_two_peers_may_be_damaged_messages() -> None:
    assert accused_by(Conduct(), "ab") == ["", ""]


def test_one_accuser_among_many_evicts_nobody_however_often_it_complains() -> None:
    assert not any(accused_by(Conduct(), "a" * 50))


def test_two_processes_of_one_key_are_one_accuser() -> None:
    conduct = Conduct()
    for peer in ("a.1", "a.2") * 5:
        assert conduct.accuse(peer, "x", "is wrong", MANY) is None


def test_what_a_peer_says_of_itself_does_not_count() -> None:
    conduct = Conduct()
    assert not any(accused_by(conduct, "x" * 10))
    assert accused_by(conduct, "ab") == ["", ""], "nor does it add up with what others say"


def test_the_one_other_that_can_have_seen_it_is_believed_once() -> None:
    conduct = Conduct()
    assert accused_by(conduct, "aaa", witnesses=1) == ["", "", "x"]
    assert accused_by(conduct, "aaa", accused="y", witnesses=1) == ["", "", "a"], (
        "two peers by its word alone are too many"
    )


def test_the_same_peer_may_be_convicted_again_by_the_one_that_sees_it() -> None:
    conduct = Conduct()
    for process in ("x.1", "x.2"):
        conduct.keep(["a"])
        verdict = [conduct.accuse("a", process, "is wrong", 1) for _ in range(COMPLAINTS)][-1]
        assert verdict is not None and verdict[0] == process


def test_whoever_accuses_more_peers_than_can_be_goes_itself() -> None:
    conduct = Conduct()
    assert accused_by(conduct, "a", "x") == accused_by(conduct, "a", "y") == [""], f"{FEW} may be bad luck"
    assert accused_by(conduct, "a", "z") == ["a"]


def test_whom_the_leader_found_gone_was_accused_by_right() -> None:
    conduct = Conduct()
    for accused in "bc":
        assert conduct.accuse("a", accused, "answers nothing", 5) is None
    conduct.keep("adef")
    assert conduct.accuse("a", "d", "not finite", 5) is None
    conduct.keep("aef", ["d"])  # it was convicted, perhaps for that word
    assert conduct.accuse("a", "e", "not finite", 5) is None
    assert conduct.accuse("a", "f", "not finite", 5) == ("a", "accuses 3 peers, the last f: not finite")


def test_in_a_large_stage_a_third_may_be_accused() -> None:
    conduct = Conduct()
    said = [accused_by(conduct, "a", f"x{number}", witnesses=12)[0] for number in range(5)]
    assert said == ["", "", "", "", "a"]


def test_whoever_alone_accuses_several_again_and_again_goes_itself() -> None:
    conduct = Conduct()
    said = [accused_by(conduct, "a", peer, witnesses=12)[0] for peer in ("x", "y", "z") * COMPLAINTS]
    assert said == [""] * (ALONE * COMPLAINTS - 1) + ["a"]


def test_an_honest_peer_that_others_bear_out_may_accuse_several() -> None:
    conduct = Conduct()
    for peer in ("x", "y", "z"):
        assert next(one for one in accused_by(conduct, "ab" * COMPLAINTS, peer, witnesses=12) if one) == peer


def test_what_was_said_in_a_step_is_over_with_it() -> None:
    conduct = Conduct()
    accused_by(conduct, "aa")
    conduct.step()
    assert accused_by(conduct, "b") == [""]


def test_what_a_peer_said_goes_when_it_leaves_and_so_does_what_is_held_against_it() -> None:
    conduct = Conduct()
    accused_by(conduct, "aa")
    conduct.keep(["b", "x"])
    assert accused_by(conduct, "b") == [""], "a left"
    conduct = Conduct()
    accused_by(conduct, "aa")
    conduct.keep(["a", "b"])
    assert accused_by(conduct, "b") == [""], "x left and came back"


# ------------------------------------------------------------------------------------------------- different values


def test_the_majority_of_keys_is_right_and_two_processes_of_one_key_are_one() -> None:
    conduct = Conduct()
    assert conduct.right({"1": ["a"], "2": ["b", "c"]}, "z") == ["b", "c"]
    assert conduct.right({"1": ["b.1", "b.2"], "2": ["a", "c"]}, "z") == ["a", "c"]


def test_in_a_tie_the_leaders_own_replica_is_right_but_a_majority_is_stronger() -> None:
    conduct = Conduct()
    assert conduct.right({"1": ["a"], "2": ["leader"]}, "leader") == ["leader"]
    assert conduct.right({"1": ["a", "b"], "2": ["leader"]}, "leader") == ["a", "b"]


def test_whoever_was_in_fewer_ties_that_nobody_could_settle_is_right() -> None:
    conduct = Conduct()
    assert conduct.right({"1": ["liar"], "2": ["a"]}, "z") == ["liar"], "listed first: nothing else tells them apart"
    assert conduct.right({"1": ["liar"], "2": ["b"]}, "z") == ["b"]


def test_a_majority_is_no_doubt_about_anybody() -> None:
    conduct = Conduct()
    conduct.right({"1": ["a", "b"], "2": ["c"]}, "z")
    assert conduct.right({"1": ["a"], "2": ["d"]}, "z") == ["a"]


def test_a_replica_that_differs_downloads_its_state_twice_and_is_evicted_at_the_third_time() -> None:
    conduct = Conduct()
    assert [conduct.differs(f"x.{process}", "differs") is not None for process in range(DIFFERS)] == [
        False,
        False,
        True,
    ]
    assert conduct.differs("y", "differs") is None


# ------------------------------------------------------------------------------------------------------------ pauses


def test_whoever_is_evicted_is_counted_under_its_key_and_its_invite() -> None:
    once = evicting((), ["k1.1.inv.4"])
    assert once == (Evicted("k1", 1), Evicted("inv", 1))
    assert evicting(once, ["k2.1.inv.4"]) == (Evicted("k1", 1), Evicted("k2", 1), Evicted("inv", 2))
    assert evicting((), ["p3.1"]) == (Evicted("p3", 1),), "a plain name has an invite of its own, which is its key"


def test_a_view_remembers_the_newest_evicted_and_no_more_than_it_can_carry() -> None:
    many = evicting((), [f"p{number}" for number in range(KEPT + 5)])
    assert len(many) == KEPT and many[-1].key == f"p{KEPT + 4}" and "p4" not in [one.key for one in many]
    again = evicting(many, ["p5"])
    assert again[-1] == Evicted("p5", 2)


@pytest.mark.parametrize(("times", "pause_s"), [(1, 60.0), (2, 240.0), (3, 960.0), (GROWN + 1, 3840.0), (40, 3840.0)])
def test_a_key_stays_out_longer_each_time_but_not_for_ever(times: int, pause_s: float) -> None:
    pauses = Pauses(SETTINGS)
    pauses.on_view((Evicted("p3", times),), 100.0)
    assert pauses.until("p3.1", []) == pauses.until("p3.2", []) == 100.0 + pause_s
    assert pauses.until("p4.1", []) < 0.0


def test_a_pause_begins_with_the_eviction_and_not_with_each_view() -> None:
    pauses = Pauses(SETTINGS)
    for now in (100.0, 105.0, 109.0):
        pauses.on_view((Evicted("p3", 1),), now)
    assert pauses.until("p3.1", []) == 160.0
    pauses.on_view((Evicted("p3", 2),), 170.0)
    assert pauses.until("p3.1", []) == 410.0


def test_a_new_leader_keeps_out_whom_the_view_names() -> None:
    """It does not know since when: the pause begins anew."""
    evicted = evicting(evicting((), ["p3.1"]), ["p3.2"])
    successor = Pauses(SETTINGS)
    successor.on_view(evicted, 500.0)
    assert successor.until("p3.3", []) == 740.0


def test_an_invite_stays_out_when_more_of_its_peers_were_evicted_than_are_in_good_standing() -> None:
    pauses = Pauses(SETTINGS)
    pauses.on_view(evicting((), ["k1.1.inv.9"]), 0.0)
    assert pauses.until("k2.1.inv.9", []) == 60.0, "another key costs nothing"
    assert pauses.until("k2.1.inv.9", ["k3.1.inv.9"]) < 0.0, "one broken machine of a laboratory keeps out no other"
    assert pauses.until("k2.1.inv.9", ["k3.1.other.9"]) == 60.0, (
        "whoever came by another invite says nothing of this one"
    )
    assert pauses.until("k1.2.inv.9", ["k3.1.inv.9"]) == 60.0, "the broken one itself stays out"
    assert pauses.until("k9.1.other.9", []) < 0.0


def test_two_that_differ_alone_do_not_go_on_together_and_who_stays_meets_a_third() -> None:
    conduct = Conduct()
    assert conduct.right({"1": ["liar"], "2": ["a"]}, "z") == ["liar"]
    assert [conduct.differs("a", "differs", tie=True) is not None for _ in range(TIES)] == [False, True]
    assert conduct.right({"1": ["liar"], "2": ["b"]}, "z") == ["b"]
    verdict = conduct.differs("liar", "differs", tie=True)
    assert verdict is not None and verdict[0] == "liar", "at once: it has differed with two, one by one"


def test_a_member_alone_that_differs_from_each_that_comes_to_its_stage_is_the_odd_one() -> None:
    conduct = Conduct()
    assert conduct.odd_one("a", "liar") is None and conduct.odd_one("a", "liar") is None
    verdict = conduct.odd_one("b", "liar")
    assert verdict is not None and verdict[0] == "liar"
    conduct.odd_one("liar", "a")
    assert conduct.odd_one("liar", "c") is None, "a joiner that has differed with several is it itself"


def test_a_likely_value_settles_a_tie() -> None:
    assert Conduct().right({"1": ["leader"], "2": ["a"]}, "leader", likely="2") == ["a"]


def test_who_has_differed_with_more_is_believed_less_than_whom_it_accuses() -> None:
    conduct = Conduct()
    conduct.right({"1": ["liar"], "2": ["a"]}, "z")
    verdict = conduct.alone("liar", "b", "is wrong")
    assert verdict[0] == "liar"


def test_rounds_given_up_count_over_steps() -> None:
    conduct = Conduct()
    assert [conduct.gives_up("a.1"), conduct.gives_up("a.2")] == [1, 2]
    conduct.step()
    assert conduct.gives_up("a.1") == 3

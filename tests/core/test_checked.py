"""Who has lied when the sums of a round are not those of its parts."""

from __future__ import annotations

import math

import msgspec
import pytest
from tests.core.test_evicting import a_run, again, joiners, members, whole_books
from tests.core.test_leader import LeaderRig

from shoal.core.allreduce.checked import ROUNDING, SIGMAS, SumChecks, WrongSums, plus, wrong_sums
from shoal.core.leader.evictions import COMPLAINTS
from shoal.core.messages import OwnedSums, Peer, Reduced, Result, Sketch

replace = msgspec.structs.replace


def a_sketch(value: float) -> Sketch:
    return Sketch((value, -value, 2 * value, -value), value * value)


def honest(group: str, round_: int = 1) -> dict[Peer, Reduced]:
    """Replica j's part of what replica o owns is the number 10 o + j + 1."""

    def owned(owner: int, me: int) -> OwnedSums:
        parts = tuple(a_sketch(10.0 * owner + j + 1) for j in range(len(group)))
        known = OwnedSums(f"digest {owner}", plus(parts), parts[me])
        return replace(known, part=Sketch(), parts=parts) if me == owner else known

    everything = range(len(group))
    return {
        peer: Reduced(0, 0, round_, "sum", 4.5, tuple(owned(owner, me) for owner in everything))
        for me, peer in enumerate(group)
    }


def lies(reduced: dict[Peer, Reduced], peer: Peer, owner: int, **changes: object) -> None:
    """That peer says another thing of what that owner owns."""
    of = list(reduced[peer].sums)
    of[owner] = replace(of[owner], **changes)
    reduced[peer] = replace(reduced[peer], sums=tuple(of))


def sums_up_wrong(reduced: dict[Peer, Reduced], group: str, owner: int, **besides: object) -> None:
    """An owner sends all the same wrong sum."""
    for peer in group:
        lies(reduced, peer, owner, sum=a_sketch(99.0), digest="wrong")
    lies(reduced, group[owner], owner, **besides)


@pytest.mark.parametrize("group", ("ab", "abc", "abcde"))
def test_honest_replicas_are_not_accused(group: str) -> None:
    assert wrong_sums(group, honest(group), 0.0) is None


@pytest.mark.parametrize("group", ("ab", "abc"))
def test_an_owner_whose_sum_is_not_that_of_its_parts_is_convicted_at_once(group: str) -> None:
    reduced = honest(group)
    sums_up_wrong(reduced, group, 1)

    finding = wrong_sums(group, reduced, 0.0)

    assert finding is not None and [peer for peer, _ in finding.guilty] == ["b"] and not finding.words


def test_an_owner_that_makes_up_the_parts_of_others_contradicts_all_of_them() -> None:
    reduced = honest("abc")
    sums_up_wrong(reduced, "abc", 1, parts=(a_sketch(40.0), a_sketch(29.0), a_sketch(30.0)))
    finding = wrong_sums("abc", reduced, 0.0)
    assert finding is not None and [peer for peer, _ in finding.guilty] == ["b"]

    reduced = honest("ab")
    sums_up_wrong(reduced, "ab", 1, parts=(a_sketch(40.0), a_sketch(59.0)))
    finding = wrong_sums("ab", reduced, 0.0)
    assert finding is not None and not finding.guilty and [word[:2] for word in finding.words] == [("a", "b")]


def test_an_owner_that_sends_each_another_sum_is_convicted_by_two() -> None:
    reduced = honest("abc")
    for peer in "ac":
        lies(reduced, peer, 1, digest=f"for {peer}", sum=a_sketch(7.0))
    finding = wrong_sums("abc", reduced, 0.0)
    assert finding is not None and [peer for peer, _ in finding.guilty] == ["b"]


def test_who_alone_finds_fault_with_several_owners_is_convicted() -> None:
    reduced = honest("abcd")
    for owner in (0, 1):
        lies(reduced, "d", owner, part=a_sketch(1e6))
    finding = wrong_sums("abcd", reduced, 0.0)
    assert finding is not None and [peer for peer, _ in finding.guilty] == ["d"] and not finding.words


def test_who_does_not_say_what_its_sums_are_made_of_is_convicted() -> None:
    reduced = honest("abc")
    reduced["c"] = replace(reduced["c"], sums=())
    finding = wrong_sums("abc", reduced, 0.0)
    assert finding is not None and [peer for peer, _ in finding.guilty] == ["c"]
    assert wrong_sums("abc", {peer: replace(one, sums=()) for peer, one in reduced.items()}, 0.0) is None


def test_what_fp32_rounds_off_and_what_encoding_loses_is_no_lie_and_more_is() -> None:
    parts = tuple(a_sketch(value) for value in (3.0, 4.0))
    most = SIGMAS * 3 * ROUNDING * 7.0

    def judged(off: float, lost: float, most_lost: float) -> WrongSums | None:
        reduced = honest("ab")
        total = plus((*parts, a_sketch(off), a_sketch(-lost)))
        for peer in "ab":
            lies(reduced, peer, 0, sum=total)
        lies(reduced, "a", 0, parts=parts, lost=a_sketch(lost))
        lies(reduced, "b", 0, part=parts[1])
        return wrong_sums("ab", reduced, most_lost)

    assert judged(most / 2.5, 0.0, 0.0) is None and judged(most, 0.0, 0.0) is not None
    assert judged(0.0, 0.1, 0.05) is None and judged(0.0, 0.1, 0.0) is not None and judged(0.0, 1.0, 0.05) is not None
    assert judged(math.nan, 0.0, 0.0) is not None


def test_chunks_of_an_owner_are_counted_together() -> None:
    checks, chunk = SumChecks(), (a_sketch(1.0), a_sketch(2.0), Sketch())
    assert checks.of("ab") == ()
    for digest in ("x", "y"):
        checks.on_added("a", Result(sketches=chunk), "ab", "ab")
        checks.on_gathered(
            "ab", Result(digests=(digest, "z"), sketches=(a_sketch(3.0), Sketch(), a_sketch(5.0), a_sketch(4.0)))
        )
    mine, other = checks.of("ab")
    assert mine.parts == tuple(plus((one, one)) for one in chunk[:2]) and mine.sum == plus((a_sketch(3.0),) * 2)
    assert other.part == plus((a_sketch(4.0),) * 2) and mine.digest != other.digest


def reports(leader: LeaderRig) -> None:
    """The open round is over for everybody; in stage 1 (b, d) the sums of d are wrong."""
    for group in (round_ := leader.rounds()[-1]).groups:
        peers = "".join(share.peer for share in group)
        reduced = honest(peers, round_.round)
        if "d" in peers:
            sums_up_wrong(reduced, peers, peers.index("d"))
        for peer in peers:
            leader.hear(peer, replace(reduced[peer], digest=f"sum {peers}"))
    leader.wait(0.5, alive=("b", "c", "d"))


def test_a_wrong_sum_is_not_committed_and_its_maker_alone_is_evicted() -> None:
    leader = a_run("bcd")
    whole_books(leader)
    reports(leader)
    assert leader.view.step == 0 and members(leader) == "abc" and not joiners(leader)
    assert "d its sums are not those of the parts that it lists" in leader.reasons


def test_one_word_against_another_is_believed_after_some_rounds_and_harms_nobody_before() -> None:
    leader = a_run("bcd")
    whole_books(leader)
    for number in range(COMPLAINTS):
        assert members(leader) == "abcd" and not joiners(leader)
        for group in (round_ := leader.rounds()[-1]).groups:
            peers = "".join(share.peer for share in group)
            reduced = honest(peers, round_.round)
            if "b" in peers:
                lies(reduced, "b", peers.index("d"), digest=f"another {number}", sum=a_sketch(7.0))
                reduced["b"] = replace(reduced["b"], digest=f"another {number}")
            for peer in peers:
                leader.hear(peer, reduced[peer])
        assert leader.view.step == 0
        if number + 1 < COMPLAINTS:
            again(leader, ("b", "c", "d"))
    leader.wait(0.5, alive=("b", "c", "d"))
    assert members(leader) == "abc" and not joiners(leader)

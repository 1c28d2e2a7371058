"""What a member accepts of its leader, when it doubts it, and whose word counts beside its own."""

from __future__ import annotations

import random
from itertools import chain, combinations

import pytest
from msgspec.structs import replace

from shoal.core.consensus.election import DOUBT
from shoal.core.leader.membership import may_rest, most_resting, owned
from shoal.core.member.judge import FEW, FIRST, IDLE, PATIENT, PENDING, Pauses, Words
from shoal.core.messages import (
    Accept,
    Command,
    Committed,
    Entry,
    Lead,
    Member,
    Note,
    Objection,
    Phase,
    Proof,
    Propose,
    Received,
    Send,
    Settings,
    Share,
    Signed,
    Tick,
    Undoing,
    View,
    VoteRequest,
)
from shoal.core.peer import PeerMachine

SETTINGS = Settings(stages=1, microbatches=5, steps=100)
NAMES = tuple("abcde")
MEMBERS = tuple(Member(name, 0) for name in NAMES)
FIRST_VIEW = View(number=2, step=3, members=MEMBERS, owners=(0, 1, 2, 3, 4), phase=Phase.TRAINING)
PROOF = Proof("a", tuple(Signed(name) for name in NAMES))
LAST = Committed(3, 7, 1.0, 2.0, ("d",), (tuple(Share(name, (at,)) for at, name in enumerate(NAMES)),))
TIMEOUT_S = SETTINGS.heartbeat_timeout_s


class Follower:
    """One of five members, whose leader is a. It holds no state, so that it vouches for nothing."""

    def __init__(self, name: str = "b", view: View = FIRST_VIEW) -> None:
        self.machine, self.now = PeerMachine(name, SETTINGS, random.Random(1), found=False), 0.0
        self.hear("a", Propose(Entry(1, view, NAMES), 1, PROOF))
        assert self.machine.view == view and self.machine.leader == "a"

    def hear(self, peer: str, message: object) -> list[Command]:
        return self.machine.handle(Received(peer, message), self.now)  # type: ignore[arg-type]

    def proposed(self, **changes: object) -> list[Command]:
        view = replace(FIRST_VIEW, number=3, **changes)
        return self.hear("a", Propose(Entry(1, view, NAMES), 1))

    def follow_for(self, seconds: float) -> list[Command]:
        """The leader's heartbeats come, and nothing else."""
        commands, until = list[Command](), self.now + seconds
        while self.now < until:
            self.now += 0.5
            commands += self.hear("a", Lead(1, self.machine.register.agreed.number))  # type: ignore[union-attr]
            commands += self.machine.handle(Tick(), self.now)
        return commands

    @property
    def doubts(self) -> bool:
        return self.machine.register.election.distrusts("a", self.now)


def accepts(commands: list[Command]) -> bool:
    return any(isinstance(one, Send) and isinstance(one.message, Accept) and one.message.number for one in commands)


def objections(commands: list[Command]) -> list[Objection]:
    return [one.message for one in commands if isinstance(one, Send) and isinstance(one.message, Objection)]


GOOD = {"step": 4, "last": LAST}
BAD: dict[str, dict[str, object]] = {
    "hoards": {**GOOD, "owners": (0,) * 5},
    "shares out otherwise": {**GOOD, "owners": (1, 0, 2, 3, 4)},
    "goes back": {"step": 0, "epoch": 1, "phase": Phase.GATHERING, "owners": ()},
    "goes back as if undone": {
        "step": 0, "epoch": 1, "phase": Phase.GATHERING, "owners": (), "undoing": Undoing(times=1, steps=3, epoch=1),
    },
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_what_everybody_can_see_to_be_wrong_is_refused_doubted_and_told(what: str) -> None:
    follower = Follower()
    commands = follower.proposed(**BAD[what])
    assert not accepts(commands) and follower.doubts
    assert {one.peer for one in commands if isinstance(one, Send) and isinstance(one.message, Objection)} == set("cde")
    assert not objections(follower.proposed(**BAD[what])), "not at once again"


def test_a_commit_as_it_should_be_is_accepted() -> None:
    follower = Follower()
    assert accepts(follower.proposed(**GOOD)) and not follower.doubts


def test_owners_that_rest_are_believed_as_long_as_they_are_few() -> None:
    few = Follower().proposed(**GOOD, owners=(2, 3, 4, 2, 3))
    many = Follower().proposed(**GOOD, owners=(3, 4, 3, 4, 3))
    assert accepts(few) and not accepts(many) and most_resting(5) == 2


@pytest.mark.parametrize("home", [True, False])
@pytest.mark.parametrize("microbatches", [2, 3, 5, 7, 12])
@pytest.mark.parametrize("new", ["", "e", "ac"])
def test_whoever_rests_by_the_leaders_rule_is_found_by_its_followers(home: bool, microbatches: int, new: str) -> None:
    """Found 2026-11-25: with fewer microbatches than members, or where a new key rests, followers refused an honest leader."""
    settings = replace(SETTINGS, home=home)
    for rest in chain.from_iterable(combinations(NAMES, count) for count in range(most_resting(5) + 1)):
        owners = owned(MEMBERS, microbatches, rest, new, settings)
        view = replace(FIRST_VIEW, owners=owners)
        assert any(owned(MEMBERS, microbatches, one, new, settings) == owners for one in may_rest(view, new)), rest


def test_new_keys_own_nothing_also_where_all_others_rest() -> None:
    assert set(owned(MEMBERS, 5, "abcd", "e", SETTINGS)) == {0, 1, 2, 3}


def test_a_way_back_for_a_stage_without_members_or_an_undone_eviction_is_accepted() -> None:
    back = {"number": 3, "step": 0, "epoch": 1, "phase": Phase.GATHERING, "owners": ()}
    settings = replace(SETTINGS, stages=2)
    machine = PeerMachine("b", settings, random.Random(1), found=False)
    machine.handle(Received("a", Propose(Entry(1, FIRST_VIEW, NAMES), 1, PROOF)), 0.0)
    assert accepts(machine.handle(Received("a", Propose(Entry(1, replace(FIRST_VIEW, **back), NAMES), 1)), 0.1))
    undone = replace(FIRST_VIEW, members=MEMBERS[:4], undoing=Undoing(times=1, steps=3, epoch=1), **back)
    assert accepts(Follower().hear("a", Propose(Entry(1, undone, NAMES), 1)))


def test_who_has_reported_nothing_does_not_let_its_part_be_committed() -> None:
    follower = Follower()
    replica = follower.machine.server._replica
    replica.has_state, replica.step = True, 3
    assert not accepts(follower.proposed(**GOOD)) and follower.doubts


def test_the_evicted_tell_the_others_and_agree_unless_it_is_half_of_all() -> None:
    follower = Follower("e")
    commands = follower.proposed(members=MEMBERS[:4], owners=(0, 1, 2, 3, 0))
    assert accepts(commands) and [one.evicted for one in objections(commands)] == [True] * 3
    assert not accepts(Follower("e").proposed(members=MEMBERS[:2], owners=(0, 1, 0, 1, 0)))


def test_nobody_accepts_a_view_that_the_rest_could_not_agree_on() -> None:
    """Found 2026-11-25 (seed `lines 300`): four of twelve had accepted one that evicted eight, who refused it. Every later leader had to
    propose it again, and no view was agreed any more."""
    follower = Follower()
    commands = follower.proposed(members=MEMBERS[:2], owners=(0, 1, 0, 1, 0))
    assert not accepts(commands) and follower.doubts and "it evicts 3 of 5" in objections(commands)[0].reason
    assert accepts(Follower().proposed(members=MEMBERS[:3], owners=(0, 1, 2, 0, 1)))


def test_two_words_of_others_are_enough_and_one_is_not() -> None:
    follower = Follower()
    word = Objection("a", 3, "it is wrong")
    follower.hear("c", word)
    follower.hear("c", word)
    follower.hear("x", word)
    assert not follower.doubts
    follower.hear("d", word)
    assert follower.doubts


def test_more_evicted_than_a_leader_needs_to_evict_are_enough() -> None:
    """The word of whom a view has removed counts, as that of whom one is about to; a stranger's does not."""
    follower, word = Follower(), Objection("a", 3, "it evicts me", evicted=True)
    rest = replace(FIRST_VIEW, number=3, members=MEMBERS[:4], owners=(0, 1, 2, 3, 0))
    follower.hear("a", Propose(Entry(1, rest, NAMES), 1, PROOF))
    for peer in ("x.0", "y.0", "z.0", "c", "d"):
        follower.hear(peer, word)
        assert not follower.doubts
    follower.hear("e", word)
    assert follower.doubts and FEW == 2


VOTERS = [f"v{at}" for at in range(9)]


def test_one_member_accuses_two_leaders_at_most() -> None:
    words = Words()
    for leader in ("a", "b", "c"):
        for by in ("x", "y"):
            words.add(leader, by, False, 0.0, 1.0)
    assert words.enough("a", VOTERS) and words.enough("b", VOTERS) and not words.enough("c", VOTERS)
    words.add("c", "x", False, 2.0, 3.0)
    words.add("c", "y", False, 2.0, 3.0)
    assert words.enough("c", VOTERS), "what is old counts no more"


def test_a_leader_may_evict_three_of_ten_however_they_object_and_no_more() -> None:
    """So many may lie together. It evicts some before others, and with each there are fewer left; those of a view that is not agreed
    yet are still voters."""
    words, keys = Words(), [f"k{at}" for at in range(60)]
    for count, by in enumerate(keys[:18], 1):
        words.add("a", by, True, 0.0, 1.0)
        assert not words.enough("a", keys[count:]) and not words.enough("a", keys[max(0, count - 5) :])
    words.add("a", keys[18], True, 0.0, 1.0)
    assert words.enough("a", keys[19:]) and words.enough("a", keys)


@pytest.mark.parametrize("steps", [0, 5])
def test_a_leader_under_which_nothing_is_done_is_doubted_after_a_while_and_followed_all_the_same(steps: int) -> None:
    follower = Follower()
    for step in range(steps):
        follower.now += 1.0
        view = replace(FIRST_VIEW, number=3 + step, step=4 + step, last=replace(LAST, step=3 + step))
        follower.hear("a", Propose(Entry(1, view, NAMES), 1, PROOF))
    patience_s = (IDLE if steps else FIRST) * TIMEOUT_S
    assert not [one for one in follower.follow_for(patience_s - 1.0) if isinstance(one, Note)] and not follower.doubts
    commands = follower.follow_for(TIMEOUT_S + 2.0)
    follower.hear("a", Lead(1, follower.machine.view.number))  # type: ignore[union-attr]
    assert follower.doubts and follower.machine.leader == "a"
    assert [one for one in commands if isinstance(one, Send) and isinstance(one.message, VoteRequest)], (
        "it asks for votes"
    )


def test_a_proposal_that_is_not_agreed_is_a_reason_for_doubt() -> None:
    follower = Follower()
    assert accepts(follower.proposed(**GOOD))
    follower.follow_for(PENDING * TIMEOUT_S - 1.0)
    assert not follower.doubts
    follower.follow_for(2.0)
    assert follower.doubts


def test_who_doubts_grants_another_its_vote_though_it_hears_its_leader() -> None:
    follower = Follower()
    request = VoteRequest(1, 1, 2, trial=True)

    def granted() -> bool:
        follower.hear("a", Lead(1, 2))
        return any(
            getattr(one.message, "granted", False) for one in follower.hear("c", request) if isinstance(one, Send)
        )

    assert not granted()
    follower.machine.register.election.distrust("a", follower.now)
    assert granted()
    follower.now += DOUBT * TIMEOUT_S + 1.0
    assert not granted(), "a doubt ends"


def test_pauses_that_are_usual_are_no_reason_for_doubt() -> None:
    pauses = Pauses()
    pauses.begin(0.0)
    for step in range(5):
        pauses.commit(100.0 * (step + 1))
    assert not pauses.too_long(TIMEOUT_S, 500.0 + 290.0) and pauses.too_long(TIMEOUT_S, 500.0 + 310.0)
    pauses.forgive(100.0, 810.0)
    assert not pauses.too_long(TIMEOUT_S, 810.0), "this process was stopped"
    for at in range(820, 1900, 50):
        pauses.work(float(at))
    assert "nothing is committed" in pauses.too_long(TIMEOUT_S, 1900.0)


def test_each_leader_that_is_doubted_since_the_last_commit_gives_the_next_one_twice_the_time() -> None:
    """A leader waits for peers that it knows to be slow; where its followers wait less, each new leader is doubted before it acts."""
    pauses = Pauses()
    pauses.begin(0.0)
    for idle_s in (FIRST * TIMEOUT_S, 2 * FIRST * TIMEOUT_S, 4 * FIRST * TIMEOUT_S):
        assert not pauses.too_long(TIMEOUT_S, idle_s - 1.0) and pauses.too_long(TIMEOUT_S, idle_s + 1.0)
        pauses.begin(0.0)
        pauses.doubted()
    for _ in range(100):
        pauses.doubted()
    assert pauses.too_long(TIMEOUT_S, PATIENT * FIRST * TIMEOUT_S + 1.0), "there is a bound"
    pauses.begin(0.0)
    pauses.commit(0.0)
    assert pauses.too_long(TIMEOUT_S, FIRST * TIMEOUT_S + 1.0), "a commit ends that"

"""Nobody's word is enough: what strangers, single voters and forged signatures can do to an agreement, which is nothing."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest

from shoal.core.consensus.certificates import accepted, checked, seal, voted
from shoal.core.consensus.election import PAUSES, TERMS, ElectionRole
from shoal.core.consensus.register import Register
from shoal.core.consensus.validity import flaw
from shoal.core.messages import (
    Accept,
    Committed,
    Dismissed,
    Entry,
    Lead,
    Member,
    Message,
    Note,
    Phase,
    Proof,
    Propose,
    Received,
    Rewards,
    Send,
    Settings,
    Share,
    Signed,
    View,
    Vote,
    VoteRequest,
)
from shoal.core.peer import PeerMachine

SETTINGS = Settings(stages=1, microbatches=2, steps=4)
NAMES = ("a", "b", "c")
MEMBERS = tuple(Member(name, 0) for name in NAMES)
FIRST = View(number=2, step=0, members=MEMBERS, owners=(0, 1), phase=Phase.TRAINING)
ENTRY = Entry(term=1, view=FIRST, before=("a",))
PROOF = Proof("a", tuple(Signed(name) for name in NAMES))


def a_follower(name: str = "b") -> PeerMachine:
    """One of three members of view 2, whose leader is a."""
    machine = PeerMachine(name, SETTINGS, random.Random(1), found=False)
    machine.handle(Received("a", Propose(ENTRY, 1, PROOF)), 0.0)
    assert machine.view == FIRST and machine.leader == "a"
    return machine


def a_leader() -> Register:
    """a, which leads the same three."""
    register = Register("a", SETTINGS, random.Random(1))
    register.found(View(number=1, step=0, members=(Member("a", 0),)), 0.0)
    register.propose(FIRST, 0.0)
    for name in NAMES[1:]:
        register.on_message(name, Accept(1, 2, FIRST.digest, Signed(name)), 0.0)
    assert register.agreed == FIRST and register.leading
    return register


def successor(**changes: object) -> View:
    return msgspec.structs.replace(FIRST, **({"number": 3} | changes))


TAKEN = successor(members=(Member("x", 0),), owners=(0, 0))
OVER = successor(step=4, phase=Phase.FINISHED)
BY_X = Proof("x", (Signed("x"),))
CLAIMS: tuple[Message, ...] = (
    Vote(2**31, granted=False),
    Vote(2**31, granted=True, by=Signed("x")),
    Accept(2**31, 0),
    Accept(1, 2, FIRST.digest, Signed("x")),
    VoteRequest(2**31, 2**31, 2**53),
    VoteRequest(1, 2**31, 2**53, trial=True),
    Lead(2**31, 2**53),
    Lead(2, 2, 1, FIRST.digest, PROOF, (Signed("x"),)),
    Propose(Entry(2, TAKEN, ()), 2),
    Propose(Entry(2, TAKEN, ()), 2, BY_X),
    Propose(Entry(2, TAKEN, NAMES), 2, BY_X),
    Propose(Entry(2, OVER, NAMES), 2, BY_X),
    Propose(Entry(2, successor(number=2**53), ()), 2, BY_X),
    Dismissed(2**53),
)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: type(claim).__name__)
def test_a_strangers_claim_changes_nothing(claim: Message) -> None:
    machine = a_follower()
    register = machine.register
    before = register.term, register.leader, register.agreed, register.accepted, register.election.role
    machine.handle(Received("x", claim), 0.1)
    assert (register.term, register.leader, register.agreed, register.accepted, register.election.role) == before
    assert not machine.finished and not machine.outside


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: type(claim).__name__)
def test_a_single_members_claim_neither_ends_nor_takes_over_a_run(claim: Message) -> None:
    machine = a_follower()
    machine.handle(Received("c", claim), 0.1)
    register = machine.register
    assert register.term <= 1 + TERMS and register.agreed == FIRST and register.leader in ("a", None)
    assert not machine.finished and not machine.outside


def test_claims_of_a_higher_term_raise_it_in_small_steps() -> None:
    register = Register("b", SETTINGS, random.Random(1))
    register.on_message("a", Propose(ENTRY, 1, PROOF), 0.0)
    heartbeat_timeout_s = SETTINGS.heartbeat_timeout_s
    for _ in range(1000):
        register.on_message("c", VoteRequest(2**31, 9, 9), heartbeat_timeout_s)
    assert register.term == 1 + TERMS
    register.on_message("c", VoteRequest(2**31, 9, 9), heartbeat_timeout_s + SETTINGS.heartbeat_s)
    assert register.term == 1 + 2 * TERMS


def test_one_voters_claims_never_make_a_leader_stand_down_and_twos_ever_more_rarely() -> None:
    for claimers, most in ((("c",), 0), (("b", "c"), 5)):
        register, stood_down = a_leader(), []
        now = 0.0
        while now < 60.0:
            now += SETTINGS.heartbeat_s
            register.replication.heard = dict.fromkeys(NAMES, now)
            for name in claimers:
                register.on_message(name, Accept(register.term + 1, 0), now)
            if not register.leading:
                stood_down.append(now)
                register.election.role = ElectionRole.LEADER  # elected again at once
        pauses = [after - before for before, after in itertools.pairwise(stood_down)]
        assert bool(stood_down) is bool(most) and len(stood_down) <= most and PAUSES >= 4
        assert all(after >= 1.5 * before for before, after in itertools.pairwise(pauses))


def test_a_peer_whose_term_ran_ahead_alone_comes_back_to_the_leader_it_can_see() -> None:
    register = a_follower().register
    while register.term < 5:
        register.election.campaign(20.0)
    lead = Lead(1, 2, 1, FIRST.digest)
    register.on_message("a", lead, 20.1)
    assert (register.term, register.leader) == (1, "a"), "nobody relies on a term that it gave no vote in"
    register.on_message("c", VoteRequest(3, 9, 9), 40.0)
    assert register.term == 3 and register.election.voted == "c"
    commands = register.on_message("a", lead, 40.1)
    assert register.leader is None and commands == [Send("a", Accept(term=3, number=0))], "c may lead by that vote"


def test_a_vote_stands_when_its_term_is_returned_to() -> None:
    register = a_follower().register
    register.on_message("c", VoteRequest(3, 9, 9), 40.0)
    register.election.campaign(80.0)
    register.on_message("c", Lead(3, 2, 1, FIRST.digest, votes=(Signed("b"), Signed("c"))), 80.1)
    assert (register.term, register.leader) == (3, "c")
    commands = register.on_message("a", VoteRequest(3, 9, 9), 120.0)
    votes = [one.message for one in commands if isinstance(one, Send) and isinstance(one.message, Vote)]
    assert votes and not any(vote.granted for vote in votes), "it would have voted twice in term 3"


def test_a_leader_that_stands_down_for_a_term_does_not_lead_it() -> None:
    register = a_leader()
    commands = [register.on_message(name, Accept(3, 0), 10.0) for name in ("b", "c")]
    assert not register.leading and register.term == 3 and commands == [[], []]


def test_a_leader_is_followed_only_with_the_votes_of_a_majority_of_the_view_that_i_hold() -> None:
    for votes, followed in (((), False), (("c",), False), (("c", "x"), False), (("c", "b"), True)):
        register = a_follower().register
        register.on_message("c", Lead(2, 2, votes=tuple(map(Signed, votes))), 0.1)
        assert (register.leader == "c") is followed, votes


def test_a_view_is_agreed_only_with_the_acceptances_of_majorities_before_and_after() -> None:
    view = successor(members=(*MEMBERS[1:], Member("x", 0), Member("y", 0), Member("z", 0)))
    for names, agreed in ((("x", "y", "z"), False), (("b", "c"), False), (("b", "c", "x"), True)):
        register = a_follower().register
        register.on_message("z", Propose(Entry(1, view, NAMES), 1, Proof("a", tuple(map(Signed, names)))), 0.1)
        assert (register.agreed == view) is agreed, names


def test_what_was_agreed_long_ago_needs_a_majority_of_those_that_i_knew_unless_i_am_alone() -> None:
    others = tuple(Member(name, 0) for name in "bxyz")
    view = msgspec.structs.replace(FIRST, number=9, members=others)
    message = Propose(Entry(1, view, tuple("bxyz")), 1, Proof("x", tuple(map(Signed, "xyz"))))
    register = a_follower().register
    register.on_message("x", message, 0.1)
    assert register.agreed == FIRST
    register.on_message("x", message, 0.2 + 2 * SETTINGS.heartbeat_timeout_s)
    assert register.agreed == view


@pytest.mark.parametrize(("name", "reasons"), [("b", ["removed from the run in view 3: b is silent"]), ("late", [])])
def test_only_a_peer_that_was_in_the_view_before_says_that_it_was_removed(name: str, reasons: list[str]) -> None:
    """A newcomer receives the views that it missed one by one, and was in none of them."""
    machine = a_follower(name)
    rest = successor(members=tuple(one for one in MEMBERS if one.peer != "b"), reason="b is silent")
    proof = Proof("a", tuple(Signed(peer) for peer in NAMES))
    commands = machine.handle(Received("a", Propose(Entry(1, rest, NAMES), 1, proof)), 0.1)
    assert machine.view == rest
    assert [one.text for one in commands if isinstance(one, Note) and one.kind == "removed"] == reasons


def test_a_leads_word_without_proof_agrees_to_nothing() -> None:
    register, view = a_follower().register, successor(reason="next")
    register.on_message("a", Propose(Entry(1, view, NAMES), 1), 0.1)
    lead = Lead(1, 3, 1, view.digest)
    register.on_message("a", lead, 0.1)
    register.on_message("a", msgspec.structs.replace(lead, proof=Proof("a", (Signed("a"),))), 0.1)
    assert register.agreed == FIRST
    register.on_message("a", msgspec.structs.replace(lead, proof=Proof("a", (Signed("a"), Signed("b")))), 0.1)
    assert register.agreed == view


def test_only_the_signers_own_signature_passes_the_driver() -> None:
    def sign_as(name: str) -> Signed:
        return Signed(name, b"", name.encode())

    def holds(one: Signed, data: bytes) -> bool:
        return one.signature == one.peer.encode() + data[:0] and data in known

    view = successor()
    known = {accepted(1, 3, view.digest, "a"), voted(2, "c")}
    sealed = seal("b", "a", Accept(1, 3, view.digest, Signed("b")), lambda data: sign_as("b"))
    assert checked("a", "b", sealed, holds) == sealed
    assert checked("a", "c", sealed, holds) is None, "another hands it on"
    assert checked("x", "b", sealed, holds) is None, "for another leader's proposal"
    forged = Lead(2, 2, votes=(sign_as("a"), Signed("b"), sign_as("a")))
    assert checked("b", "c", forged, holds) == Lead(2, 2, votes=(sign_as("a"),)), "each once, and only what holds"
    blank = Propose(Entry(1, view, NAMES), 1, Proof("a", tuple(map(Signed, NAMES))))
    got = checked("b", "a", blank, holds)
    assert isinstance(got, Propose) and got.proof == Proof("a", ())


def test_a_leader_that_leaves_shows_the_view_to_those_who_leave_with_it() -> None:
    """Else they wait for a leader that has ended, and do not hear of what is committed meanwhile."""
    register = a_leader()
    view = successor(members=(Member("c", 0),), owners=(2, 2))
    register.propose(view, 0.0)
    commands = [
        command
        for name in ("b", "c")
        for command in register.on_message(name, Accept(1, 3, view.digest, Signed(name)), 0.0)
    ]
    assert register.agreed == view and not register.leading
    to_b = [command.message for command in commands if isinstance(command, Send) and command.peer == "b"]
    assert len(to_b) == 1 and isinstance(to_b[0], Propose) and to_b[0].entry.view == view and to_b[0].proof is not None


def test_whoever_a_view_removes_is_shown_it_at_once() -> None:
    """Three machines were told to go, and one of them had a step to catch up with: the others agreed that it goes, saved the run and went
    within 0.2 s, before its next heartbeat would have been answered. It waited for 120 s for a majority that was gone."""
    register = a_leader()
    alone = successor(members=(MEMBERS[0], MEMBERS[2]), owners=(0, 1))
    commands = register.propose(alone, 1.0)
    for name in NAMES[1:]:
        commands += register.on_message(name, Accept(1, 3, alone.digest, Signed(name)), 1.1)
    assert register.agreed == alone and register.leading
    to_b = [one.message for one in commands if isinstance(one, Send) and one.peer == "b"]
    shown = [one.entry.view for one in to_b if isinstance(one, Propose) and one.proof is not None]
    assert shown == [alone]


def test_a_leader_signs_its_own_part_of_a_proof_when_it_leaves() -> None:
    lead = Lead(1, 2, 1, FIRST.digest, Proof("a", (Signed("a"), Signed("b", b"k", b"s"))), (Signed("a"),))
    sealed = seal("a", "c", lead, lambda data: Signed("a", b"k", data[:20]))
    assert isinstance(sealed, Lead) and sealed.proof is not None
    assert [one.signature for one in sealed.proof.signed] == [accepted(1, 2, FIRST.digest, "a")[:20], b"s"]
    assert sealed.votes[0].signature == voted(1, "a")[:20]


LAST = Committed(0, 1, 1.0, 2.0, ("d",), ((Share("a", (0,)), Share("b", (1,))),))
NEXT = successor(step=1, last=LAST)
WRONG = (
    ("twice", successor(members=(*MEMBERS, Member("a", 0)))),
    ("nobody", successor(members=(), owners=())),
    ("stage", successor(members=(*MEMBERS, Member("d", 1)))),
    ("owner", successor(owners=(0, 3))),
    ("owners", successor(owners=(0,))),
    ("number", successor(number=4)),
    ("far", successor(number=2**53)),
    ("epoch", successor(epoch=2)),
    ("skips", successor(step=2)),
    ("uncommitted", successor(step=1)),
    ("unstarted", successor(phase=Phase.GATHERING)),
    ("finished", successor(phase=Phase.FINISHED)),
    ("norm", successor(step=1, last=msgspec.structs.replace(LAST, norm=float("inf")))),
    ("counted", successor(step=1, last=msgspec.structs.replace(LAST, counted=1))),
    ("rewards", successor(step=1, last=msgspec.structs.replace(LAST, rewards=Rewards(1.5, 0.0)))),
    ("half", successor(step=1, last=msgspec.structs.replace(LAST, groups=((Share("a", (0,)),),)))),
    ("double", successor(step=1, last=msgspec.structs.replace(LAST, groups=((Share("a", (0, 0)),),)))),
    ("foreign", successor(step=1, last=msgspec.structs.replace(LAST, groups=((Share("x", (0, 1)),),)))),
    ("parts", successor(step=1, last=LAST, part_norms=(1.0,))),
    ("crowd", successor(joining=tuple(Member(f"k{i}.1.invite.2", 0) for i in range(3)))),
)


@pytest.mark.parametrize(("name", "view"), WRONG, ids=lambda one: one if isinstance(one, str) else "")
def test_no_voter_accepts_a_view_that_cannot_follow(name: str, view: View) -> None:
    assert flaw(FIRST, view, SETTINGS)
    machine = a_follower()
    commands = machine.handle(Received("a", Propose(Entry(1, view, NAMES), 1)), 0.1)
    assert not [one for one in commands if isinstance(one, Send) and isinstance(one.message, Accept)]
    assert machine.register.accepted == ENTRY
    if name not in ("number", "far"):
        assert [one for one in commands if isinstance(one, Note) and one.kind == "refused"]


def test_a_view_that_can_follow_is_accepted() -> None:
    assert flaw(FIRST, NEXT, SETTINGS) == ""
    commands = a_follower().handle(Received("a", Propose(Entry(1, NEXT, NAMES), 1)), 0.1)
    assert Send("a", Accept(1, 3, NEXT.digest, Signed("b"))) in commands


def test_what_is_computed_of_a_view_is_neither_sent_nor_handed_to_the_next_one() -> None:
    before = msgspec.msgpack.encode(NEXT)
    known = NEXT.voters, NEXT.digest, NEXT.serving, NEXT.present, NEXT.replicas, NEXT.work, NEXT.started
    assert msgspec.msgpack.encode(NEXT) == before and msgspec.msgpack.decode(before, type=type(NEXT)) == NEXT
    members = (*NEXT.members, msgspec.structs.replace(NEXT.members[0], peer="z.1", stage=0))
    after = msgspec.structs.replace(NEXT, members=members, step=NEXT.step + 1)
    assert after.voters == (*known[0], "z.1") and "z.1" in after.votes and after.digest != known[1]
    assert after.serving == after.present == known[2] | {"z.1": 0} and after.work == known[5] + 1
    assert after.replicas[0] == [*known[4][0], "z.1"]

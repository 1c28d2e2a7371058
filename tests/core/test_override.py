"""What the operator's word may do: who goes on, from where, and every case in which it is not taken."""

from __future__ import annotations

import msgspec
import pytest

from shoal.core.consensus.override import AHEAD, Refusal, decide, times_gone_back
from shoal.core.messages import Account, Member, Override, Peer, Phase, Standing, View

MICROBATCHES = 4
ACCOUNT = Account(issued=44, committed=40, undone=8)
VIEW = View(
    number=30,
    step=10,
    members=tuple(Member(peer, stage) for peer, stage in (("a", 0), ("b", 0), ("c", 1), ("d", 1), ("e", 1))),
    joining=(Member("j", 0),),
    phase=Phase.TRAINING,
    epoch=1,
    account=ACCOUNT,
    saved=8,
)


def standings(*peers: Peer, heard: tuple[Peer, ...] = (), **changes: object) -> dict[Peer, Standing]:
    view = msgspec.structs.replace(VIEW, **changes)
    return {peer: Standing(term=7, view=view, heard=heard) for peer in peers}


def given_up(*peers: Peer) -> frozenset[Peer]:
    return frozenset(peers)


def test_those_who_answer_go_on_alone_from_the_checkpoint_and_ahead_of_everybody_else() -> None:
    view, term = decide(standings("a", "c"), given_up("b", "d", "e", "j"), 8, MICROBATCHES)
    assert view.members == (Member("a", 0), Member("c", 1)) and view.joining == ()
    assert (view.step, view.saved, view.started, view.last) == (8, 8, False, None)
    assert (view.number, view.epoch, term) == (30 + AHEAD, 1 + AHEAD, 7 + AHEAD)
    assert times_gone_back(view.epoch) == 2
    assert view.account == Account(issued=32, committed=32, undone=16, killed=3)
    assert "given up 4 of 6 peers: 2 go on from step 10 back at the state of step 8" in view.reason


def test_a_joiner_that_answers_goes_on_too_at_its_stage() -> None:
    view, _ = decide(standings("a", "c", "j"), given_up("b", "d", "e"), 8, MICROBATCHES)
    assert view.members == (Member("a", 0), Member("c", 1), Member("j", 0))


def test_the_newest_of_what_survivors_know_counts() -> None:
    known = standings("a") | standings("c", number=31, step=11, account=Account(issued=48, committed=44, undone=8))
    view, _ = decide(known, given_up("b", "d", "e", "j"), 8, MICROBATCHES)
    assert view.number == 31 + AHEAD and view.account.undone == 8 + 3 * MICROBATCHES


@pytest.mark.parametrize(
    ("answering", "given_up", "saved", "said"),
    [
        (standings(), given_up("a"), 8, "no peer of the run answers"),
        (standings("a", "b", "c"), given_up("d", "e", "j"), 8, "3 of 5 voters answer, which is a quorum"),
        (standings("a", "c"), given_up("b", "d"), 8, "e, j do not answer"),
        (standings("a", "c"), given_up("a", "b", "d", "e", "j"), 8, "a is said to be gone, but it answers"),
        (
            standings("a", "c", heard=("d",)),
            given_up("b", "d", "e", "j"),
            8,
            "d is said to be gone, but a has just heard it",
        ),
        (standings("x"), given_up("a", "b", "c", "d", "e", "j"), 8, "nobody who answers belongs"),
        (standings("a", "c"), given_up("b", "d", "e", "j"), 12, "there is a checkpoint of step 12"),
        (standings("a", "c", phase=Phase.FINISHED), given_up("b", "d", "e", "j"), 8, "the run is finished"),
    ],
)
def test_it_is_refused_where_the_others_may_live_or_can_do_without(
    answering: dict[Peer, Standing], given_up: frozenset[Peer], saved: int, said: str
) -> None:
    with pytest.raises(Refusal, match=said):
        decide(answering, given_up, saved, MICROBATCHES)


def test_a_member_that_moves_votes_and_so_counts_for_the_majority() -> None:
    moving = msgspec.structs.replace(VIEW, members=VIEW.members[:4], joining=(Member("e", 0, back=True),))
    known = {peer: Standing(term=7, view=moving) for peer in ("a", "c", "e")}
    with pytest.raises(Refusal, match="3 of 5 voters answer"):
        decide(known, given_up("b", "d"), 8, MICROBATCHES)


def test_no_second_side_is_chosen_beside_the_first() -> None:
    view, term = decide(standings("a", "c"), given_up("b", "d", "e", "j"), 8, MICROBATCHES)
    first = Override(view=view, term=term)
    with pytest.raises(Refusal, match=r"has chosen a, c, and those who answer \(d, e\) have not heard of it"):
        decide(standings("d", "e"), given_up("a", "b", "c", "j"), 8, MICROBATCHES, first)
    # Those whom the first has chosen may be halved again.
    later = msgspec.structs.replace(
        view, number=view.number + 9, step=9, phase=Phase.TRAINING, account=Account(committed=36)
    )
    third, _ = decide({"c": Standing(term=term, view=later)}, given_up("a"), 8, MICROBATCHES, first)
    assert third.members == (Member("c", 1),) and third.epoch > view.epoch

"""Hops straight from server to server: what a server hands on, keeps, pulls and gives back; whom an owner asks, and what it loses."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from tests.core import test_server, test_trainer
from tests.core.test_server import ME, OTHER, OWNER, REPLICA, SETTINGS, Play

from shoal.core.messages import (
    AUDIT_CALL,
    Backward,
    Books,
    BoundaryTensor,
    Busy,
    Complaint,
    Forward,
    GatherChunk,
    Gradient,
    Member,
    Missing,
    Output,
    Pending,
    Phase,
    Query,
    Recall,
    Refused,
    RunBackward,
    RunForward,
    Send,
    Settings,
    TensorGone,
    TensorPending,
    TensorRequest,
    View,
    Withdraw,
)
from shoal.core.server.activation_store import COLD_MOST_S
from shoal.core.trainer.routing import EXTENSIONS
from shoal.core.trainer.trainer import Trainer

NEXT = "next"
VIEW = test_server.a_view(members=(*test_server.MEMBERS, Member(NEXT, 2)), owners=(0, 1, 0, 1))
DIRECT = msgspec.structs.replace(SETTINGS, stages=3)


def a_server(**settings: object) -> Play:
    """ME serves stage 1 of 3; OWNER and OTHER stage 0, NEXT stage 2. Tensors are 4 bytes."""
    return Play(msgspec.structs.replace(DIRECT, **settings), 1, VIEW)


def an_input(play: Play, number: int, peer: str = OTHER, gradient: bool = False, **changes: object) -> str:
    return play.hear(peer, msgspec.structs.replace(BoundaryTensor(0, 0, number, 1, gradient), **changes), 1)[0]


def a_forward(index: int = 0, attempt: int = 7, *holders: str) -> Forward:
    return Forward(0, 0, index, 1, attempt, 1, input_from=holders or (ME, OTHER), to=NEXT)


def a_backward(index: int = 0, attempt: int = 8) -> Backward:
    return Backward(0, 0, index, 1, attempt, 1, input_from=(ME, OTHER), grad_from=(ME, NEXT), to=OTHER)


def forwarded(play: Play, index: int) -> RunForward:
    an_input(play, index)
    play.hear(OWNER if index % 2 == 0 else OTHER, a_forward(index))
    task = play.task(RunForward)
    play.done(task, nbytes=4)
    return task


def booked(play: Play, index: int) -> RunBackward:
    an_input(play, index, NEXT, gradient=True)
    play.hear(OWNER if index % 2 == 0 else OTHER, a_backward(index))
    task = play.task(RunBackward)
    play.done(task, nbytes=4)
    return task


# --------------------------------------------------------------------------------------------------------- the server


def test_an_output_goes_straight_to_the_next_peer_and_its_owner_gets_a_receipt() -> None:
    play = a_server()
    task = forwarded(play, 0)

    assert play.sends(BoundaryTensor) == [(NEXT, BoundaryTensor(0, 0, 0, 2, False), (task.out,))]
    assert play.sends(Output) == [(OWNER, Output(0, 0, 0, 1, 7, 4), ())]
    assert play.dropped() == []
    assert play.server.kept_bytes == 8  # its input too


def test_a_gradient_goes_back_the_way_the_input_came_and_both_ends_keep_it() -> None:
    play = a_server()
    forwarded(play, 0)
    task = booked(play, 0)

    assert play.sends(BoundaryTensor) == [(OTHER, BoundaryTensor(0, 0, 0, 0, True), (task.out,))]
    assert play.sends(Gradient) == [(OWNER, Gradient(0, 0, 0, 1, 8, None, 4), ())]
    assert play.booked() == [0] and play.dropped() == [] and play.server.kept_bytes == 16


def test_a_hop_waits_for_its_input_and_others_go_first() -> None:
    play = a_server()
    play.hear(OWNER, a_forward(0))
    assert play.commands == []
    an_input(play, 2)
    play.hear(OWNER, a_forward(2))
    running = play.task(RunForward)
    x = an_input(play, 0)
    play.done(running)

    assert running.index == 2
    assert (play.task(RunForward).index, play.task(RunForward).x) == (0, x)


def test_what_is_not_sent_is_pulled_from_each_holder_in_turn_then_given_back_for_good() -> None:
    play = a_server()
    play.hear(OWNER, a_backward(0))  # both inputs should be here or on their way
    asked = []
    while not play.sends(Missing):
        deadline = play.server.deadline
        assert deadline is not None
        play.tick(deadline)
        asked += [(peer, message.gradient) for peer, message, _ in play.sends(TensorRequest)]

    assert asked == [(OTHER, False), (NEXT, True), (OTHER, False), (NEXT, True)]
    assert [message for _, message, _ in play.sends(Missing)] == [Missing(0, 0, 0, 1, 8, True, False)]
    an_input(play, 0)
    an_input(play, 0, NEXT, gradient=True)
    assert play.tasks() == []  # its owner may be elsewhere with it
    play.hear(OWNER, a_backward(0, attempt=8))
    assert play.tasks() == []
    play.hear(OWNER, a_backward(0, attempt=9))
    assert play.task(RunBackward).index == 0


def test_what_is_on_its_way_is_waited_for_once_more() -> None:
    play = a_server()
    play.hear(OWNER, a_forward(0))
    play.tick(play.server.deadline or 0.0)
    assert [peer for peer, _, _ in play.sends(TensorRequest)] == [OTHER]
    for _ in range(3):
        play.hear(OTHER, TensorPending(0, 0, 0, 1, False))
    pulled_at = play.now
    play.tick(play.server.deadline or 0.0)
    assert play.now - pulled_at == SETTINGS.min_request_timeout_s, "once, however often it is said"
    assert [(peer, message.call) for peer, message, _ in play.sends(TensorRequest)] == [(OTHER, 2)]


@pytest.mark.parametrize(("nbytes", "waits_s"), [(20_000_000, 16.0), (1 << 40, COLD_MOST_S), (0, 2.0), (1000, 2.0)])
def test_before_any_tensor_has_come_one_is_waited_for_as_its_size_says(nbytes: int, waits_s: float) -> None:
    """17 MB were given up after 1.3 s in a first step, while they were on their way, and computed and sent anew: 301 s instead of 208."""
    play = a_server()
    play.hear(OWNER, a_forward(0))
    play.tick(play.server.deadline or 0.0)
    play.hear(OTHER, TensorPending(0, 0, 0, 1, False, nbytes))
    play.hear(OWNER, a_forward(2))
    assert play.server.deadline == play.now + 2.0, "of the other one nothing is said"
    play.hear(NEXT, TensorPending(0, 0, 2, 1, False, nbytes))
    assert play.server.deadline == play.now + 2.0, "nor by whom it was asked for"
    an_input(play, 2)
    assert play.server.deadline == pytest.approx(play.now + waits_s)
    play.tick(play.now + waits_s)
    assert [(peer, message.call) for peer, message, _ in play.sends(TensorRequest)] == [(OTHER, 2)]
    assert play.server.deadline == play.now + 2.0, "what is measured says more"


def test_what_is_awaited_behind_other_tensors_is_not_asked_for_and_its_owner_is_told() -> None:
    play = a_server()
    play.hear(OWNER, a_forward(0))
    began, query = play.now, Query(0, 0, 0, 1, 7, False)
    an_input(play, 2, REPLICA)
    play.hear(OWNER, query)
    assert play.sends(Pending) == [(OWNER, Pending(0, 0, 0, 1, 7), ())], "nothing has come of who made it"
    for times in range(EXTENSIONS + 1):
        due = play.server.deadline
        assert due == began + (1 + times) * SETTINGS.min_request_timeout_s and not play.sends(TensorRequest)
        play.now = due - 0.5
        an_input(play, 1 + 2 * (times % 2))
        for coming in (True, False):  # nothing has come since it was asked last
            play.hear(OWNER, query)
            assert play.sends(Pending) == [(OWNER, Pending(0, 0, 0, 1, 7, coming), ())]
        play.tick(due)
    assert [(peer, message.call) for peer, message, _ in play.sends(TensorRequest)] == [(OTHER, 1)], "not for ever"


def test_of_two_tensors_that_a_backward_lacks_either_may_be_on_its_way() -> None:
    play = a_server()
    play.hear(OWNER, a_backward(0))
    play.now += 0.1
    an_input(play, 2, NEXT, gradient=True)
    play.hear(OWNER, Query(0, 0, 0, 1, 8, True))
    assert play.sends(Pending) == [(OWNER, Pending(0, 0, 0, 1, 8, True), ())]


def test_of_a_line_that_stands_still_a_tensor_is_asked_for_at_once() -> None:
    play = a_server()
    an_input(play, 2)
    play.now += 2 * SETTINGS.min_request_timeout_s
    play.hear(OWNER, a_forward(0))
    play.hear(OWNER, Query(0, 0, 0, 1, 7, False))
    assert play.sends(Pending) == [(OWNER, Pending(0, 0, 0, 1, 7), ())], "that one came before"
    play.tick(play.server.deadline or 0.0)
    assert [peer for peer, _, _ in play.sends(TensorRequest)] == [OTHER]


def test_what_was_sent_over_a_connection_that_broke_is_sent_again_at_once() -> None:
    play = a_server()
    task = forwarded(play, 0)
    play.server.on_unreachable(NEXT)
    play.hear(NEXT, TensorRequest(0, 0, 0, 2, False, 1))
    assert play.sends(BoundaryTensor) == [(NEXT, BoundaryTensor(0, 0, 0, 2, False, 1), (task.out,))]


def test_an_owner_that_asks_is_told_what_waits_what_was_made_and_what_is_booked() -> None:
    play = a_server()
    play.hear(OWNER, a_forward(0))
    play.hear(OWNER, Query(0, 0, 0, 1, 7, False))
    assert play.sends(Pending) == [(OWNER, Pending(0, 0, 0, 1, 7), ())]
    play.hear(OWNER, Query(0, 0, 0, 1, 8, True))
    play.hear(OTHER, Query(0, 0, 0, 1, 7, False))
    play.hear(OWNER, Query(0, 0, 2, 1, 7, False))
    assert play.commands == [], "no backward, not the owner, never heard of"
    forwarded(play, 2)
    play.hear(OWNER, Query(0, 0, 2, 1, 9, False))
    assert play.sends(Output) == [(OWNER, Output(0, 0, 2, 1, 9, 4), ())]
    booked(play, 2)
    play.hear(OWNER, Query(0, 0, 2, 1, 9, True))
    assert [message.attempt for _, message, _ in play.sends(Gradient)] == [9]


def test_a_holder_that_has_it_no_longer_is_not_waited_for() -> None:
    play = a_server()
    play.hear(OWNER, a_forward(0, 7, REPLICA, OTHER))
    assert [peer for peer, _, _ in play.sends(TensorRequest)] == [REPLICA]
    play.hear(REPLICA, TensorGone(0, 0, 0, 1, False))
    assert [peer for peer, _, _ in play.sends(TensorRequest)] == [OTHER]
    play.hear(OTHER, TensorGone(0, 0, 0, 1, False))
    assert [message for _, message, _ in play.sends(Missing)] == [Missing(0, 0, 0, 1, 7, False, False)]


def test_nobody_waits_for_a_holder_that_has_left() -> None:
    play = a_server()
    play.hear(OWNER, a_forward(0, 7, OTHER))
    members = tuple(member for member in VIEW.members if member.peer != OTHER)
    play.view(msgspec.structs.replace(VIEW, number=2, members=members, owners=(0, 0, 0, 0)))
    assert [peer for peer, _, _ in play.sends(Missing)] == [OWNER]


def test_what_was_handed_on_is_kept_and_given_again_until_the_step_is_committed() -> None:
    play = a_server()
    task = forwarded(play, 0)
    booked(play, 0)
    play.hear(NEXT, TensorRequest(0, 0, 0, 2, False, 1))
    (pending,) = play.sends(TensorPending)
    assert pending == (NEXT, TensorPending(0, 0, 0, 2, False, 4), ()) and not play.sends(BoundaryTensor)
    play.hear(NEXT, TensorRequest(0, 0, 0, 2, False, 2))
    assert play.sends(BoundaryTensor) == [(NEXT, BoundaryTensor(0, 0, 0, 2, False, 2), (task.out,))]
    play.hear(NEXT, TensorRequest(0, 0, 1, 2, False))
    assert play.sends(TensorGone) == [(NEXT, TensorGone(0, 0, 1, 2, False), ())]
    play.view(msgspec.structs.replace(VIEW, number=2, step=1))
    assert len(play.dropped()) == 4 and play.server.kept_bytes == 0


def test_a_copy_that_was_asked_for_is_not_sent_again_at_the_next_request_either() -> None:
    """It stands behind all else on its sender's line, where another one would stand behind it. An audit gets it whatever was sent for
    hops, and is told twice that it comes: one that was sent again each second took a line of 2 MB/s for 40 s, and no audit ended."""
    play = a_server()
    task = forwarded(play, 0)
    calls = (
        (1, BoundaryTensor),
        (2, TensorPending),
        (AUDIT_CALL, BoundaryTensor),
        (3, BoundaryTensor),
        (AUDIT_CALL + 1, TensorPending),
        (4, TensorPending),
        (AUDIT_CALL + 2, TensorPending),
        (AUDIT_CALL + 3, BoundaryTensor),
    )
    for call, kind in calls:
        play.hear(OTHER, TensorRequest(0, 0, 0, 2, False, call))
        assert [type(one.message) for one in play.commands if isinstance(one, Send)] == [kind], call
    assert task.out not in play.dropped()


def test_what_was_sent_for_an_audit_is_sent_again_when_the_connection_broke() -> None:
    play = a_server()
    forwarded(play, 0)
    play.hear(OTHER, TensorRequest(0, 0, 0, 2, False, AUDIT_CALL))
    play.server.on_unreachable(OTHER)
    play.commands.clear()
    play.hear(OTHER, TensorRequest(0, 0, 0, 2, False, AUDIT_CALL + 1))
    assert play.sends(BoundaryTensor) and not play.sends(TensorPending)


@pytest.mark.parametrize("staleness", [0, 1])
def test_tensors_of_a_step_that_is_over_need_not_be_sent(staleness: int) -> None:
    """Those of an audit stood before the next step's on a narrow line, for 18 s."""
    play = a_server(staleness=staleness)
    forwarded(play, 0)
    if staleness:  # the next step is computed while this one is averaged
        play.view(msgspec.structs.replace(VIEW, number=2, phase=Phase.OVERLAPPING))
        assert [one for one in play.commands if isinstance(one, Withdraw)] == []
    play.view(msgspec.structs.replace(VIEW, number=3, step=1))
    (withdrawn,) = [one for one in play.commands if isinstance(one, Withdraw)]
    assert withdrawn.voids("b", BoundaryTensor(0, 0, 0, 2, False)) and withdrawn.voids(
        "b", BoundaryTensor(-1, 7, 0, 2, False)
    )
    assert not withdrawn.voids("b", BoundaryTensor(0, 1, 0, 2, False)) and not withdrawn.voids(
        "b", BoundaryTensor(1, 0, 0, 2, False)
    )
    assert not withdrawn.voids("b", GatherChunk(0, 0, 7, 0)), "a joiner may need them"


@pytest.mark.parametrize("changes", [{"step": 7}, {"epoch": 1}, {"stage": 2}, {"index": 4}])
def test_a_tensor_of_another_step_epoch_stage_or_index_is_dropped(changes: dict[str, int]) -> None:
    play = a_server()
    blob = an_input(play, 0, **changes)
    assert play.dropped() == [blob] and play.server.kept_bytes == 0


def test_a_tensor_of_the_step_that_comes_next_is_kept_for_it() -> None:
    play = a_server()
    x = an_input(play, 0, step=1)
    play.view(msgspec.structs.replace(VIEW, number=2, step=1))
    assert x not in play.dropped() and play.server.kept_bytes == 4


def test_a_second_copy_is_dropped_and_a_faulty_one_reported() -> None:
    play = a_server()
    an_input(play, 0)
    again = an_input(play, 0)
    assert play.dropped() == [again]
    play.hear(OTHER, BoundaryTensor(0, 0, 2, 1, False), 1, fault="values are not finite")
    assert [(peer, message.about) for peer, message, _ in play.sends(Complaint)] == [(OWNER, OTHER)]


def test_a_request_without_a_holder_is_refused() -> None:
    play = a_server()
    play.hear(OWNER, Forward(0, 0, 0, 1, 7, 1))
    assert [message.reason for _, message, _ in play.sends(Refused)] == ["0 holders named where 1 belong"]


def test_over_the_limit_what_is_booked_goes_first_and_what_cannot_be_made_again_stays() -> None:
    play = a_server(activation_store_bytes=16)
    forwarded(play, 0)
    task = booked(play, 0)
    forwarded(play, 2)  # its input comes to 16 bytes beside the gradient made: x, output and gradient of 0, and this
    play.hear(OTHER, TensorRequest(0, 0, 0, 0, True, 2))
    assert [blobs for _, _, blobs in play.sends(BoundaryTensor)] == [(task.out,)]
    play.hear(OTHER, TensorRequest(0, 0, 0, 1, False))
    assert len(play.sends(TensorGone)) == 1


def test_when_all_memory_is_needed_a_forward_is_put_off_and_not_for_ever() -> None:
    play = a_server(activation_store_bytes=8)
    play.now = 100.0
    forwarded(play, 0)
    booked(play, 0)
    forwarded(play, 2)
    play.hear(OTHER, a_forward(1, 7, OTHER))
    assert [message.backward for _, message, _ in play.sends(Busy)] == [False]
    play.now += 60.0
    play.hear(OTHER, a_forward(1, 8, OTHER))
    assert play.sends(Busy) == [] and len(play.sends(TensorRequest)) == 1


# ----------------------------------------------------------------------------------------------------------- the owner


class Rig(test_trainer.Rig):
    """An owner of one microbatch whose hops go straight: `me` and a0, b0, a1, b1, ... serve."""

    def __init__(self, stages: int = 3, view: View | None = None) -> None:
        self.now, self.serial = 0.0, 0
        settings = Settings(stages=stages, microbatches=1, steps=9)
        self.trainer = Trainer(test_trainer.ME, settings, Random(1))
        self.trainer.on_view(View(number=1, step=0, members=()), 0.0)
        self.out = self.trainer.on_view(view or test_trainer.a_view(stages=stages), 0.0)

    def through(self) -> list[Send]:
        """Answer every hop until the microbatch is finished; the requests."""
        requests = []
        self.read()
        while sends := [c for c in self.out if isinstance(c, Send)]:
            (send,) = sends
            requests.append(send)
            self.answer(send, Output if isinstance(send.message, Forward) else Gradient)
        return requests


def test_an_owner_sends_tokens_alone_and_the_gradient_retraces_the_way() -> None:
    rig = Rig()
    first, second, last, back, end = rig.through()

    assert [len(send.blobs) for send in (first, second, last, back, end)] == [1, 0, 1, 0, 1]
    assert (first.message.to, second.message.to) == (second.peer, last.peer)  # type: ignore[union-attr]
    assert (last.message.to, back.message.to, end.message.to) == (back.peer, end.peer, "")  # type: ignore[union-attr]
    assert back.peer == second.peer  # it has the input; the first stage's are the tokens, and anybody will do
    assert last.message.input_from == (last.peer, second.peer)  # type: ignore[union-attr]
    assert back.message.grad_from == (back.peer, last.peer)  # type: ignore[union-attr]
    assert rig.trainer.summary().finished == 1


def left(rig: Rig, number: int, *leavers: str) -> list[Send]:
    """These peers are put out; what the owner then asks."""
    view = test_trainer.a_view(number=number, stages=len(rig.trainer._routes._wirings))
    members = tuple(member for member in view.members if member.peer not in leavers)
    commands = rig.keep(rig.trainer.on_view(msgspec.structs.replace(view, members=members), rig.now))
    return [command for command in commands if isinstance(command, Send)]


def test_a_lost_booking_is_redone_alone_from_what_its_neighbours_keep() -> None:
    rig = Rig()
    first, second, last, *_ = rig.through()
    (send,) = left(rig, 3, second.peer)

    assert isinstance(send.message, Backward) and send.message.stage == 1
    assert (send.message.input_from, send.message.grad_from) == ((first.peer,), (last.peer,))
    assert send.message.to == ""  # below it is booked
    rig.answer(send, Gradient)
    assert rig.trainer.summary().finished == 1


def test_what_no_survivor_keeps_is_made_again_from_the_nearest_that_does() -> None:
    rig = Rig(stages=4)
    first, second, third, last, *_ = rig.through()
    (send,) = left(rig, 3, second.peer, third.peer)

    assert isinstance(send.message, Forward) and send.message.stage == 1  # from what the first stage's peer keeps
    assert send.message.input_from == (first.peer,)
    rig.answer(send, Output)
    redone = rig.sent(Backward)
    assert redone.message.stage == 2 and redone.message.grad_from == (last.peer,)  # type: ignore[union-attr]


def test_when_nobody_keeps_anything_of_it_the_data_is_where_it_begins() -> None:
    rig = Rig()
    _first, second, _last, *_ = rig.through()
    rig.trainer._owned.held[0].x[1:] = [(), ()]
    (send,) = left(rig, 3, second.peer)
    assert isinstance(send.message, Forward) and send.message.stage == 0 and len(send.blobs) == 1


def test_a_hop_whose_input_nobody_gives_walks_back_and_a_gradient_is_recalled() -> None:
    rig = Rig()
    rig.read()
    rig.answer(rig.sent(Forward), Output)
    rig.answer(rig.sent(Forward), Output)
    last = rig.sent(Backward)
    rig.answer(last, Missing, True, False)
    again = rig.sent(Forward)
    assert again.message.stage == 1  # type: ignore[union-attr]
    rig.answer(again, Output)
    rig.answer(rig.sent(Backward), Gradient)
    back = rig.sent(Backward)
    rig.answer(back, Missing, True, True)
    recall = rig.sent(Recall)
    assert recall.peer == back.message.grad_from[-1]  # type: ignore[union-attr]
    rig.answer(recall, Gradient)
    assert rig.sent(Backward).message.grad_from == (recall.peer,)  # type: ignore[union-attr]


def test_an_heir_begins_with_the_data_and_takes_the_gradient_from_who_booked() -> None:
    rig = Rig(view=test_trainer.a_view(number=5, stages=3))  # a gap in the numbers: somebody may have begun
    for peer in [command.peer for command in rig.out if isinstance(command, Send)]:
        stage = 0 if peer == test_trainer.ME else int(peer[1:])
        rig.say(peer, Books(0, 0, 5, stage, (0,) if peer == "b2" else ()))
    rig.read()
    rig.answer(rig.sent(Forward), Output)
    recall = rig.sent(Recall)
    assert recall.peer == "b2" and recall.blobs == ()
    rig.answer(recall, Gradient)
    assert rig.sent(Backward).message.grad_from == ("b2",)  # type: ignore[union-attr]


def test_whoever_does_not_give_what_it_holds_is_in_the_way_until_a_booking_shows_that_it_is_not() -> None:
    rig = Rig()
    rig.read()
    rig.answer(rig.sent(Forward), Output)
    holder = rig.sent(Forward)
    m = rig.trainer._owned.held[0]
    m.lost = {"b1": ["b2"]}
    m.x[1] = ("b1",)
    rig.answer(holder, Missing, False, False)
    assert m.waits_for == "b1"
    while not m.booked[2]:
        if m.hop is None:
            rig.tick()
        (send,) = [command for command in rig.out if isinstance(command, Send)]
        rig.answer(send, Output if isinstance(send.message, Forward) else Gradient)
    assert m.lost == {} and m.waits_for == rig.sent(Backward).peer != ""

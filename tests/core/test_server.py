"""A server, one situation after another: hops, books, rounds, commits and checkpoints."""

from __future__ import annotations

from itertools import pairwise
from typing import TypeVar

import msgspec
import pytest

from shoal.core import replica_state
from shoal.core.messages import (
    Add,
    Apply,
    Backward,
    BlobRef,
    Booking,
    Books,
    BooksRequest,
    BoundaryTensor,
    Busy,
    Cancel,
    Cancelled,
    Command,
    Committed,
    Complaint,
    Continued,
    Cut,
    Do,
    Done,
    Drop,
    Failed,
    Forward,
    Gather,
    GatherChunk,
    Gradient,
    Holding,
    Member,
    Message,
    Note,
    Output,
    Pending,
    Phase,
    Published,
    PublishRequest,
    Query,
    Rebuilt,
    Recall,
    ReduceChunk,
    Reduced,
    Refused,
    Resend,
    Reset,
    Result,
    Round,
    RoundFailed,
    RunBackward,
    RunForward,
    RunPublish,
    RunSave,
    Saved,
    SaveRequest,
    Send,
    Settings,
    Share,
    Task,
    View,
)
from shoal.core.replica_state import ReplicaState
from shoal.core.server.jobs import Pace
from shoal.core.server.server import Server
from shoal.core.transfer import catch_up
from shoal.core.transfer.catch_up import MOST, STEPS

ME, REPLICA, THIRD = "me", "replica", "third"
OWNER, OTHER = "owner", "other"
MEMBERS = (Member(OWNER, 0), Member(OTHER, 0), Member(ME, 1), Member(REPLICA, 1))
SETTINGS = Settings(stages=2, microbatches=4, steps=9, queue_limit=2, heartbeat_s=0.5, min_request_timeout_s=2.0)
T = TypeVar("T")


def a_view(number: int = 1, members: tuple[Member, ...] = MEMBERS, **changes: object) -> View:
    """OWNER owns 0 and 2, OTHER owns 1 and 3, or the first member owns everything."""
    owners = (0, 1, 0, 1) if OTHER in [member.peer for member in members] else (0, 0, 0, 0)
    view = View(number=number, step=0, members=members, owners=owners, phase=Phase.TRAINING)
    return msgspec.structs.replace(view, **changes)


class Play:
    """A server with a driver's memory: what it asked for, numbered blobs, a clock that is moved by hand."""

    def __init__(self, settings: Settings = SETTINGS, stage: int = 1, view: View | None = None) -> None:
        self.server = Server(ME, settings)
        self.server.leader = OWNER
        self.now = 0.0
        self.blobs = 0
        self.inputs: dict[
            tuple[int, int], str
        ] = {}  # by step and index: the input of my stage, once it has been sent here
        self.commands: list[Command] = []  # of the last call
        self.take(self.server.on_view(view or a_view(), 0.0))
        self.take(self.server.load_state(stage, 0, 0, 10, "d0", 0.0))
        self.server.changed = False

    def take(self, commands: list[Command]) -> list[Command]:
        self.commands = commands
        return commands

    def hear(self, peer: str, message: Message, blobs: int = 0, fault: str = "") -> tuple[str, ...]:
        names = tuple(f"in{self.blobs + i}" for i in range(blobs))
        self.blobs += blobs
        self.take(self.server.on_message(peer, message, tuple(BlobRef(b, 4) for b in names), fault, self.now))
        return names

    def input(self, index: int, step: int = 0) -> str:
        """The stage below has sent my stage's input of that microbatch; its blob."""
        if (step, index) not in self.inputs:
            (self.inputs[step, index],) = self.hear(OWNER, BoundaryTensor(0, step, index, 1, False), 1)
        return self.inputs[step, index]

    def backward(self, index: int, attempt: int, peer: str = "", **changes: object) -> tuple[str, ...]:
        """Its input is here; the request brings the tokens, since this is the last stage."""
        owner = peer or (OWNER if index % 2 == 0 else OTHER)
        message = msgspec.structs.replace(Backward(0, 0, index, 1, attempt, 1, input_from=(ME, OWNER)), **changes)
        if index < self.server.settings.microbatches:
            self.input(index, message.step)
        return self.hear(owner, message, 1)

    def forward(self, index: int, attempt: int, **changes: object) -> None:
        owner = OWNER if index % 2 == 0 else OTHER
        message = msgspec.structs.replace(Forward(0, 0, index, 1, attempt, 1, input_from=(ME, OWNER)), **changes)
        self.input(index, message.step)
        self.hear(owner, message)

    def done(self, task: Task, seconds: float = 0.2, **result: object) -> None:
        self.take(self.server.on_done(Done(task.id, Result(**result), seconds), self.now))  # type: ignore[arg-type]

    def fail(self, task: Task, reason: str = "out of memory") -> None:
        self.take(self.server.on_failed(Failed(task.id, reason), self.now))

    def view(self, view: View) -> None:
        self.take(self.server.on_view(view, self.now))

    def tick(self, now: float) -> None:
        self.now = now
        self.take(self.server.tick(now))

    def book(self, *indices: int) -> None:
        for index in indices:
            self.backward(index, 1)
            self.done(self.task(RunBackward), loss=1.0)
        self.server.changed = False

    def task(self, kind: type[T]) -> T:
        """The one task of that kind that the last call asked for."""
        (matches,) = [c.task for c in self.commands if isinstance(c, Do) and isinstance(c.task, kind)]
        return matches

    def tasks(self) -> list[Task]:
        return [command.task for command in self.commands if isinstance(command, Do)]

    def sends(self, kind: type[T]) -> list[tuple[str, T, tuple[str, ...]]]:
        matches = [c for c in self.commands if isinstance(c, Send) and isinstance(c.message, kind)]
        return [(c.peer, c.message, c.blobs) for c in matches]  # type: ignore[misc]

    def dropped(self) -> list[str]:
        return [blob for command in self.commands if isinstance(command, Drop) for blob in command.blobs]

    def booked(self) -> list[int]:
        return [booking.index for booking in self.server.books]


# ---------------------------------------------------------------------------------------------------------------- hops


def test_a_forward_is_run_and_its_owner_gets_a_receipt() -> None:
    play = Play()
    play.forward(0, 7)
    task = play.task(RunForward)
    play.done(task, nbytes=4)

    assert (task.x, task.stage, task.index) == (play.input(0), 1, 0)
    assert play.sends(Output) == [(OWNER, Output(0, 0, 0, 1, 7, 4), ())]
    assert play.dropped() == []


def test_a_backward_is_booked_and_its_gradient_kept() -> None:
    play = Play()
    (tokens,) = play.backward(2, 7)
    task = play.task(RunBackward)
    play.done(task, loss=1.5, nbytes=4)

    assert (task.x, task.grad) == (play.input(2), tokens)
    assert play.server.books == (Booking(2, 1.5),)
    assert play.sends(Gradient) == [(OWNER, Gradient(0, 0, 2, 1, 7, 1.5, 4), ())]
    assert play.dropped() == [tokens] and play.server.kept_bytes == 8
    assert play.server.changed


def test_the_first_stage_writes_no_gradient_of_its_input() -> None:
    members = (Member(ME, 0), Member(OWNER, 1))
    play = Play(stage=0, view=a_view(members=members, owners=(1, 1, 1, 1)))
    (gradient,) = play.hear(OWNER, BoundaryTensor(0, 0, 0, 0, True), 1)
    (tokens,) = play.hear(OWNER, Backward(0, 0, 0, 0, 1, 1, grad_from=(ME, OWNER)), 1)
    task = play.task(RunBackward)
    play.done(task)

    assert (task.x, task.grad, task.out) == (tokens, gradient, "")
    assert len(play.sends(Gradient)) == 1 and play.sends(BoundaryTensor) == []


def test_a_single_stage_takes_the_tokens_alone() -> None:
    view = a_view(members=(Member(OWNER, 0), Member(ME, 0)), owners=(0, 0, 0, 0))
    play = Play(msgspec.structs.replace(SETTINGS, stages=1), 0, view)
    play.hear(OWNER, Backward(0, 0, 0, 0, 1, 1), 1)

    assert play.task(RunBackward).grad == ""


def test_a_retry_of_a_booked_backward_is_answered_from_the_books_and_not_run() -> None:
    play = Play()
    play.backward(0, 1)
    task = play.task(RunBackward)
    play.done(task, loss=2.0)
    again = play.backward(0, 2)

    assert play.tasks() == []
    assert play.sends(Gradient) == [(OWNER, Gradient(0, 0, 0, 1, 2, 2.0), ())]
    assert play.dropped() == list(again)
    assert play.booked() == [0]


def test_a_retry_of_a_running_backward_is_answered_once_under_the_newest_attempt() -> None:
    play = Play()
    play.backward(0, 1)
    task = play.task(RunBackward)
    for attempt in (3, 2):
        play.backward(0, attempt)
        assert play.tasks() == [] and play.sends(Gradient) == []
    play.done(task)

    assert [message.attempt for _, message, _ in play.sends(Gradient)] == [3]
    assert play.tasks() == [] and play.booked() == [0]


def test_a_retry_of_a_queued_backward_waits_with_it() -> None:
    play = Play()
    play.forward(0, 1)
    running = play.task(RunForward)
    (first,) = play.backward(2, 2)
    play.backward(2, 3)
    play.done(running)

    assert play.task(RunBackward).grad == first
    play.done(play.task(RunBackward))
    assert play.tasks() == [] and [m.attempt for _, m, _ in play.sends(Gradient)] == [3]


def test_a_damaged_retry_of_a_running_backward_is_not_refused() -> None:
    """Refused would let the owner go elsewhere with what is being booked here."""
    play = Play()
    play.backward(0, 1)
    play.hear(OWNER, Backward(0, 0, 0, 1, 2, 1), 2, "not finite")

    assert play.sends(Refused) == []


def test_backward_goes_before_forward_and_older_before_newer() -> None:
    play = Play(msgspec.structs.replace(SETTINGS, queue_limit=9))
    play.forward(0, 1)
    running: Task = play.task(RunForward)
    play.forward(3, 1)
    play.forward(2, 1)
    play.backward(3, 2)
    play.backward(1, 1)
    order = []
    for _ in range(4):
        play.done(running)
        (running,) = play.tasks()
        assert isinstance(running, RunForward | RunBackward)
        order.append((type(running), running.index))

    assert order == [(RunBackward, 1), (RunBackward, 3), (RunForward, 2), (RunForward, 3)]


def test_only_one_hop_runs_at_a_time() -> None:
    play = Play()
    play.forward(0, 1)
    play.backward(2, 1)

    assert play.tasks() == []


def test_a_newer_forward_replaces_the_queued_one() -> None:
    play = Play()
    play.backward(0, 1)
    running = play.task(RunBackward)
    play.forward(2, 1)
    play.forward(2, 2)
    play.done(running)
    play.done(play.task(RunForward))

    assert [message.attempt for _, message, _ in play.sends(Output)] == [2]


def test_a_newer_forward_of_the_first_stage_replaces_the_tokens_too() -> None:
    members = (Member(ME, 0), Member(OWNER, 1))
    play = Play(stage=0, view=a_view(members=members, owners=(1, 1, 1, 1)))
    play.hear(OWNER, Forward(0, 0, 0, 0, 1, 1), 1)
    running = play.task(RunForward)
    (old,) = play.hear(OWNER, Forward(0, 0, 2, 0, 1, 1), 1)
    (new,) = play.hear(OWNER, Forward(0, 0, 2, 0, 2, 1), 1)
    assert play.dropped() == [old]
    play.done(running)

    assert play.task(RunForward).x == new


@pytest.mark.parametrize(
    ("changes", "peer"),
    [({}, OTHER), ({}, "stranger"), ({"step": 1}, ""), ({"epoch": 1}, "")],
)
def test_what_is_not_the_owners_or_not_of_now_is_ignored(changes: dict[str, int], peer: str) -> None:
    play = Play()
    blobs = play.backward(0, 1, peer, **changes)

    assert play.commands == [Drop(blobs)]


def test_a_microbatch_that_does_not_exist_is_ignored() -> None:
    play = Play()
    blobs = play.backward(9, 1, OWNER)

    assert play.commands == [Drop(blobs)]


def test_a_request_of_a_view_not_seen_yet_waits_for_it() -> None:
    play = Play()
    play.backward(0, 1, view=2)
    assert play.commands == []
    play.view(a_view(2))
    assert play.task(RunBackward).index == 0


def test_early_requests_beyond_the_limit_are_put_off() -> None:
    play = Play()
    for index in (0, 1):
        play.backward(index, 1, view=2)
        assert play.commands == []
    play.backward(2, 1, view=2)
    ((peer, busy, _),) = play.sends(Busy)
    assert peer == OWNER and busy.backward and 0 < busy.wait_s < 0.5


def test_early_requests_are_let_go_with_the_seat_or_when_they_turn_out_wrong() -> None:
    play = Play()
    held = play.backward(0, 1, view=2)
    play.take(play.server.drop_state())
    assert Drop(held) in play.commands
    play = Play()
    stranger = play.backward(0, 1, peer=OTHER, view=2)  # does not own it
    play.view(a_view(2))
    assert Drop(stranger) in play.commands and play.tasks() == []


@pytest.mark.parametrize("why", ["busy", "refused", "failed", "cancelled"])
def test_an_attempt_that_was_declined_is_never_taken(why: str) -> None:
    play = Play()
    match why:
        case "busy":
            for _ in range(SETTINGS.queue_limit):  # no room is left for what comes early
                play.backward(2, 1, peer=OTHER, view=2)
            play.backward(0, 5, view=2)
            assert len(play.sends(Busy)) == 1
            play.view(a_view(2))
        case "refused":
            play.hear(OWNER, Backward(0, 0, 0, 1, 5, 1), 2, "not finite")
        case "failed":
            play.backward(0, 5)
            play.fail(play.task(RunBackward))
            assert [m.reason for _, m, _ in play.sends(Refused)] == ["out of memory"]
        case _:
            play.hear(OWNER, Cancel(0, 0, 0, 1, 5, 1))
    late = play.backward(0, 5)
    assert play.commands == [Drop(late)]
    play.backward(0, 6)

    assert play.task(RunBackward).index == 0


def test_damaged_blobs_are_refused_and_the_leader_is_told() -> None:
    play = Play()
    play.hear(OTHER, Forward(0, 0, 1, 1, 4, 1), 1, "values are not finite")

    assert play.sends(Refused) == [(OTHER, Refused(0, 0, 1, 1, 4, False, "values are not finite"), ())]
    ((leader, complaint, _),) = play.sends(Complaint)
    assert leader == OWNER and complaint.about == OTHER and "not finite" in complaint.reason


def test_the_wrong_number_of_blobs_is_refused() -> None:
    play = Play()
    play.hear(OWNER, Backward(0, 0, 0, 1, 4, 1, input_from=(ME, OWNER)), 2)

    assert [m.reason for _, m, _ in play.sends(Refused)] == ["2 blobs where 1 belong"]


def test_a_task_that_fails_here_is_refused_without_complaint() -> None:
    play = Play()
    play.forward(0, 1)
    play.fail(play.task(RunForward))

    assert len(play.sends(Refused)) == 1 and play.sends(Complaint) == []


def test_a_full_queue_says_how_long_it_is() -> None:
    play = Play()
    play.backward(0, 1)
    play.done(play.task(RunBackward), seconds=2.5)
    play.forward(0, 2)
    play.forward(1, 1)
    play.forward(2, 1)
    play.forward(3, 1)

    ((_, busy, _),) = play.sends(Busy)
    assert busy.wait_s == pytest.approx(3.0)  # three forwards of a second each, by the ratio of a backward
    assert play.server.queue_s == pytest.approx(3.0)
    assert play.server.rate == pytest.approx(1 / 2.5)  # this is the last stage: it runs no forward of its own


def test_a_queue_that_is_full_of_forwards_has_room_for_backwards_up_to_twice_its_limit() -> None:
    """Each gives room, and the owner would have to send its input to another replica."""
    play = Play()
    for index in range(4):  # one runs, two wait
        play.forward(index, 1)
    assert [busy.backward for _, busy, _ in play.sends(Busy)] == [False]
    for index in (0, 1):
        play.backward(index, 1)
        assert play.sends(Busy) == []
    play.backward(2, 1)
    assert [busy.backward for _, busy, _ in play.sends(Busy)] == [True]


@pytest.mark.parametrize(("stage", "wanted_s"), [(0, 3.5), (1, 2.5)])
def test_a_rate_counts_what_the_stage_runs_for_a_microbatch(stage: int, wanted_s: float) -> None:
    """With a forward that it never runs, a last stage passed for 0.7 of its speed, and peers moved there that slowed the run."""
    pace = Pace(SETTINGS, ReplicaState(stage=stage))
    assert pace.rate == 0.0
    pace.add(True, 2.5)
    assert pace.rate == pytest.approx(1 / wanted_s), "a forward by the ratio of a backward"
    pace.add(False, 0.5)
    assert pace.rate == pytest.approx(1 / (3.0 if stage == 0 else 2.5))
    planned = Pace(msgspec.structs.replace(SETTINGS, stage_seconds=(3.5, 2.5)), ReplicaState(stage=stage))
    assert planned.rate == pytest.approx(1 / wanted_s)
    assert planned.seconds(True) == pytest.approx(2.5)


def test_before_anything_is_measured_the_plan_says_the_rate() -> None:
    assert Play(msgspec.structs.replace(SETTINGS, stage_seconds=(1.0, 0.5))).server.rate == pytest.approx(2.0)
    assert Play().server.rate == 0.0


# ------------------------------------------------------------------------------------------------------ cancel, recall


def test_a_queued_backward_is_cancelled_for_good() -> None:
    play = Play()
    play.forward(0, 1)
    running = play.task(RunForward)
    blobs = play.backward(2, 1)
    play.hear(OWNER, Cancel(0, 0, 2, 1, 1, 1))
    assert play.sends(Cancelled) == [(OWNER, Cancelled(0, 0, 2, 1, 1), ())]
    assert play.dropped() == list(blobs)
    play.done(running)

    assert play.tasks() == []


def test_a_running_backward_answers_a_cancel_when_it_is_done() -> None:
    play = Play()
    play.backward(0, 1)
    task = play.task(RunBackward)
    play.hear(OWNER, Cancel(0, 0, 0, 1, 4, 1))
    assert play.commands == [Send(OWNER, Pending(0, 0, 0, 1, 4))], "it shows that it lives"
    play.done(task)

    assert [m.attempt for _, m, _ in play.sends(Gradient)] == [4]


def test_a_late_cancel_of_an_older_attempt_leaves_the_newer_one() -> None:
    play = Play()
    play.forward(0, 1)
    running = play.task(RunForward)
    play.backward(2, 5)
    play.hear(OWNER, Cancel(0, 0, 2, 1, 4, 1))
    play.done(running)

    assert play.task(RunBackward).index == 2


@pytest.mark.parametrize("kind", [Cancel, Recall])
def test_what_is_booked_is_sent_again_and_what_is_not_is_cancelled(kind: type[Cancel] | type[Recall]) -> None:
    play = Play()
    play.book(0)
    play.hear(OWNER, kind(0, 0, 0, 1, 8, 1))
    assert [m.attempt for _, m, _ in play.sends(Gradient)] == [8]
    play.hear(OWNER, kind(0, 0, 2, 1, 8, 1))

    assert play.sends(Cancelled) == [(OWNER, Cancelled(0, 0, 2, 1, 8), ())]


def test_an_owner_that_asks_is_told_what_waits_here_and_what_is_kept() -> None:
    play = Play()
    play.forward(0, 3)
    running = play.task(RunForward)
    play.forward(2, 3)
    asked = [Query(0, 0, index, 1, 3, False) for index in (0, 2)]
    for query in asked:
        play.hear(OWNER, query)
        assert play.sends(Pending) == [(OWNER, Pending(0, 0, query.index, 1, 3), ())]
    play.hear(OTHER, asked[0])
    assert play.commands == [], "not its own"
    play.done(running, nbytes=4)
    play.hear(OWNER, asked[0])
    assert play.sends(Output) == [(OWNER, Output(0, 0, 0, 1, 3, 4), ())], "the receipt again"
    play.hear(OWNER, asked[1])
    assert len(play.sends(Pending)) == 1


# -------------------------------------------------------------------------------------------------------------- owners


def without(peer: str, number: int = 2, **changes: object) -> View:
    return a_view(number, tuple(member for member in MEMBERS if member.peer != peer), **changes)


def test_what_a_former_owner_queued_is_dropped() -> None:
    play = Play()
    play.forward(0, 1)
    running = play.task(RunForward)
    blobs = play.backward(1, 1)
    play.view(without(OTHER))
    assert play.dropped() == list(blobs)
    play.done(running)

    assert play.tasks() == []


def test_books_wait_for_the_view_and_for_what_a_former_owner_runs() -> None:
    play = Play()
    play.book(0)
    play.backward(1, 1)
    running = play.task(RunBackward)
    play.hear(OWNER, BooksRequest(0, 0, 2))
    assert play.commands == []
    play.view(without(OTHER))
    assert play.sends(Books) == []
    play.done(running)

    assert play.sends(Books) == [(OWNER, Books(0, 0, 2, 1, (0, 1)), ())]


@pytest.mark.parametrize("skipped", [False, True])
def test_an_owner_that_left_and_came_back_in_one_step_is_another_one(skipped: bool) -> None:
    play = Play()
    play.backward(1, 1)
    running = play.task(RunBackward)
    waiting = play.backward(3, 1)
    if not skipped:
        play.view(without(OTHER))
        assert play.dropped() == list(waiting)
    back = tuple(msgspec.structs.replace(one, since=3) if one.peer == OTHER else one for one in MEMBERS)
    play.view(a_view(3, back))
    assert not skipped or play.dropped() == list(waiting)
    play.hear(OTHER, BooksRequest(0, 0, 3))
    assert play.sends(Books) == []  # it is running what OTHER asked for before and knows nothing of
    late = play.backward(3, 2)
    assert play.dropped() == list(late) and play.sends(Busy) == []
    play.done(running)

    assert play.sends(Books) == [(OTHER, Books(0, 0, 3, 1, (1,)), ())]
    play.backward(3, 3 << 20, view=3)
    assert play.task(RunBackward).index == 3


def test_books_do_not_wait_for_what_the_present_owner_runs() -> None:
    play = Play()
    play.backward(0, 1)
    play.view(without(OTHER))
    play.hear(OWNER, BooksRequest(0, 0, 2))

    assert play.sends(Books) == [(OWNER, Books(0, 0, 2, 1, ()), ())]


# -------------------------------------------------------------------------------------------------------------- rounds


def a_round(number: int = 1, mine: tuple[int, ...] = (0, 2), group: tuple[Share, ...] = (), view: int = 1) -> Round:
    rest = tuple(index for index in range(4) if index not in mine)
    group = group or (Share(ME, mine), Share(REPLICA, rest))
    return Round(0, 0, number, view, ((Share(OWNER, (0, 1, 2, 3)), Share(OTHER, ())), group))


def started(*, replica_first: bool = False) -> Play:
    """In round 1, my sum cut, the parts sent."""
    play = Play()
    play.book(0, 2)
    if replica_first:
        play.hear(REPLICA, ReduceChunk(0, 0, 1, 0), 1)
    play.hear(OWNER, a_round())
    play.done(play.task(Cut))
    return play


def reduced() -> Play:
    play = started()
    play.hear(REPLICA, ReduceChunk(0, 0, 1, 0), 1)
    play.done(play.task(Add))
    play.hear(REPLICA, GatherChunk(0, 0, 1, 1), 1)
    play.done(play.task(Gather), digest="g1", norm_sq=4.0)
    return play


def a_commit(number: int = 2, digest: str = "g1", save: bool = False, **changes: object) -> View:
    last = Committed(0, 1, 2.0, 1.0, ("g0", digest), a_round().groups, save)
    return a_view(number, step=1, last=last, **changes)


def test_a_round_cuts_exchanges_adds_and_gathers() -> None:
    play = Play()
    play.book(0, 2)
    play.hear(OWNER, a_round())
    cut = play.task(Cut)
    assert cut.bounds == (0, 5, 10) and len(cut.outs) == 2
    play.done(cut)
    assert play.sends(ReduceChunk) == [(REPLICA, ReduceChunk(0, 0, 1, 1), (cut.outs[1],))]

    (part,) = play.hear(REPLICA, ReduceChunk(0, 0, 1, 0), 1)
    add = play.task(Add)
    assert add.parts == (cut.outs[0], part)
    play.done(add)
    assert play.sends(GatherChunk) == [(REPLICA, GatherChunk(0, 0, 1, 0), (add.out,))]
    assert play.dropped() == [cut.outs[0], part]

    (other,) = play.hear(REPLICA, GatherChunk(0, 0, 1, 1), 1)
    gather = play.task(Gather)
    assert gather.sums == (add.out, other)
    play.done(gather, digest="g1", norm_sq=4.0)
    assert play.sends(Reduced) == [(OWNER, Reduced(0, 0, 1, "g1", 4.0), ())]


def test_parts_are_added_in_group_order_whoever_is_first() -> None:
    play = Play()
    play.book(0, 2)
    (part,) = play.hear(REPLICA, ReduceChunk(0, 0, 1, 1), 1)
    play.hear(OWNER, a_round(group=(Share(REPLICA, (1, 3)), Share(ME, (0, 2)))))
    cut = play.task(Cut)
    play.done(cut)

    assert play.task(Add).parts == (part, cut.outs[1])


def test_a_lone_replica_gathers_what_it_cut() -> None:
    play = Play(view=without(REPLICA, 1))
    for index in range(4):
        play.backward(index, 1, OWNER if index % 2 == 0 else OTHER)
        play.done(play.task(RunBackward))
    play.hear(OWNER, a_round(mine=(0, 1, 2, 3), group=(Share(ME, (0, 1, 2, 3)),)))
    cut = play.task(Cut)
    play.done(cut)

    assert play.task(Gather).sums == cut.outs


def test_a_part_that_comes_before_its_round_is_kept_for_it() -> None:
    play = started(replica_first=True)

    assert play.task(Add).parts[1] == "in4"


def test_at_most_two_early_blobs_are_held_for_a_sender_the_newest() -> None:
    play = Play()
    held = [
        play.hear(REPLICA, message, 1)[0]
        for message in (ReduceChunk(0, 0, 3, 0), GatherChunk(0, 0, 3, 1), ReduceChunk(0, 0, 4, 0))
    ]

    assert play.dropped() == [held[0]]
    assert play.hear(REPLICA, ReduceChunk(0, 0, 2, 0), 1) == tuple(play.dropped())


def test_a_round_needs_the_very_books_in_their_order() -> None:
    play = Play()
    play.book(2, 0)
    play.hear(OWNER, a_round(mine=(0, 2)))

    ((leader, failed, _),) = play.sends(RoundFailed)
    assert leader == OWNER and failed.culprit == "" and "I booked [2, 0]" in failed.reason
    assert play.tasks() == [] and play.server.changed


def test_a_round_that_brings_a_microbatch_twice_is_refused() -> None:
    play = Play()
    play.book(0, 2)
    play.hear(OWNER, a_round(group=(Share(ME, (0, 2)), Share(REPLICA, (1, 2, 3)))))

    assert play.tasks() == [] and "brought twice" in play.sends(RoundFailed)[0][1].reason


def test_a_round_of_someone_who_does_not_lead_is_ignored() -> None:
    play = Play()
    play.book(0, 2)
    play.hear(OTHER, a_round())

    assert play.commands == []


def test_a_round_waits_for_its_view() -> None:
    play = Play()
    play.book(0, 2)
    play.hear(OWNER, a_round(view=2))
    assert play.commands == []
    play.view(a_view(2))

    assert play.task(Cut).step == 0


def test_nothing_is_cut_while_something_is_added_nor_added_while_it_is_cut() -> None:
    play = Play()
    play.book(0)
    play.backward(2, 1)
    running = play.task(RunBackward)
    play.hear(OWNER, a_round())
    assert play.tasks() == []
    play.done(running)
    cut = play.task(Cut)
    play.backward(3, 1)
    assert play.tasks() == []
    play.done(cut)

    assert play.task(RunBackward).index == 3


@pytest.mark.parametrize("step", ["part", "add", "sum"])
def test_a_replica_that_is_fenced_in_the_middle_is_not_averaged(step: str) -> None:
    play = started()
    if step != "part":
        play.hear(REPLICA, ReduceChunk(0, 0, 1, 0), 1)
        add = play.task(Add)
    if step == "sum":
        play.done(add)
    play.view(without(REPLICA))
    play.hear(REPLICA, ReduceChunk(0, 0, 1, 0), 1)
    assert play.tasks() == []
    if step == "add":
        play.done(add)
    play.hear(REPLICA, GatherChunk(0, 0, 1, 1), 1)

    assert play.tasks() == [] and play.sends(Reduced) == [] and play.sends(GatherChunk) == []
    assert play.booked() == [0, 2]


def test_a_round_that_lists_a_fenced_replica_is_not_begun() -> None:
    play = Play()
    play.book(0, 2)
    play.view(without(REPLICA))
    play.hear(OWNER, a_round())

    assert play.tasks() == [] and "replica is listed" in play.sends(RoundFailed)[0][1].reason


def after_a_loss_in_another_stage() -> Play:
    """The exchange of my stage began in round 1 and goes on."""
    play = started()
    play.view(without(OTHER))
    play.hear(REPLICA, ReduceChunk(0, 0, 1, 0), 1)
    play.done(play.task(Add))
    return play


def the_next_round(mine: tuple[int, ...] = (0, 2)) -> Round:
    own = a_round(mine=mine).groups[1]
    return Round(0, 0, 2, 2, ((Share(OWNER, (0, 1, 2, 3)),), own), kept=(2, 1))


def test_after_a_loss_in_another_stage_my_stages_exchange_goes_on_under_its_number() -> None:
    play = after_a_loss_in_another_stage()
    play.hear(OWNER, the_next_round())
    play.hear(REPLICA, GatherChunk(0, 0, 1, 1), 1)
    play.done(play.task(Gather), digest="g1", norm_sq=4.0)
    assert play.sends(Reduced) == [(OWNER, Reduced(0, 0, 1, "g1", 4.0), ())]
    play.hear(OWNER, the_next_round())
    assert play.sends(Reduced) == [(OWNER, Reduced(0, 0, 1, "g1", 4.0), ())] and play.tasks() == []

    last = Committed(0, 2, 2.0, 1.0, ("g0", "g1"), the_next_round().groups, kept=(2, 1))
    play.view(msgspec.structs.replace(without(OTHER, 3), step=1, last=last))
    assert play.task(Apply).round == 1


def test_an_exchange_goes_on_only_with_what_i_booked() -> None:
    play = after_a_loss_in_another_stage()
    play.hear(OWNER, the_next_round(mine=(0, 1)))

    ((_, failed, _),) = play.sends(RoundFailed)
    assert failed.round == 1 and "not of what I booked" in failed.reason


def test_an_aborted_rounds_blobs_go_when_the_task_that_reads_them_has_ended() -> None:
    play = started()
    (part,) = play.hear(REPLICA, ReduceChunk(0, 0, 1, 0), 1)
    add = play.task(Add)
    play.view(without(REPLICA))
    assert part not in play.dropped()
    play.done(add)

    assert set(play.dropped()) == {*add.parts, add.out}


def test_a_newer_round_replaces_the_older_whose_messages_are_void() -> None:
    play = started()
    play.hear(OWNER, a_round(2))
    play.done(play.task(Cut))
    play.hear(REPLICA, ReduceChunk(0, 0, 1, 0), 1)
    assert play.tasks() == []
    play.hear(REPLICA, ReduceChunk(0, 0, 2, 0), 1)
    assert len(play.task(Add).parts) == 2
    play.hear(OWNER, a_round(1))

    assert play.tasks() == [] and play.sends(RoundFailed)[0][1].round == 1


def test_a_part_twice_counts_once() -> None:
    play = started()
    play.hear(REPLICA, ReduceChunk(0, 0, 1, 0), 1)
    again = play.hear(REPLICA, ReduceChunk(0, 0, 1, 0), 1)

    assert play.commands == [Drop(again)]


def test_a_damaged_part_ends_the_round_and_names_its_sender() -> None:
    play = started()
    play.hear(REPLICA, ReduceChunk(0, 0, 1, 0), 1, "values are not finite")

    ((_, failed, _),) = play.sends(RoundFailed)
    assert failed.culprit == REPLICA and "not finite" in failed.reason


def test_a_gradient_that_is_not_finite_ends_the_round_without_a_culprit() -> None:
    play = started()
    play.hear(REPLICA, ReduceChunk(0, 0, 1, 0), 1)
    play.done(play.task(Add))
    play.hear(REPLICA, GatherChunk(0, 0, 1, 1), 1)
    play.fail(play.task(Gather), "not finite")

    assert [m.culprit for _, m, _ in play.sends(RoundFailed)] == [""]
    play.hear(OWNER, a_round())
    assert "not finite" in play.sends(RoundFailed)[0][1].reason  # asked again, it says so again


def test_what_is_missing_is_asked_for_again_at_the_deadline() -> None:
    play = started()
    assert play.server.deadline == 1.0
    play.tick(1.0)

    assert [(peer, m.chunk, m.sum) for peer, m, _ in play.sends(Resend)] == [(REPLICA, 0, False), (REPLICA, 1, True)]
    asked = []
    while len(asked) < 20:
        at = play.server.deadline
        assert at is not None
        play.tick(at)
        asked += [at] if play.sends(Resend) else []
    waits = [after - before for before, after in pairwise(asked)]
    assert asked[:4] == [3.0, 4.0, 5.0, 6.0] and waits[3:11] == [0.5] * 8, (
        "as often as the leader hears of it, which may judge"
    )
    assert waits[11:] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 32.0, 32.0], "the line may be slow: less and less often"


@pytest.mark.parametrize("broken", [False, True])
def test_a_part_and_a_sum_are_sent_again_when_asked_for_twice_or_when_the_connection_broke(broken: bool) -> None:
    """100 MB among 4 peers over 200 Mbit/s took 15 s for 6: what was on its way was sent again, and again."""
    play = reduced()
    asked = Resend(0, 0, 1, 1, False), Resend(0, 0, 1, 0, True)
    if broken:
        play.server.on_unreachable(REPLICA)
    else:
        for resend in asked:
            play.hear(REPLICA, resend)
            assert play.commands == []
    play.now = 0.1
    play.hear(REPLICA, asked[0])
    assert [m for _, m, _ in play.sends(ReduceChunk)] == [ReduceChunk(0, 0, 1, 1, again=True)]
    play.hear(REPLICA, asked[1])
    assert [m for _, m, _ in play.sends(GatherChunk)] == [GatherChunk(0, 0, 1, 0, again=True)]
    for _ in range(2):
        play.hear(REPLICA, Resend(0, 0, 1, 0, False))  # not its chunk
        assert play.commands == []


PIECES = msgspec.structs.replace(SETTINGS, piece_values=5)  # two of them: 0 to 5 and 5 to 10


def in_pieces() -> Play:
    """In round 1, the first piece gathered, the second cut."""
    play = Play(PIECES)
    play.book(0, 2)
    play.hear(OWNER, a_round())
    play.done(play.task(Cut))
    play.hear(REPLICA, ReduceChunk(0, 0, 1, 0), 1)
    play.done(play.task(Add))
    play.hear(REPLICA, GatherChunk(0, 0, 1, 1), 1)
    play.done(play.task(Gather))
    play.done(play.task(Cut))
    return play


def test_a_large_gradient_goes_piece_by_piece_and_no_blob_stays() -> None:
    play, held = Play(PIECES), set[str]()
    play.book(0, 2)

    def after(blobs: tuple[str, ...]) -> int:
        held.update(blobs)
        held.difference_update(play.dropped())
        return len(held)

    play.hear(OWNER, a_round())
    first = play.task(Cut)
    assert first.bounds == (0, 3, 5)
    play.done(first)
    assert [(m.chunk, blobs) for _, m, blobs in play.sends(ReduceChunk)] == [(1, (first.outs[1],))]
    after(first.outs)
    after(play.hear(REPLICA, ReduceChunk(0, 0, 1, 0), 1))
    add = play.task(Add)
    play.done(add)
    after((add.out,))
    after(play.hear(REPLICA, GatherChunk(0, 0, 1, 1), 1))
    gather = play.task(Gather)
    assert (gather.start, gather.last) == (0, False)
    play.done(gather)
    second = play.task(Cut)
    assert second.bounds == (5, 8, 10) and play.sends(Reduced) == []
    assert after(()) == 1, "my own sum of the first piece, which the other may not have got"
    play.done(second)
    assert [m.chunk for _, m, _ in play.sends(ReduceChunk)] == [3]
    after(second.outs)
    after(play.hear(REPLICA, ReduceChunk(0, 0, 1, 2), 1))
    add = play.task(Add)
    play.done(add)
    after((add.out,))
    assert [m.chunk for _, m, _ in play.sends(GatherChunk)] == [2]
    after(play.hear(REPLICA, GatherChunk(0, 0, 1, 3), 1))
    gather = play.task(Gather)
    assert (gather.start, gather.last) == (5, True)
    play.done(gather, digest="g1", norm_sq=4.0)
    assert [m.digest for _, m, _ in play.sends(Reduced)] == ["g1"]
    after(())
    play.view(a_commit())
    assert play.task(Apply).round == 1
    assert after(()) == 0


def test_nothing_is_added_before_the_last_piece_is_cut() -> None:
    play = Play(PIECES)
    play.book(0, 2)
    play.hear(OWNER, a_round())
    first = play.task(Cut)
    play.backward(3, 1)
    play.done(first)
    assert not any(isinstance(task, RunBackward) for task in play.tasks())
    play.hear(REPLICA, ReduceChunk(0, 0, 1, 0), 1)
    play.done(play.task(Add))
    play.hear(REPLICA, GatherChunk(0, 0, 1, 1), 1)
    play.done(play.task(Gather))
    last = play.task(Cut)
    assert not any(isinstance(task, RunBackward) for task in play.tasks())
    play.done(last)
    assert play.task(RunBackward).index == 3


def test_a_part_of_the_next_piece_that_comes_early_is_kept_for_it() -> None:
    play = Play(PIECES)
    play.book(0, 2)
    play.hear(OWNER, a_round())
    play.done(play.task(Cut))
    play.hear(REPLICA, ReduceChunk(0, 0, 1, 0), 1)
    play.done(play.task(Add))
    (early,) = play.hear(
        REPLICA, ReduceChunk(0, 0, 1, 2), 1
    )  # the sum before it was lost, and comes when it is asked for
    assert play.commands == []
    play.hear(REPLICA, GatherChunk(0, 0, 1, 1), 1)
    play.done(play.task(Gather))
    play.done(play.task(Cut))
    assert play.task(Add).parts[1] == early


def test_a_sum_of_the_piece_before_is_sent_again() -> None:
    play = in_pieces()
    again = Resend(0, 0, 1, 0, True)
    play.hear(REPLICA, again)
    assert play.commands == [], "it may be on its way"
    play.now = 0.1
    play.hear(REPLICA, again)
    assert [m for _, m, _ in play.sends(GatherChunk)] == [GatherChunk(0, 0, 1, 0, again=True)]
    play.hear(REPLICA, Resend(0, 0, 1, 1, False))
    assert play.commands == [], "that part has been added: there is its sum"


def test_a_joiner_applies_a_commit_of_which_it_heard_every_piece() -> None:
    play = Play(PIECES, view=a_view(members=WITHOUT_ME, joining=JOINING))
    sums = heard_sums(play)
    play.view(a_commit_of_others())
    assert play.tasks() == [], "of the second piece nothing is here"
    (last,) = play.hear(THIRD, GatherChunk(0, 0, 9, 3, to_joiner=True), 1)
    (third,) = play.hear(REPLICA, GatherChunk(0, 0, 9, 2, to_joiner=True), 1)
    assert play.task(Gather).sums == (*sums, third, last)


def test_reduced_is_repeated_to_whoever_leads() -> None:
    play = reduced()
    play.server.leader = OTHER
    play.tick(1.0)

    assert [peer for peer, _, _ in play.sends(Reduced)] == [OTHER]


# ------------------------------------------------------------------------------------------------------------- commits


def test_a_commit_of_what_i_hold_is_applied_and_opens_the_next_step() -> None:
    play = reduced()
    assert play.server._rounds.current is not None
    kept = set(play.server._rounds.current.live)
    play.view(a_commit(save=True))
    task = play.task(Apply)
    assert (task.step, task.round, task.norm, task.save) == (0, 1, 2.0, True)
    assert kept <= set(play.dropped()) and play.server.books == () and not play.server.ready
    play.backward(0, 1, step=1, view=2)
    assert play.commands == [], "it waits until the version is there"
    play.done(task, digest="d1")

    assert (play.server.step, play.server.digest, play.server.ready, play.server.changed) == (1, "d1", True, True)
    assert play.task(RunBackward).step == 1


@pytest.mark.parametrize("case", ["other digest", "no round", "two steps", "other round"])
def test_without_the_committed_gradient_the_state_must_come_again(case: str) -> None:
    play = Play() if case == "no round" else reduced()
    view = a_commit(digest="other") if case == "other digest" else a_commit()
    if case == "two steps":
        view = msgspec.structs.replace(view, step=2)
    if case == "other round":
        assert view.last is not None
        view = msgspec.structs.replace(view, last=msgspec.structs.replace(view.last, round=9))
    play.view(view)

    assert play.tasks() == [] and play.server.stale and not play.server.ready
    assert [command.kind for command in play.commands if isinstance(command, Note)] == ["state"]
    play.server.stale = ""
    assert not play.server.ready
    play.tick(2.0)
    assert play.server.stale  # said again: the first call may have vanished
    play.take(play.server.load_state(1, view.step, 0, 10, "d", 3.0))
    assert play.server.ready and not play.server.stale


WITHOUT_ME = (*(member for member in MEMBERS if member.peer != ME), Member(THIRD, 1))
JOINING = (Member(ME, 1),)


def a_joiner() -> Play:
    """It has just taken the state of step 0, while step 0 is trained."""
    return Play(view=a_view(members=WITHOUT_ME, joining=JOINING))


def a_commit_of_others(number: int = 2, step: int = 1, *, listed: bool = True, **changes: object) -> View:
    groups = ((Share(OWNER, (0, 1, 2, 3)),), (Share(REPLICA, (0, 1)), Share(THIRD, (2, 3))))
    last = Committed(step - 1, 9, 2.0, 1.0, ("g0", "g1"), groups, joiners=(ME,) if listed else ())
    return a_view(number, members=WITHOUT_ME, joining=JOINING, step=step, last=last, **changes)


def heard_sums(play: Play, step: int = 0) -> tuple[str, ...]:
    (second,) = play.hear(THIRD, GatherChunk(0, step, 9, 1, to_joiner=True), 1)
    (first,) = play.hear(REPLICA, GatherChunk(0, step, 9, 0, to_joiner=True), 1)
    return first, second


def test_a_joiner_applies_the_commit_that_it_heard() -> None:
    play = a_joiner()
    sums = heard_sums(play)
    play.view(a_commit_of_others())
    gather = play.task(Gather)
    assert (gather.step, gather.round, gather.sums) == (0, 9, sums)
    play.done(gather, digest="g1", norm_sq=1.0)
    apply = play.task(Apply)
    assert (apply.step, apply.round, apply.norm, apply.save) == (0, 9, 2.0, False)
    assert sorted(play.dropped()) == sorted(sums)
    assert not play.server.ready
    play.done(apply, digest="d1")
    assert play.server.ready and (play.server.step, play.server.digest) == (1, "d1") and play.server.changed


def test_sums_that_come_after_the_commit_are_applied_too() -> None:
    play = a_joiner()
    play.view(a_commit_of_others())
    assert play.tasks() == [] and play.server.ready and play.server.step == 0
    heard_sums(play)
    assert play.task(Gather).round == 9


def test_a_joiner_that_was_sent_other_sums_than_were_committed_downloads_again() -> None:
    play = a_joiner()
    heard_sums(play)
    play.view(a_commit_of_others())
    play.done(play.task(Gather), digest="another", norm_sq=1.0)
    assert play.tasks() == [] and not play.server.ready and play.server.unfit
    assert play.server.since == 1, "what it downloads next must be newer"


def test_a_joiner_that_does_not_hear_a_commit_downloads_again() -> None:
    play = a_joiner()
    play.view(a_commit_of_others())
    assert play.server.ready and play.server.deadline == SETTINGS.ready_timeout_s
    play.tick(SETTINGS.ready_timeout_s - 0.1)
    assert play.server.ready
    play.tick(SETTINGS.ready_timeout_s)
    assert not play.server.ready and play.server.stale == "", "its transfer asks for a state itself"
    assert play.server.since == 1


def test_a_joiner_that_was_not_known_to_listen_does_not_wait_for_what_nobody_sends() -> None:
    play = a_joiner()
    play.view(a_commit_of_others(listed=False))
    assert not play.server.ready and play.server.since == 1


def test_a_joiner_that_missed_a_view_cannot_catch_up() -> None:
    play = a_joiner()
    heard_sums(play)
    play.view(a_commit_of_others(number=3, step=2))
    assert not play.server.ready and play.server.since == 1 and len(play.dropped()) == 2


def test_sums_that_still_come_are_not_lost_however_long_they_take() -> None:
    """A large stage's sums take a narrow line minutes."""
    play = Play(PIECES, view=a_view(members=WITHOUT_ME, joining=JOINING))
    play.view(a_commit_of_others())
    for at_s, peer, chunk in ((25.0, REPLICA, 0), (50.0, THIRD, 1), (75.0, REPLICA, 2)):
        play.tick(at_s)
        play.hear(peer, GatherChunk(0, 0, 9, chunk, to_joiner=True), 1)
    deadline = play.server.deadline
    assert play.server.since == 0 and deadline is not None and deadline == 75.0 + PIECES.ready_timeout_s
    play.tick(deadline)
    assert play.server.since == 1 and len(play.dropped()) == 3, "no more has come for that long"


def test_a_sum_that_is_lost_is_lost_though_those_of_later_steps_come() -> None:
    play = a_joiner()
    play.hear(REPLICA, GatherChunk(0, 0, 9, 0, to_joiner=True), 1)
    play.view(a_commit_of_others())
    step = 0
    while play.server.since == 0:
        play.now, step = play.now + SETTINGS.ready_timeout_s - 1.0, step + 1
        heard_sums(play, step)
        play.tick(play.now)
    assert MOST <= play.now / SETTINGS.ready_timeout_s < MOST + 1


@pytest.mark.parametrize(("sender", "chunk", "waits"), [(REPLICA, 0, False), (THIRD, 1, True), (REPLICA, 1, False)])
def test_sums_that_a_dead_replica_had_to_send_are_not_waited_for(sender: str, chunk: int, waits: bool) -> None:
    """Those of later steps came all the time, so a joiner waited two minutes for what nobody had any more: fleet 199 of forecast_check.py.
    What the dead one has sent is good; the last one is not its own."""
    play = a_joiner()
    play.hear(sender, GatherChunk(0, 0, 9, chunk, to_joiner=True), 1)
    committed = a_commit_of_others()
    play.view(committed)
    assert play.server.since == 0
    members = tuple(member for member in WITHOUT_ME if member.peer != THIRD)
    play.view(msgspec.structs.replace(committed, number=3, members=members))
    assert play.server.since == (not waits)
    if waits:
        play.hear(REPLICA, GatherChunk(0, 0, 9, 0, to_joiner=True), 1)
        assert play.task(Gather).round == 9


def test_small_sums_are_kept_of_many_steps_and_large_ones_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    def oldest_kept(steps: int) -> int:
        play = a_joiner()
        for step in range(steps):  # its task for the first one lasts
            heard_sums(play, step)
            play.view(a_commit_of_others(number=step + 2, step=step + 1))
        return play.server.since

    assert oldest_kept(3 * STEPS) == 0
    monkeypatch.setattr(catch_up, "SMALL_STEPS", 2 * STEPS)
    assert oldest_kept(3 * STEPS) == STEPS
    monkeypatch.setattr(catch_up, "SMALL_BYTES", 0)
    assert oldest_kept(3 * STEPS) == 2 * STEPS


def test_sums_of_steps_ahead_of_the_view_are_kept_while_they_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    play = a_joiner()
    heard_sums(play, STEPS)
    assert not play.dropped()
    heard_sums(play, STEPS + 1)
    assert play.dropped()
    monkeypatch.setattr(catch_up, "SMALL_BYTES", 0)
    heard_sums(play, 1)
    assert not play.dropped()
    heard_sums(play, 2)
    assert play.dropped()


def test_what_led_to_the_version_that_is_on_its_way_is_not_needed() -> None:
    play = a_joiner()
    for step in range(4):
        heard_sums(play, step)
        play.view(a_commit_of_others(number=step + 2, step=step + 1))
    play.take(play.server.rests_on(3))
    assert play.server.since == 3


def test_sums_for_listeners_are_taken_only_by_them_and_from_replicas_of_their_stage() -> None:
    play = a_joiner()
    strangers = play.hear(OWNER, GatherChunk(0, 0, 9, 0, to_joiner=True), 1)
    assert play.dropped() == list(strangers)
    faulty = play.hear(REPLICA, GatherChunk(0, 0, 9, 0, to_joiner=True), 1, fault="not finite")
    assert play.dropped() == list(faulty)
    member = Play()
    heard = member.hear(REPLICA, GatherChunk(0, 0, 9, 0, to_joiner=True), 1)
    assert member.dropped() == list(heard)


def test_a_state_kept_from_before_it_was_put_out_serves_again_when_the_epoch_goes_on_with_it() -> None:
    play = Play()
    play.book(0)
    play.take(play.server.drop_state(keep=True))
    assert play.task(Reset) and not play.server.ready
    assert play.server.holding == Holding(epoch=0, stage=1, step=0)
    rebuilt = a_view(9, epoch=1, continued=Continued((Rebuilt(1),)))
    for unsuited in (
        a_view(9, epoch=1),
        a_view(9, epoch=2, continued=Continued()),
        a_view(9, step=1, epoch=1, continued=Continued()),
        rebuilt,
    ):
        other = Play()
        other.server.drop_state(keep=True)
        assert other.server.take_back(unsuited, 1, 0.0) is None and other.server.holding is None
    play.view(a_view(9, epoch=1, continued=Continued()))
    assert play.server.take_back(a_view(9, epoch=1, continued=Continued()), 1, 0.0) is not None
    assert play.server.ready and (play.server.epoch, play.server.step, play.server.books) == (1, 0, ())


def test_an_epoch_that_goes_on_voids_the_books_and_keeps_the_state() -> None:
    play = Play()
    play.book(0, 2)
    play.view(a_view(2, epoch=1, continued=Continued()))
    assert play.task(Reset) and play.server.ready and play.server.epoch == 1 and play.booked() == []


def test_whoever_lacks_what_an_epoch_goes_on_with_says_so_until_it_is_let_in_anew() -> None:
    play = Play()
    play.view(a_view(4, step=1, epoch=1, continued=Continued()))
    assert not play.server.ready and "epoch 1" in play.server.stale
    play.server.stale = ""
    play.tick(2.0)
    assert play.server.stale


@pytest.mark.parametrize("urgent", [False, True])
def test_listeners_get_the_sums_of_the_round(urgent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if urgent:
        monkeypatch.setattr(replica_state, "HURRY_STEPS", 0)
    joining = (Member("new", 1), Member("elsewhere", 0))
    play = Play(view=a_view(joining=joining))
    play.book(0, 2)
    play.hear(OWNER, msgspec.structs.replace(a_round(), joiners=((), ("new", "elsewhere", "unknown"))))
    cut = play.task(Cut)
    play.done(cut)
    play.hear(REPLICA, ReduceChunk(0, 0, 1, 0), 1)
    add = play.task(Add)
    play.done(add)
    sent = [
        (REPLICA, GatherChunk(0, 0, 1, 0), (add.out,)),
        ("new", GatherChunk(0, 0, 1, 0, to_joiner=True, urgent=urgent), (add.out,)),
    ]
    assert play.sends(GatherChunk) == sent


def test_a_ready_joiner_takes_part_in_the_round_and_enters_with_the_commit() -> None:
    members = tuple(member for member in MEMBERS if member.peer != ME)
    play = Play(view=a_view(members=members, joining=(Member(ME, 1),)))
    play.hear(OWNER, a_round(group=(Share(REPLICA, (0, 1, 2, 3)), Share(ME, ()))))
    assert play.tasks() == [] and play.sends(ReduceChunk) == []  # it has booked nothing
    play.hear(REPLICA, GatherChunk(0, 0, 1, 0), 1)
    play.done(play.task(Gather), digest="g1")
    play.view(a_commit())

    assert play.task(Apply).round == 1


def test_an_optimizer_step_that_fails_asks_for_the_state() -> None:
    play = reduced()
    play.view(a_commit())
    play.fail(play.task(Apply))

    assert "out of memory" in play.server.stale


def test_what_still_runs_at_a_commit_is_not_booked_in_the_next_step() -> None:
    play = reduced()
    play.backward(1, 1)
    running = play.task(RunBackward)
    play.view(a_commit())
    apply = play.task(Apply)
    play.done(running)
    assert set(play.dropped()) == {running.x, running.grad, running.out} and play.sends(Gradient) == []
    play.done(apply)

    assert play.server.books == ()


def test_a_rollback_voids_everything() -> None:
    play = reduced()
    play.view(a_view(2, epoch=1))

    assert not play.server.has_state and play.server.books == ()
    assert isinstance(play.tasks()[0], Reset)


def test_a_member_that_is_put_out_empties_its_sum() -> None:
    play = Play()
    play.book(0)
    members = tuple(member for member in MEMBERS if member.peer != ME)
    play.view(a_view(2, members, joining=(Member(ME, 1),)))

    assert play.server.books == () and isinstance(play.tasks()[0], Reset)


def test_a_move_to_another_stage_voids_the_seat() -> None:
    play = reduced()
    play.view(a_commit(members=(Member(OWNER, 0), Member(OTHER, 0), Member(ME, 0), Member(REPLICA, 1))))

    assert not play.server.has_state and not any(isinstance(task, Apply) for task in play.tasks())


def test_a_seat_that_comes_too_late_asks_again() -> None:
    play = Play()
    play.take(play.server.drop_state())
    play.view(a_commit())
    play.take(play.server.load_state(1, 0, 0, 10, "d0", 0.0))

    assert play.server.stale and not play.server.ready


# --------------------------------------------------------------------------------------------------------- checkpoints


def saving() -> Play:
    play = reduced()
    play.view(a_commit(save=True))
    return play


def test_a_shard_is_written_once_and_answered_as_often_as_asked() -> None:
    play = saving()
    apply = play.task(Apply)
    play.hear(OWNER, SaveRequest(0, 1))
    assert play.commands == []  # that version is being made
    play.done(apply)
    task = play.task(RunSave)
    assert (task.stage, task.step) == (1, 1)
    play.hear(OWNER, SaveRequest(0, 1))
    assert play.commands == []
    play.done(task, record="{}")
    assert play.sends(Saved) == [(OWNER, Saved(0, 1, 1, "{}"), ())]
    play.hear(OWNER, SaveRequest(0, 1))

    assert play.sends(Saved) == [(OWNER, Saved(0, 1, 1, "{}"), ())] and play.tasks() == []


def test_a_shard_that_fails_is_tried_again_when_asked_again() -> None:
    play = saving()
    play.done(play.task(Apply))
    play.hear(OWNER, SaveRequest(0, 1))
    play.fail(play.task(RunSave), "disk is full")
    assert [m.failed for _, m, _ in play.sends(Saved)] == ["disk is full"]
    play.hear(OWNER, SaveRequest(0, 1))

    assert play.task(RunSave).step == 1


def test_without_a_copy_the_leader_is_told_to_ask_another() -> None:
    play = reduced()
    play.view(a_commit(save=False))
    play.done(play.task(Apply))
    play.hear(OWNER, SaveRequest(0, 0))

    assert "no copy" in play.sends(Saved)[0][1].failed


def test_the_version_that_is_being_trained_is_saved_without_a_copy_kept_before() -> None:
    play = Play()
    play.hear(OWNER, SaveRequest(0, 0))

    assert play.task(RunSave).step == 0


def test_a_version_that_is_being_replaced_is_not_copied() -> None:
    play = reduced()
    play.view(a_commit(save=False))
    play.task(Apply)
    play.hear(OWNER, SaveRequest(0, 0))

    assert "no copy" in play.sends(Saved)[0][1].failed


def test_publishing_is_done_once_and_answered_as_often_as_asked() -> None:
    play = Play()
    play.hear(OWNER, PublishRequest(0, 1, ("{}", "{}")))
    task = play.task(RunPublish)
    play.hear(OWNER, PublishRequest(0, 1, ("{}", "{}")))
    assert play.commands == []
    play.done(task, record="runs/x")
    play.hear(OWNER, PublishRequest(0, 1, ("{}", "{}")))

    assert play.sends(Published) == [(OWNER, Published(0, 1, "runs/x"), ())] and play.tasks() == []


def test_bookings_are_reported_when_no_hop_of_the_step_follows() -> None:
    """Before that the step is not complete, and the heartbeat of the next beat says it soon enough."""
    play = Play()
    play.backward(0, 1)
    first = play.task(RunBackward)
    play.backward(2, 1)
    play.done(first)
    assert play.booked() == [0] and not play.server.changed
    play.done(play.task(RunBackward))
    assert play.booked() == [0, 2] and play.server.changed

"""What a trainer sends, and what it makes of the answers."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from shoal.core.messages import (
    Backward,
    BlobRef,
    Booker,
    BookerRequest,
    Books,
    BooksRequest,
    Busy,
    Cancel,
    Cancelled,
    Command,
    Complaint,
    Do,
    Done,
    Drop,
    Failed,
    Fetch,
    Forward,
    Gradient,
    Member,
    Message,
    Output,
    Pending,
    Phase,
    Query,
    Recall,
    Refused,
    Result,
    Send,
    Settings,
    View,
)
from shoal.core.trainer.microbatch import LOST_TO_ONE, Hop, Kind, NextHop, new_microbatch, plan
from shoal.core.trainer.routing import BACKWARD_SIZE, EXTENSIONS, PATIENCE
from shoal.core.trainer.trainer import MOST_HOLDS, Trainer

ME = "me"


def a_view(number: int = 2, step: int = 0, stages: int = 2, owner: str = ME, without: str = "", epoch: int = 0) -> View:
    """Two replicas a, b of each stage, and me at stage 0 (`me`); one microbatch."""
    names = [ME] + [f"{letter}{stage}" for stage in range(stages) for letter in "ab"]
    members = tuple(Member(name, int(name[1:]) if name != ME else 0) for name in names if name != without)
    owners = tuple(at for at, member in enumerate(members) if member.peer == owner)
    return View(number=number, step=step, members=members, owners=owners, phase=Phase.TRAINING, epoch=epoch)


class Rig:
    """A trainer whose step has begun, with short ways to answer it."""

    def __init__(
        self, stages: int = 2, view: View | None = None, seconds: tuple[float, ...] = (), seed: int = 1
    ) -> None:
        self.now, self.serial = 0.0, 0
        self.trainer = Trainer(
            ME, Settings(stages=stages, microbatches=1, steps=9, stage_seconds=seconds), Random(seed)
        )
        self.trainer.leader = "boss"
        self.trainer.on_view(View(number=1, step=0, members=()), 0.0)
        self.out = self.trainer.on_view(view or a_view(stages=stages), 0.0)

    def read(self) -> list[Command]:
        (task,) = [command.task for command in self.out if isinstance(command, Do)]
        assert isinstance(task, Fetch)
        return self.keep(self.trainer.on_done(Done(task.id, Result()), self.now))

    def keep(self, commands: list[Command]) -> list[Command]:
        self.out = commands
        return commands

    def sent(self, form: type[Message]) -> Send:  # type: ignore[valid-type]
        (send,) = [c for c in self.out if isinstance(c, Send) and isinstance(c.message, form)]
        return send

    def say(self, peer: str, message: Message, blobs: int = 0, fault: str = "") -> list[Command]:
        self.serial += 1
        refs = tuple(BlobRef(f"r{self.serial}.{i}", 1) for i in range(blobs))
        return self.keep(self.trainer.on_message(peer, message, refs, fault, self.now))

    def answer(self, send: Send, form: type[Message], *more: object, blobs: int = 0, fault: str = "") -> list[Command]:  # type: ignore[valid-type]
        return self.say(send.peer, form(*ids(send), *more), blobs, fault)  # type: ignore[operator]

    def tick(self) -> list[Command]:
        """Time passes until something is due; a guessed deadline is looked at in between."""
        commands: list[Command] = []
        while not commands and self.trainer.deadline is not None and self.trainer.deadline > self.now:
            self.now = self.trainer.deadline
            commands = self.trainer.tick(self.now)
        return self.keep(commands)

    def overdue(self) -> list[Command]:
        """The hop's time is up, and its server says nothing when it is asked."""
        self.tick()
        assert self.sent(Query).message.attempt > 0  # type: ignore[union-attr]
        return self.tick()

    def at_last_backward(self) -> Send:
        self.read()
        self.answer(self.sent(Forward), Output)
        return self.sent(Backward)

    def at_first_hop(self, backward: bool) -> Send:
        if backward:
            return self.at_last_backward()
        self.read()
        return self.sent(Forward)


def ids(send: Send) -> tuple[int, int, int, int, int]:
    m = send.message
    return (m.epoch, m.step, m.index, m.stage, m.attempt)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("x", "g", "booked", "want"),
    [
        ("---", "---", "---", NextHop(Kind.FETCH)),
        ("x--", "---", "---", NextHop(Kind.FORWARD, 0)),
        ("xx-", "---", "---", NextHop(Kind.FORWARD, 1)),
        ("xxx", "---", "---", NextHop(Kind.BACKWARD, 2)),
        ("xxx", "-g-", "--b", NextHop(Kind.BACKWARD, 1)),
        ("xxx", "gg-", "-bb", NextHop(Kind.BACKWARD, 0)),
        ("xxx", "gg-", "bbb", NextHop(Kind.FINISHED)),
        ("xxx", "gg-", "bb-", NextHop(Kind.BACKWARD, 2)),  # a lost booking is redone alone
        ("xxx", "gg-", "b-b", NextHop(Kind.BACKWARD, 1)),
        ("---", "---", "bbb", NextHop(Kind.FINISHED)),  # adopted
        ("---", "---", "-bb", NextHop(Kind.FETCH)),
        ("x--", "---", "-bb", NextHop(Kind.RECALL, 1)),
        ("x--", "---", "--b", NextHop(Kind.FORWARD, 0)),
        ("xx-", "---", "--b", NextHop(Kind.RECALL, 2)),
    ],
)
def test_what_comes_next_follows_from_what_is_kept_and_booked(x: str, g: str, booked: str, want: NextHop) -> None:
    m = new_microbatch(0, [s.strip("-") for s in booked], a_view())
    m.x, m.g = [s.strip("-") for s in x], [s.strip("-") for s in g]
    assert plan(m) == want


def test_a_microbatch_goes_forward_then_backward_and_is_finished() -> None:
    rig = Rig()
    rig.read()
    forward = rig.sent(Forward)
    tokens = forward.blobs[0]
    rig.answer(forward, Output)
    last = rig.sent(Backward)
    assert last.message.stage == 1 and last.blobs == (tokens,)  # type: ignore[union-attr]
    rig.answer(last, Gradient)
    first = rig.sent(Backward)
    assert first.message.stage == 0 and first.blobs == (tokens,)  # type: ignore[union-attr]
    assert first.message.grad_from == (first.peer, last.peer)  # type: ignore[union-attr]
    assert rig.answer(first, Gradient) == []
    assert rig.trainer.summary().finished == 1 and rig.trainer.deadline is None
    assert rig.trainer.on_view(a_view(3, step=1), 1.0)[:1] == [Drop((tokens,))]


def test_the_backward_of_the_first_stage_goes_to_the_replica_of_its_forward_which_may_have_kept_it() -> None:
    for seed in range(4):
        rig = Rig(seed=seed)
        rig.read()
        forward = rig.sent(Forward)
        rig.answer(forward, Output)
        rig.answer(rig.sent(Backward), Gradient)
        assert rig.sent(Backward).peer == forward.peer


def test_with_one_stage_there_is_only_a_backward_of_the_tokens() -> None:
    rig = Rig(stages=1)
    rig.read()
    backward = rig.sent(Backward)
    assert len(backward.blobs) == 1
    rig.answer(backward, Gradient, 2.5)
    assert rig.trainer.summary().finished == 1


def test_no_more_than_inflight_are_in_progress_and_the_oldest_go_first() -> None:
    view = a_view()
    view = View(number=2, step=0, members=view.members, owners=(0,) * 9, phase=Phase.TRAINING)
    rig = Rig(view=view)
    assert [c.task.index for c in rig.out if isinstance(c, Do)] == [0, 1, 2, 3]  # type: ignore[union-attr]
    assert rig.trainer.summary().waiting == 5


def test_a_slow_forward_is_sent_elsewhere_and_its_late_output_is_credited_once() -> None:
    rig = Rig()
    rig.read()
    first = rig.sent(Forward)
    rig.overdue()
    second = rig.sent(Forward)
    assert second.peer != first.peer and second.message.attempt > first.message.attempt  # type: ignore[union-attr]
    rig.answer(first, Output)
    assert rig.sent(Backward).message.stage == 1  # type: ignore[union-attr]
    assert rig.answer(second, Output) == [] and rig.answer(first, Output) == []


def test_a_slow_backward_is_cancelled_and_goes_elsewhere_only_when_it_is_given_up() -> None:
    rig = Rig()
    backward = rig.at_last_backward()
    rig.overdue()
    cancel = rig.sent(Cancel)
    assert cancel.peer == backward.peer and cancel.message.attempt > backward.message.attempt  # type: ignore[union-attr]
    rig.tick()
    assert rig.sent(Cancel).peer == backward.peer, "repeated, and nothing else"
    assert not [c for c in rig.out if isinstance(c, Send) and isinstance(c.message, Backward)]
    rig.answer(cancel, Cancelled)
    assert rig.sent(Backward).peer != backward.peer


def test_a_cancelled_backward_that_was_done_is_booked_where_it_is() -> None:
    rig = Rig()
    rig.at_last_backward()
    rig.overdue()
    rig.answer(rig.sent(Cancel), Gradient)
    assert rig.sent(Backward).message.stage == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("backward", [False, True])
def test_a_hop_that_its_server_has_got_is_waited_for_once_more_where_the_usual_time_is_known(backward: bool) -> None:
    rig = Rig(seconds=(1.0, 1.0))
    hop = rig.at_first_hop(backward)
    began = rig.now
    rig.tick()
    patience_s = rig.now - began
    query = rig.sent(Query)
    assert (query.peer, query.message.backward) == (hop.peer, backward)  # type: ignore[union-attr]
    rig.answer(query, Pending)
    asked = rig.now
    rig.tick()
    assert rig.now - asked == pytest.approx(patience_s)
    again = rig.sent(Cancel if backward else Forward)
    assert (again.peer == hop.peer) is backward, "then it is slow, whatever it says"


@pytest.mark.parametrize("backward", [False, True])
def test_a_hop_that_its_server_has_got_is_waited_for_as_long_again_while_only_a_guess_says_how_long_it_takes(
    backward: bool,
) -> None:
    rig = Rig()
    hop = rig.at_first_hop(backward)
    began = rig.now
    for times in range(MOST_HOLDS):
        rig.tick()
        waited = rig.now - began
        rig.answer(rig.sent(Query), Pending)
        due = waited if times + 1 < MOST_HOLDS else rig.trainer._routes.patience(hop.peer, 2.5 if backward else 1.0)
        assert rig.trainer.deadline == pytest.approx(rig.now + due)
    assert rig.now - began > 500.0
    rig.tick()
    assert rig.sent(Cancel if backward else Forward), "then it is slow, whatever it says"


@pytest.mark.parametrize("backward", [False, True])
def test_a_hop_whose_input_is_on_its_way_is_waited_for_longer_and_not_for_ever(backward: bool) -> None:
    """Anybody else would get that tensor later, over the same line; whoever says so for ever is slow in the end."""
    rig = Rig(seconds=(1.0, 1.0))
    hop = rig.at_first_hop(backward)
    patience_s = rig.trainer._routes.patience(hop.peer, BACKWARD_SIZE if backward else 1.0)
    began = rig.now
    for _ in range(EXTENSIONS + 1):
        rig.tick()
        rig.answer(rig.sent(Query), Pending, True)
    rig.tick()
    assert rig.now - began == pytest.approx((2 + EXTENSIONS) * patience_s)
    assert rig.sent(Cancel if backward else Forward), "then it is slow, whatever it says"


def test_a_stage_is_known_by_two_answers() -> None:
    rig = Rig()
    routes = rig.trainer._routes
    routes.answered("a0", 80.0, 1.0, 0.0)
    assert not routes.knows("a0"), "the guess is the middle one still"
    routes.answered("b0", 80.0, 1.0, 0.0)
    assert routes.knows("a0") and routes.patience("a0", 1.0) == pytest.approx(320.0)


def test_a_hop_sent_on_a_guess_is_due_as_soon_as_its_stage_is_measured() -> None:
    rig = Rig()
    hop = rig.at_last_backward()
    began = rig.now
    for peer in ("a1", "b1"):
        rig.trainer._routes.answered(peer, 0.1, 1.0, rig.now)
    while not any(isinstance(one, Send) and isinstance(one.message, Query) for one in rig.tick()):
        pass
    assert rig.sent(Query).peer == hop.peer
    assert rig.now - began == pytest.approx(PATIENCE * BACKWARD_SIZE * 0.1), "not 10 s"


def test_a_server_that_says_for_ever_that_one_backward_is_pending_is_reported() -> None:
    """Whoever made its input is not to blame: a Cancel needs no tensor."""
    rig = Rig(seconds=(0.1, 0.1))
    server = rig.at_last_backward().peer
    complaints: list[Complaint] = []
    while rig.now < 30:
        for send in [one for one in rig.tick() if isinstance(one, Send)]:
            if isinstance(send.message, Complaint):
                complaints.append(send.message)
            elif isinstance(send.message, Query | Cancel):
                rig.answer(send, Pending)
    assert complaints and all(one.about == server and one.kind == "unreachable" for one in complaints)


def test_nobody_earns_time_by_saying_unasked_that_a_hop_is_pending() -> None:
    rig = Rig()
    rig.read()
    hop, due = rig.sent(Forward), rig.trainer.deadline
    for _ in range(3):
        rig.answer(hop, Pending)
    assert rig.trainer.deadline == due
    rig.tick()
    rig.say("b0" if hop.peer == "a0" else "a0", Pending(*ids(hop)))
    assert rig.trainer.deadline == pytest.approx(rig.now + 1.0), (
        "half of min_request_timeout_s for its server, and nobody else"
    )


def test_of_two_replicas_the_one_with_less_in_progress_is_asked() -> None:
    view = a_view()
    view = View(number=2, step=0, members=view.members, owners=(0,) * 4, phase=Phase.TRAINING)
    rig = Rig(view=view)
    fetches = [c.task for c in rig.out if isinstance(c, Do)]
    asked = []
    for fetch in fetches:
        rig.keep(rig.trainer.on_done(Done(fetch.id, Result()), rig.now))
        asked.append(rig.sent(Forward).peer)
    assert set(asked[:3]) == {"me", "a0", "b0"}, "nobody gets a second one while another has none"


def test_an_unreachable_peer_keeps_the_backward_it_may_have() -> None:
    rig = Rig()
    backward = rig.at_last_backward()
    commands = rig.trainer.on_unreachable(backward.peer, 0.1)
    assert not [c for c in commands if isinstance(c, Send) and isinstance(c.message, Backward)]


def test_an_unreachable_peer_loses_its_forward_at_once() -> None:
    rig = Rig()
    rig.read()
    first = rig.sent(Forward)
    rig.keep(rig.trainer.on_unreachable(first.peer, 0.1))
    assert rig.sent(Forward).peer != first.peer


def test_what_a_removed_peer_had_in_flight_is_sent_elsewhere() -> None:
    rig = Rig()
    backward = rig.at_last_backward()
    rig.keep(rig.trainer.on_view(a_view(3, without=backward.peer), 0.1))
    assert rig.sent(Backward).peer != backward.peer


def test_what_a_removed_peer_had_booked_is_redone_alone_from_kept_blobs() -> None:
    rig = Rig()
    last = rig.at_last_backward()
    rig.answer(last, Gradient)
    rig.answer(rig.sent(Backward), Gradient)
    assert rig.trainer.summary().finished == 1
    rig.keep(rig.trainer.on_view(a_view(3, without=last.peer), 0.1))
    again = rig.sent(Backward)
    assert again.message.stage == 1 and again.blobs == last.blobs  # type: ignore[union-attr]
    assert rig.answer(again, Gradient) == []
    assert rig.trainer.summary().finished == 1


@pytest.mark.parametrize("form", [Busy, Refused])
def test_a_declined_backward_goes_elsewhere(form: type[Message]) -> None:  # type: ignore[valid-type]
    rig = Rig()
    backward = rig.at_last_backward()
    rig.answer(backward, form, True, 1.0 if form is Busy else "not mine")
    assert rig.sent(Backward).peer != backward.peer


def test_busy_about_a_cancel_says_nothing_about_the_backward() -> None:
    rig = Rig()
    rig.at_last_backward()
    rig.overdue()
    assert rig.answer(rig.sent(Cancel), Busy, True, 1.0) == []


def test_when_all_are_busy_it_waits_for_the_first_to_wake() -> None:
    rig = Rig()
    rig.answer(rig.at_last_backward(), Busy, True, 3.0)
    assert rig.answer(rig.sent(Backward), Busy, True, 1.0) == []
    assert rig.trainer.deadline is not None and 1.0 <= rig.trainer.deadline <= 1.25
    rig.tick()
    assert rig.sent(Backward).message.stage == 1  # type: ignore[union-attr]


def test_a_stale_answer_changes_nothing() -> None:
    rig = Rig()
    first = rig.at_last_backward()
    rig.answer(first, Busy, True, 0.1)
    second = rig.sent(Backward)
    epoch, step, index, stage, attempt = ids(second)
    assert rig.answer(first, Gradient) == [], "of an attempt that was declined"
    assert rig.answer(first, Cancelled) == []
    assert rig.answer(first, Refused, True, "late") == []
    stale = [
        (second.peer, Gradient(epoch, step, index, stage, attempt - 1)),
        (second.peer, Gradient(epoch, step, index, stage, attempt + 1)),
        (second.peer, Gradient(epoch, step, index, stage - 1, attempt)),
        (second.peer, Gradient(epoch, step + 1, index, stage, attempt)),
        (second.peer, Gradient(epoch + 1, step, index, stage, attempt)),
        (second.peer, Gradient(epoch, step, index + 1, stage, attempt)),
        (second.peer, Output(epoch, step, index, stage, attempt)),
        (first.peer, Gradient(epoch, step, index, stage, attempt)),
        ("stranger", Gradient(epoch, step, index, stage, attempt)),
        (second.peer, Cancelled(epoch, step, index, stage, attempt - 1)),
        (second.peer, Busy(epoch, step, index, stage, attempt - 1, True, 0.1)),
    ]
    for peer, message in stale:
        commands = rig.say(peer, message, blobs=1)
        assert commands == [Drop((f"r{rig.serial}.0",))], message
    rig.answer(second, Gradient)
    assert rig.sent(Backward).message.stage == 0  # type: ignore[union-attr]


def test_a_faulty_output_is_complained_of_and_the_forward_goes_elsewhere() -> None:
    rig = Rig()
    rig.read()
    forward = rig.sent(Forward)
    rig.answer(forward, Output, blobs=1, fault="shape (1, 2)")
    assert rig.sent(Complaint).peer == "boss"
    assert rig.sent(Complaint).message.about == forward.peer  # type: ignore[union-attr]
    assert rig.sent(Forward).peer != forward.peer
    assert Drop(("r1.0",)) in rig.out


def test_a_faulty_gradient_is_booked_and_recalled_until_it_is_whole() -> None:
    rig = Rig()
    backward = rig.at_last_backward()
    rig.answer(backward, Gradient, blobs=1, fault="non-finite values")
    assert rig.sent(Complaint).message.about == backward.peer  # type: ignore[union-attr]
    rig.tick()
    recall = rig.sent(Recall)
    assert recall.peer == backward.peer and recall.message.stage == 1  # type: ignore[union-attr]
    rig.answer(recall, Gradient, blobs=1, fault="non-finite values")
    assert rig.sent(Complaint)
    rig.tick()
    rig.answer(rig.sent(Recall), Gradient)
    assert rig.sent(Backward).message.stage == 0  # type: ignore[union-attr]


def test_a_recall_of_nothing_means_that_the_booking_is_gone() -> None:
    rig = Rig()
    rig.answer(rig.at_last_backward(), Gradient, blobs=1, fault="non-finite values")
    rig.tick()
    rig.answer(rig.sent(Recall), Cancelled)
    assert rig.sent(Backward).message.stage == 1  # type: ignore[union-attr]


def test_a_failing_sole_replica_is_retried_with_growing_pauses() -> None:
    view = View(number=2, step=0, members=(Member(ME, 0), Member("a1", 1)), owners=(0,), phase=Phase.TRAINING)
    rig = Rig(view=view)
    rig.at_last_backward()
    times = []
    for _ in range(10):
        if not any(isinstance(c, Send) and isinstance(c.message, Backward) for c in rig.out):
            rig.tick()
        times.append(rig.now)
        rig.answer(rig.sent(Backward), Refused, True, "broken")
    gaps = [after - before for before, after in pairwise(times)]
    assert gaps == sorted(gaps) and gaps[-1] == 2.0


def test_an_unreadable_microbatch_is_read_again() -> None:
    rig = Rig()
    (task,) = [command.task for command in rig.out if isinstance(command, Do)]
    rig.trainer.on_failed(Failed(task.id, "disk"), 0.0)
    assert [type(command) for command in rig.tick()] == [Do]


def test_a_microbatch_read_for_a_step_that_is_over_is_dropped() -> None:
    rig = Rig()
    (task,) = [command.task for command in rig.out if isinstance(command, Do)]
    assert isinstance(task, Fetch)
    rig.trainer.on_view(a_view(3, step=1), 1.0)
    assert rig.trainer.on_done(Done(task.id, Result()), 1.0) == [Drop((task.out,))]


def test_a_peer_that_answers_nothing_is_reported() -> None:
    rig = Rig()
    silent = rig.at_last_backward().peer
    complaints: list[Complaint] = []
    while rig.now < 60:
        complaints += [c.message for c in rig.tick() if isinstance(c, Send) and isinstance(c.message, Complaint)]
    assert 2 <= len(complaints) <= 6
    assert all(complaint.about == silent and complaint.kind == "unreachable" for complaint in complaints)


def test_an_empty_stage_is_waited_for() -> None:
    members = (Member(ME, 0), Member("a0", 0))
    rig = Rig(view=View(number=2, step=0, members=members, owners=(0,), phase=Phase.TRAINING))
    rig.read()
    assert rig.answer(rig.sent(Forward), Output) == []
    assert rig.trainer.deadline is None
    view = View(number=3, step=0, members=(*members, Member("a1", 1)), owners=(0,), phase=Phase.TRAINING)
    rig.keep(rig.trainer.on_view(view, 5.0))
    assert rig.sent(Backward).peer == "a1"


def test_a_peer_put_out_while_it_waits_forgets_what_it_waited_for() -> None:
    rig = Rig()
    rig.answer(rig.at_last_backward(), Busy, True, 3.0)
    rig.answer(rig.sent(Backward), Busy, True, 1.0)
    assert [type(command) for command in rig.trainer.on_view(a_view(3, owner="a0", without=ME), 0.1)] == [Drop]
    assert rig.trainer.tick(9.0) == [] and rig.trainer.on_view(a_view(4, owner="a0", without=ME), 9.0) == []


def test_a_peer_put_out_while_it_reads_drops_what_it_read() -> None:
    rig = Rig()
    (task,) = [command.task for command in rig.out if isinstance(command, Do)]
    rig.trainer.on_view(a_view(3, owner="a0", without=ME), 0.1)
    assert rig.trainer.on_done(Done(task.id, Result()), 0.2) == [Drop((f"{task.id}/x",))]
    assert rig.trainer.on_failed(Failed(task.id, "disk"), 0.2) == []


def a_heir(number: int = 3) -> Rig:
    """b0 owned the microbatch and has been removed."""
    rig = Rig(view=a_view(owner="b0"))
    assert rig.out == []
    rig.keep(rig.trainer.on_view(a_view(number, without="b0"), 0.0))
    return rig


def test_an_heir_asks_everybody_and_goes_on_from_what_is_booked() -> None:
    rig = a_heir()
    asked = [c.peer for c in rig.out if isinstance(c, Send) and c.message == BooksRequest(0, 0, 3)]
    assert asked == [ME, "a0", "a1", "b1"]
    for peer in (ME, "a0", "b1"):
        assert rig.say(peer, Books(0, 0, 3, int(peer[1:]) if peer != ME else 0, ())) == []
    assert rig.trainer.summary().waiting == 1
    rig.say("a1", Books(0, 0, 3, 1, (0,)))
    rig.read()
    recall = rig.sent(Recall)
    assert recall.peer == "a1" and recall.message.stage == 1  # type: ignore[union-attr]
    rig.answer(recall, Gradient)
    assert rig.sent(Backward).message.stage == 0  # type: ignore[union-attr]


def test_books_of_an_older_view_do_not_count() -> None:
    rig = a_heir()
    for peer in (ME, "a0", "b1", "a1"):
        rig.say(peer, Books(0, 0, 2, int(peer[1:]) if peer != ME else 0, ()))
    assert rig.out == [] and rig.trainer.summary().waiting == 1


def test_books_are_asked_for_again_until_everybody_has_answered_or_left() -> None:
    rig = a_heir()
    for peer in (ME, "a0", "a1"):
        rig.say(peer, Books(0, 0, 3, int(peer[1:]) if peer != ME else 0, ()))
    assert [c.peer for c in rig.tick() if isinstance(c, Send)] == ["b1"]
    assert [c.peer for c in rig.tick() if isinstance(c, Send)] == ["b1"]
    members = tuple(member for member in a_view(without="b0").members if member.peer != "b1")
    view = View(number=4, step=0, members=members, owners=(0,), phase=Phase.TRAINING)
    assert [type(command) for command in rig.trainer.on_view(view, rig.now)] == [Do]


def test_a_peer_that_never_shows_its_books_is_reported() -> None:
    rig = a_heir()
    for peer in (ME, "a0", "a1"):
        rig.say(peer, Books(0, 0, 3, int(peer[1:]) if peer != ME else 0, ()))
    complaints: list[Complaint] = []
    while rig.now < 30:
        complaints += [c.message for c in rig.tick() if isinstance(c, Send) and isinstance(c.message, Complaint)]
    assert complaints and all(complaint.about == "b1" and complaint.kind == "unreachable" for complaint in complaints)


def test_an_heirs_attempts_are_newer_than_those_of_any_owner_before() -> None:
    rig = Rig()
    attempt = rig.at_last_backward().message.attempt  # type: ignore[union-attr]
    assert new_microbatch(0, ["", ""], a_view(3)).attempt > attempt + 1000


def test_who_missed_the_beginning_of_a_step_asks_for_books() -> None:
    rig = Rig()
    rig.keep(rig.trainer.on_view(a_view(5, step=1), 1.0))
    assert [c.peer for c in rig.out if isinstance(c, Send)] == [ME, "a0", "b0", "a1", "b1"]


def test_who_saw_the_beginning_of_a_step_does_not() -> None:
    rig = Rig()
    rig.keep(rig.trainer.on_view(a_view(3, step=1), 1.0))
    assert [type(command) for command in rig.out] == [Do]


@pytest.mark.parametrize("change", [a_view(3, epoch=1), View(number=2, step=0, members=()), a_view(3, owner="a0")])
def test_nothing_is_left_after_a_rollback_a_removal_or_a_lost_ownership(change: View) -> None:
    rig = Rig()
    backward = rig.at_last_backward()
    commands = rig.trainer.on_view(change, 0.1)
    dropped = [blob for command in commands if isinstance(command, Drop) for blob in command.blobs]
    assert set(dropped) == set(backward.blobs)
    assert rig.answer(backward, Gradient) == []
    if change.epoch == 0:
        assert rig.trainer.deadline is None and rig.trainer.summary().inflight == 0


# --------------------------------------------------------------------------------------------------- what the leader asks


def asks(rig: Rig, index: int = 0, stage: int = 1, step: int = 0, epoch: int = 0) -> list[Booker]:
    commands = rig.trainer.on_who_booked("boss", BookerRequest(epoch, step, index, stage), 0.0)
    assert all(isinstance(one, Send) and one.peer == "boss" for one in commands)
    return [one.message for one in commands if isinstance(one, Send) and isinstance(one.message, Booker)]


def test_the_leader_is_told_who_has_booked_a_microbatch_and_who_it_waits_for() -> None:
    rig = Rig()
    assert asks(rig) == [Booker(0, 0, 0, 1)], "its tokens are being read"
    backward = rig.at_last_backward()
    assert asks(rig) == [Booker(0, 0, 0, 1, at=backward.peer)]
    rig.answer(backward, Gradient)
    last = rig.sent(Backward)
    assert asks(rig) == [Booker(0, 0, 0, 1, peer=backward.peer, at=last.peer)]
    assert asks(rig, stage=0) == [Booker(0, 0, 0, 0, at=last.peer)]
    rig.answer(last, Gradient)
    assert asks(rig, stage=0) == [Booker(0, 0, 0, 0, peer=last.peer)]


def test_whoever_is_asked_asks_its_server_once_for_the_request_may_be_lost() -> None:
    rig = Rig()
    backward = rig.at_last_backward()
    asked, long_s = BookerRequest(0, 0, 0, 1), rig.trainer._settings.min_request_timeout_s
    hop = rig.trainer._owned.held[0].hop
    assert hop is not None
    early, late, again = (
        rig.trainer.on_who_booked("boss", asked, hop.sent + after_s) for after_s in (0.0, long_s, long_s)
    )
    assert [one.peer for one in early + again if isinstance(one, Send)] == ["boss", "boss"]
    answer, query = late
    assert isinstance(answer, Send) and isinstance(query, Send) and isinstance(query.message, Query)
    assert query.peer == backward.peer and query.message.attempt == ids(backward)[-1]
    rig.out.clear()
    rig.tick()
    assert rig.sent(Cancel).peer == backward.peer, "it has not got it"


def test_what_is_not_mine_or_of_another_time_is_not_answered() -> None:
    rig = Rig()
    for changes in ({"index": 1}, {"step": 1}, {"epoch": 1}, {"stage": 2}, {"stage": 4095}):
        assert asks(rig, **changes) == []


def test_the_leader_is_told_how_many_servers_did_not_answer() -> None:
    rig = Rig()
    rig.read()
    for slow in range(1, 4):
        rig.overdue()
        (questions,) = asks(rig)
        assert (questions.peer, questions.at, questions.slow) == ("", rig.sent(Forward).peer, slow)
    rig.answer(rig.sent(Forward), Output)
    (questions,) = asks(rig)
    assert questions.slow == 0, "it got on"


def test_an_heir_that_lacks_somebodys_books_says_whose() -> None:
    rig = Rig(view=a_view(owner="a0"))
    rig.keep(rig.trainer.on_view(a_view(number=3), 0.0))
    asked = [
        command.peer for command in rig.out if isinstance(command, Send) and isinstance(command.message, BooksRequest)
    ]
    for peer in asked:
        (questions,) = asks(rig)
        assert (questions.peer, questions.at) == ("", peer)
        rig.say(peer, Books(0, 0, 3, int(peer[1:]) if peer != ME else 0, ()))
    assert asks(rig) == [Booker(0, 0, 0, 1)]


def test_whoever_has_not_given_twice_what_it_holds_is_in_the_way_and_not_who_was_asked_for_it() -> None:
    m = new_microbatch(0, ["", "", ""], a_view(stages=3))
    m.hop = Hop(Kind.BACKWARD, 2, "a2", 0.0)
    assert m.waits_for == "a2"
    for by in ("a2", "a2", "c2"):
        m.x[2] = ("b1",)
        m.forget_holders(2, gradient=False, by=by)
        assert m.waits_for == ("a2" if by == "a2" else "b1"), "one that cannot get it may be the one at fault"
    m.g[1] = ("b2",)
    m.forget_holders(1, gradient=True, by="a1")
    assert m.lost == {"b1": ["a2", "a2", "c2"], "b2": ["a1"]} and m.waits_for == "b1"


def test_whoever_does_not_give_it_to_the_only_one_that_asks_is_in_the_way_after_several_times() -> None:
    m = new_microbatch(0, ["", "", ""], a_view(stages=3))
    m.hop = Hop(Kind.BACKWARD, 2, "a2", 0.0)
    for times in range(1, LOST_TO_ONE + 1):
        m.x[2] = ("b1",)
        m.forget_holders(2, gradient=False, by="a2")
        assert m.waits_for == ("b1" if times == LOST_TO_ONE else "a2")

"""Delayed updates: what the leader opens and closes, and what a replica does with two steps at once."""

from __future__ import annotations

import msgspec
from tests.core.test_leader import SETTINGS, LeaderRig
from tests.core.test_server import ME, MEMBERS, OTHER, OWNER, Play, a_view
from tests.core.test_server import SETTINGS as SERVED

from shoal.core.messages import (
    Add,
    Apply,
    Booking,
    Books,
    BooksRequest,
    Busy,
    Committed,
    Cut,
    Fetch,
    Gather,
    GatherChunk,
    Gradient,
    Leave,
    Member,
    Phase,
    ReduceChunk,
    Reduced,
    Reset,
    Round,
    RunBackward,
    RunForward,
    Share,
    View,
)
from shoal.core.trainer.trainer import Trainer

LATE = msgspec.structs.replace(SETTINGS, staleness=1, steps=6)


def a_leader() -> LeaderRig:
    """One whose first step is computed, and closed."""
    leader = LeaderRig(LATE)
    leader.start()
    leader.fill_books()
    return leader


def closed(leader: LeaderRig, peer: str, books: tuple[int, ...], before: tuple[int, ...]) -> None:
    """That peer's heartbeat from the middle of the next step."""
    leader.heartbeat(peer, books, closed=tuple(Booking(i, 2.0) for i in before))


def go_on(leader: LeaderRig) -> None:
    """The next step is computed while the one before is averaged."""
    closed(leader, "a", (0, 2), (0, 2))
    closed(leader, "c", (1, 3), (1, 3))
    closed(leader, "b", (0, 1, 2, 3), (0, 1, 2, 3))


# ---------------------------------------------------------------------------------------------------------- the leader


def test_whole_books_open_the_next_step_and_then_they_are_averaged() -> None:
    leader = a_leader()
    view = leader.view
    assert (view.step, view.work, view.ahead, view.begun, view.since) == (0, 1, True, True, view.number)
    (round_,) = leader.rounds()
    assert (round_.step, round_.view) == (0, view.number)
    assert view.account.issued == 8 and view.account.committed == 0


def test_without_delay_nothing_is_opened_before_the_commit() -> None:
    leader = LeaderRig()
    leader.start()
    leader.fill_books()
    assert leader.rounds() and not leader.view.ahead and leader.view.account.issued == 4


def test_a_commit_leaves_the_step_under_way_as_it_is() -> None:
    leader = a_leader()
    before = leader.view
    closed(leader, "a", (0,), (0, 2))
    leader.reduce()
    view = leader.view
    assert (view.step, view.work, view.ahead, view.begun) == (1, 1, False, False)
    assert (view.owners, view.since) == (before.owners, before.since)
    assert view.account.issued == 8 and view.account.committed == 4
    closed(leader, "a", (0, 2), ())
    closed(leader, "c", (1, 3), ())
    assert leader.view.work == 1
    closed(leader, "b", (0, 1, 2, 3), ())
    assert leader.view.work == 2 and leader.rounds()[-1].step == 1


def test_the_next_step_but_one_waits_for_the_commit() -> None:
    leader = a_leader()
    go_on(leader)
    assert leader.view.work == 1 and len(leader.rounds()) == 1
    leader.reduce()
    assert (leader.view.step, leader.view.work) == (1, 2)  # both at once: its books were whole


def test_a_joiner_with_another_state_is_found_while_a_round_is_open() -> None:
    """As one is nearly always, it stayed a joiner for 25 steps, and its donors made no newer copy for the next, which was evicted."""
    leader = LeaderRig(LATE)
    leader.start()
    leader.join("d")
    leader.fill_books()
    assert leader.view.ahead and [one.peer for one in leader.view.joining] == ["d"]
    leader.heartbeat("d", digest="made up")
    leader.wait(1.0, alive=("b", "c"))
    assert not leader.view.joining and "d came with another state" in leader.reasons
    assert leader.rounds()[-1].step == leader.view.step == 0, "the round goes on"


def a_death() -> LeaderRig:
    """c dies with two bookings of the averaged step and one of the next."""
    leader = a_leader()
    closed(leader, "c", (1,), (1, 3))
    for _ in range(10):
        leader.now += 0.5
        closed(leader, "a", (0,), (0, 2))
        closed(leader, "b", (0, 1), (0, 1, 2, 3))
    return leader


def test_what_the_dead_brought_into_both_steps_is_redone_and_the_others_keep_theirs() -> None:
    leader = a_death()
    view = leader.view
    assert [member.peer for member in view.members] == ["a", "b"] and "step 0 is opened again" in leader.reasons
    assert (view.work, view.ahead, view.begun, [m.peer for m in view.fenced]) == (0, False, True, ["c"])
    assert view.account.redone == 3 and view.account.issued == 8
    asked = len(leader.rounds())
    leader.heartbeat("a", (0, 2, 1, 3))
    view = leader.view
    assert (view.work, view.ahead, view.since) == (1, True, view.number) and view.account.issued == 8
    assert len(leader.rounds()) == asked + 1
    shares = [[(share.peer, share.indices) for share in group] for group in leader.rounds()[-1].groups]
    assert shares == [[("a", (0, 2, 1, 3))], [("b", (0, 1, 2, 3))]]
    leader.reduce()
    assert [member.peer for member in leader.view.fenced] == ["c"]  # its books of the step under way are void
    closed(leader, "a", (0, 1, 2, 3), ())
    closed(leader, "b", (0, 1, 2, 3), ())
    assert (leader.view.step, leader.view.ahead) == (1, False)  # this one is committed before the next begins
    leader.reduce()
    assert (leader.view.step, leader.view.fenced) == (2, ())


def test_whoever_brings_nothing_into_the_average_may_die_without_opening_the_step_again() -> None:
    leader = LeaderRig(LATE)
    leader.start()
    leader.heartbeat("a", (0, 1, 2, 3))
    leader.heartbeat("b", (0, 1, 2, 3))
    assert leader.view.ahead
    for _ in range(10):
        leader.now += 0.5
        closed(leader, "a", (), (0, 1, 2, 3))
        closed(leader, "b", (), (0, 1, 2, 3))
    assert [member.peer for member in leader.view.members] == ["a", "b"] and leader.view.ahead
    assert leader.rounds()[-1].round > leader.rounds()[0].round  # without the one that died


def test_the_step_is_committed_first_where_somebody_wants_to_leave() -> None:
    leader = LeaderRig(LATE)
    leader.start()
    leader.hear("c", Leave(reason="drained"))
    leader.fill_books()
    assert not leader.view.ahead and len(leader.rounds()) == 1
    leader.reduce()
    assert [member.peer for member in leader.view.members] == ["a", "b"] and leader.view.step == 1


def test_nobody_leaves_in_the_middle_of_a_step() -> None:
    leader = a_leader()
    leader.hear("c", Leave(reason="drained"))
    leader.reduce()
    assert leader.view.step == 1 and len(leader.view.members) == 3


def test_after_the_last_step_there_is_none_to_open() -> None:
    leader = LeaderRig(msgspec.structs.replace(LATE, steps=1))
    leader.start()
    leader.fill_books()
    assert not leader.view.ahead and leader.rounds()


def test_a_new_leader_learns_both_steps_books_from_the_heartbeats() -> None:
    leader = a_leader()
    leader.machine.lead(leader.view, 2, leader.now)
    asked = len(leader.rounds())
    closed(leader, "a", (0,), (0, 2))
    closed(leader, "c", (), (1, 3))
    assert len(leader.rounds()) == asked
    closed(leader, "b", (), (0, 1, 2, 3))
    assert len(leader.rounds()) == asked + 1 and leader.view.work == 1


# ---------------------------------------------------------------------------------------------------------- a replica


def ahead(number: int = 2, **changes: object) -> View:
    return a_view(number, **{"phase": Phase.OVERLAPPING, "since": number, **changes})


def a_replica() -> Play:
    """Its books of step 0 are 0 and 1; step 1 is open."""
    play = Play(msgspec.structs.replace(SERVED, staleness=1))
    play.book(0, 1)
    play.view(ahead())
    return play


GROUPS = ((Share(OWNER, (0, 1, 2, 3)),), (Share(ME, (0, 1)), Share("replica", (2, 3))))


def test_a_hop_of_the_next_step_runs_while_the_sum_of_the_one_before_is_cut() -> None:
    play = a_replica()
    play.hear(OWNER, Round(0, 0, 5, 2, GROUPS))
    cut = play.task(Cut)
    play.backward(0, 3 << 20, step=1, view=2)
    assert play.task(RunBackward).step == 1
    play.done(play.task(RunBackward), loss=1.0)
    assert [booking.index for booking in play.server.books] == [0]
    assert [booking.index for booking in play.server.closed] == [0, 1]
    play.done(cut)
    assert play.server.work == 1


def a_commit() -> Committed:
    return Committed(0, 5, 1.0, 1.0, ("x", "sum"), GROUPS)


def test_a_commit_is_applied_beside_the_step_under_way() -> None:
    play = a_replica()
    play.hear(OWNER, Round(0, 0, 5, 2, ((Share(OWNER, (0, 1, 2, 3)),), (Share(ME, (0, 1, 2, 3)),))))
    assert not play.sends(Reduced)  # I booked two of them only
    play = Play(msgspec.structs.replace(SERVED, staleness=1), view=a_view(members=MEMBERS[:3]))
    play.book(0, 1, 2, 3)
    play.view(ahead(members=MEMBERS[:3]))
    groups = (GROUPS[0], (Share(ME, (0, 1, 2, 3)),))
    play.hear(OWNER, Round(0, 0, 5, 2, groups))
    play.done(play.task(Cut))
    play.done(play.task(Gather), digest="sum", norm_sq=1.0)
    play.backward(0, 3 << 20, step=1, view=2)
    running = play.task(RunBackward)
    play.forward(2, 3 << 20, step=1, view=2)
    last = Committed(0, 5, 1.0, 1.0, ("x", "sum"), groups)
    play.view(a_view(3, members=MEMBERS[:3], step=1, last=last, since=2))
    applying = play.task(Apply)
    play.done(running, loss=1.0)  # booked, and the next hop runs before the optimizer has
    assert [booking.index for booking in play.server.books] == [0] and play.task(RunForward).step == 1
    assert not play.server.ready
    play.done(applying, digest="d1")
    assert (play.server.step, play.server.ready, len(play.server.books)) == (1, True, 1)


def test_a_part_of_the_next_round_that_overtakes_its_view_is_kept_for_it() -> None:
    play = a_replica()
    play.hear(OWNER, Round(0, 0, 5, 2, GROUPS))
    play.done(play.task(Cut))
    play.hear("replica", ReduceChunk(0, 0, 5, 0), 1)
    play.done(play.task(Add))
    play.hear("replica", GatherChunk(0, 0, 5, 1), 1)
    play.done(play.task(Gather), digest="sum", norm_sq=1.0)
    play.backward(0, 3 << 20, step=1, view=2)
    play.done(play.task(RunBackward), loss=1.0)
    (early,) = play.hear("replica", ReduceChunk(0, 1, 6, 0), 1)  # the other replica has seen the commit
    (later,) = play.hear("replica", ReduceChunk(0, 2, 7, 0), 1)
    assert play.dropped() == [later]  # nobody can be two steps ahead
    play.view(a_view(3, step=1, last=a_commit(), since=2))
    play.done(play.task(Apply), digest="d1")
    play.view(ahead(4, step=1, last=a_commit(), since=4))
    play.hear(OWNER, Round(0, 1, 6, 4, (GROUPS[0], (Share(ME, (0,)), Share("replica", (1, 2, 3))))))
    play.done(play.task(Cut))
    assert play.task(Add).parts[1] == early


def test_what_is_opened_again_takes_nothing_that_was_sent_before() -> None:
    play = a_replica()
    again = a_view(3, phase=Phase.REOPENED, since=3)
    play.view(again)
    play.backward(2, 1)  # of the first time, and late
    assert not play.tasks() and not play.sends(Busy)
    play.backward(2, 3 << 20, view=3)
    assert play.task(RunBackward).step == 0
    play.done(play.task(RunBackward), loss=1.0)
    assert [booking.index for booking in play.server.books] == [0, 1, 2]


def test_the_books_of_the_step_under_way_outlive_the_one_that_is_opened_again() -> None:
    play = a_replica()
    play.backward(0, 3 << 20, step=1, view=2)
    running = play.task(RunBackward)
    play.backward(2, 3 << 20, step=1, view=2)  # waits
    play.view(a_view(3, phase=Phase.REOPENED, since=3))
    play.done(running, loss=1.0)  # it is in the sum of step 1, so it is in its books
    assert [booking.index for booking in play.server.books] == [0, 1] and not play.tasks()
    play.hear(OTHER, BooksRequest(0, 0, 3))
    assert play.sends(Books)[0][1].indices == (0, 1)
    play.view(ahead(4, since=4))
    assert [booking.index for booking in play.server.books] == [0]
    play.hear(OTHER, BooksRequest(0, 1, 4))
    assert play.sends(Books)[0][1] == Books(0, 1, 4, 1, (0,)), "of the step that was asked for, or nobody hears it"
    play.backward(0, 5 << 20, step=1, view=4)
    assert not play.tasks() and [message.attempt for _, message, _ in play.sends(Gradient)] == [5 << 20]


def test_books_are_not_told_while_a_former_owners_backward_runs() -> None:
    play = a_replica()
    play.backward(0, 3 << 20, step=1, view=2)
    running = play.task(RunBackward)
    play.view(a_view(3, phase=Phase.REOPENED, since=3))
    play.view(ahead(4, since=4))
    play.hear(OTHER, BooksRequest(0, 1, 4))
    assert not play.sends(Books)
    play.done(running, loss=1.0)
    assert play.sends(Books)[0][1].indices == (0,)


def test_a_peer_that_is_put_out_in_the_middle_empties_both_sums() -> None:
    play = a_replica()
    play.backward(0, 3 << 20, step=1, view=2)
    play.done(play.task(RunBackward), loss=1.0)
    others = tuple(member for member in MEMBERS if member.peer != ME)
    play.view(ahead(3, since=2, members=others, joining=(Member(ME, 1, back=True),)))
    assert play.task(Reset)
    assert not play.server.books and not play.server.closed


# ---------------------------------------------------------------------------------------------------------- an owner


def test_an_owner_that_goes_on_with_a_step_asks_what_of_it_is_booked() -> None:
    class Never:
        def random(self) -> float:
            return 0.5

    trainer = Trainer(OWNER, msgspec.structs.replace(SERVED, staleness=1), Never())

    def asked(view: View) -> tuple[set[int], list[int]]:
        commands = trainer.on_view(view, 0.0)
        books = {c.message.step for c in commands if hasattr(c, "message") and isinstance(c.message, BooksRequest)}
        return books, [c.task.step for c in commands if hasattr(c, "task") and isinstance(c.task, Fetch)]

    trainer.on_view(a_view(1, phase=Phase.GATHERING), 0.0)
    assert asked(a_view(2)) == (set(), [0, 0])
    assert asked(ahead(3)) == (set(), [1, 1])
    assert asked(a_view(4, step=1, since=3)) == (set(), [])  # the commit changes nothing
    assert asked(ahead(5, step=1)) == (set(), [2, 2])
    assert asked(a_view(6, step=1, phase=Phase.REOPENED, since=6)) == ({1}, [])
    assert asked(ahead(7, step=1, since=7)) == ({2}, [])

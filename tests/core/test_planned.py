"""Planned wiring: who has which seat, whom the plan wants for a hop, and when the stochastic rule decides instead."""

from __future__ import annotations

import random
from collections import Counter
from random import Random

import msgspec
import pytest

from shoal.core.consensus.register import Register
from shoal.core.leader.leader import Leader
from shoal.core.leader.membership import owners_of
from shoal.core.messages import (
    Accept,
    Done,
    Fetch,
    Forward,
    Join,
    Member,
    Note,
    Phase,
    Result,
    Send,
    Settings,
    Signed,
    View,
)
from shoal.core.planned import Planned, complete, planned_stage
from shoal.core.trainer.routing import Routes
from shoal.core.trainer.trainer import Trainer

# Two stages of two seats each; seat 0's microbatches take seat 0, then seats 2, 2, 3 in turn; seat 1 has its own way.
SETTINGS = Settings(
    stages=2,
    microbatches=8,
    steps=9,
    ban_s=10.0,
    seats=(0, 0, 1, 1),
    routes=(((0,), (2, 2, 3)), ((1,), (3,)), ((0,), (2,)), ((1,), (3,))),
)
MEMBERS = tuple(
    Member(peer, stage, seat=seat) for seat, (peer, stage) in enumerate(zip("abcd", (0, 0, 1, 1), strict=True))
)


def some_routes(members: tuple[Member, ...] = MEMBERS) -> Routes:
    routes = Routes(SETTINGS, Random(0))
    routes.on_view(members, 0.0)
    return routes


def test_an_owners_microbatches_take_its_seats_in_turn() -> None:
    planned = Planned("a", SETTINGS)
    assert planned.on_view(MEMBERS) == []
    mine = range(0, 24, 4)  # of four owners, the first
    assert [planned.peer(1, index) for index in mine] == ["c", "c", "d", "c", "c", "d"]
    assert {planned.peer(0, index) for index in mine} == {"a"}


def test_who_has_no_seat_has_no_planned_peers() -> None:
    planned = Planned("late", SETTINGS)
    planned.on_view((*MEMBERS, Member("late", 1)))
    assert planned.peer(1, 0) == ""
    nobody = Planned("a", msgspec.structs.replace(SETTINGS, seats=(), routes=()))
    nobody.on_view(MEMBERS)
    assert nobody.peer(0, 0) == ""


def test_an_empty_seat_is_told_once_and_wanted_no_longer() -> None:
    planned = Planned("a", SETTINGS)
    planned.on_view(MEMBERS)
    (text,) = planned.on_view(MEMBERS[:2] + MEMBERS[3:])
    assert "nobody holds seat 2 of the plan" in text and "stage 1" in text
    assert planned.on_view(MEMBERS[:2] + MEMBERS[3:]) == []
    assert [planned.peer(1, index) for index in (0, 4, 8)] == ["", "", "d"]


def test_a_peer_that_was_moved_to_another_stage_holds_its_seat_no_longer() -> None:
    planned = Planned("a", SETTINGS)
    planned.on_view((*MEMBERS[:2], Member("c", 0, seat=2), MEMBERS[3]))
    assert planned.peer(1, 0) == ""


def test_the_planned_peer_is_taken_however_slow_its_way_is() -> None:
    routes = some_routes()
    for _ in range(50):
        choice = routes.choose(1, 0.0, planned="c")
        assert choice == ("c", "as planned")
        routes.answered("c", 3.0, 1.0, 0.0)
        routes.answered("d", 0.1, 1.0, 0.0)


def test_a_planned_peer_that_fails_waits_or_leaves_is_passed_over_with_a_reason() -> None:
    routes = some_routes()
    routes.busy("c", 5.0, 1.0, 0.0)
    choice = routes.choose(1, 0.0, planned="c")
    assert choice is not None and choice[0] == "d" and choice[1].startswith("its queue is full for ")
    assert routes.choose(1, 10.0, planned="c") == ("c", "as planned")
    routes.failed("c", 10.0)
    choice = routes.choose(1, 10.1, planned="c")
    assert choice is not None and choice[0] == "d" and choice[1].startswith("it failed and is on probation")
    choice = some_routes().choose(1, 0.0, avoid="c", planned="c")
    assert choice is not None and choice[0] == "d" and choice[1].startswith("it was slow or failed with this hop")
    choice = some_routes().choose(1, 0.0, planned="a")
    assert choice is not None and choice[1].startswith("it does not serve stage 1")


def test_a_slow_planned_peer_is_passed_over_until_it_has_caught_up() -> None:
    routes = some_routes()
    for _ in range(20):
        routes.answered("c", 0.1, 1.0, 0.0)
        routes.answered("d", 0.1, 1.0, 0.0)
    routes.slow("c", 8.0, 1.0, 0.0)
    choice = routes.choose(1, 0.0, planned="c")
    assert choice is not None and choice[0] == "d" and "a hop, its stage 0.10 s" in choice[1]
    taken = 0
    for _ in range(200):  # the stochastic rule tries it now and then; what it answers brings it back
        choice = routes.choose(1, 0.0, planned="c")
        assert choice is not None
        taken += choice == ("c", "as planned")
        routes.answered(choice[0], 0.1, 1.0, 0.0)
    assert taken > 50


def test_who_was_passed_over_while_others_were_planned_is_not_flooded_afterwards() -> None:
    routes = some_routes()
    for _ in range(100):
        routes.choose(1, 0.0, planned="c")
        routes.answered("c", 0.1, 1.0, 0.0)
    count: Counter[str] = Counter()
    for _ in range(20):
        choice = routes.choose(1, 0.0)
        assert choice is not None
        count[choice[0]] += 1
        routes.answered(choice[0], 0.1, 1.0, 0.0)
    assert 8 <= count["d"] <= 12


def test_planned_hops_leave_nothing_behind_in_the_heaps() -> None:
    routes = some_routes()
    for _ in range(1000):
        routes.choose(1, 0.0, planned="c")
    assert len(routes._wirings[1]._ready) == 2


def a_trainer() -> tuple[Trainer, list[Send], list[Note]]:
    trainer = Trainer("a", SETTINGS, Random(1))
    trainer.on_view(View(number=1, step=0, members=()), 0.0)
    view = View(number=2, step=0, members=MEMBERS, owners=(0,) * 3, phase=Phase.TRAINING)
    return trainer, *_read(trainer, trainer.on_view(view, 0.0))


def _read(trainer: Trainer, commands: list) -> tuple[list[Send], list[Note]]:  # type: ignore[type-arg]
    out = list(commands)
    for command in commands:
        if isinstance(getattr(command, "task", None), Fetch):
            out += trainer.on_done(Done(command.task.id, Result()), 0.0)
    return [c for c in out if isinstance(c, Send)], [c for c in out if isinstance(c, Note)]


def test_an_owner_sends_along_the_plan() -> None:
    _, sends, notes = a_trainer()
    assert [send.peer for send in sends if isinstance(send.message, Forward)] == ["a", "a", "a"]
    assert notes == []


def test_an_owner_that_departs_from_the_plan_says_so_once() -> None:
    trainer, sends, _ = a_trainer()
    out = trainer.on_unreachable("a", 1.0)
    forwards = [c.peer for c in out if isinstance(c, Send) and isinstance(c.message, Forward)]
    assert forwards == ["b"] * len(sends)
    notes = [c.text for c in out if isinstance(c, Note) and "is passed over" in c.text]
    assert len(notes) == 1 and notes[0].startswith("a is passed over: it")


# ------------------------------------------------------------------------------------------------------------- seats


class Leading:
    """A leader on seat 1, alone until others join."""

    def __init__(self) -> None:
        settings = msgspec.structs.replace(SETTINGS, peers=4, seat=1)
        self.register = Register("a", settings, random.Random(1))
        self.mind = Leader("a", settings, random.Random(1).random)
        self.register.found(View(number=1, step=0, members=(Member("a", 0, seat=1),)), 0.0)
        self.register.take()
        assert self.register.agreed is not None
        self.mind.lead(self.register.agreed, 1, 0.0)

    def join(self, *asking: tuple[str, int]) -> dict[str, tuple[int, int]]:
        for peer, seat in asking:
            self.mind.on_message(peer, Join(seat=seat), 1.0)
        self.mind.decide(self.register, 1.0)
        if self.register.accepted is not None and self.register.proposing:
            view = self.register.accepted.view
            self.register.on_message("a", Accept(1, view.number, view.digest, Signed("a")), 1.0)
        for view in self.register.take():
            self.mind.on_view(view, 1.0)
        assert self.register.agreed is not None
        return {member.peer: (member.stage, member.seat) for member in self.register.agreed.joining}


def test_newcomers_get_their_seats_and_the_others_the_thinnest_stage() -> None:
    placed = Leading().join(("x", 3), ("late", -1), ("y", 2), ("z", 2), ("w", 99))
    assert placed["x"] == (1, 3) and placed["y"] == (1, 2)
    assert placed["z"][1] == placed["w"][1] == placed["late"][1] == -1, (
        "a seat is held by one peer, and unknown ones by none"
    )
    assert placed["late"][0] in (0, 1) and placed["z"][0] == 0, "placed where the pipeline is thinnest"


@pytest.mark.parametrize(
    ("seat", "taken", "stage"), [(2, set(), 1), (2, {2}, None), (-1, set(), None), (4, set(), None)]
)
def test_a_seat_is_the_plans_and_free_or_it_is_none(seat: int, taken: set[int], stage: int | None) -> None:
    placed = planned_stage(SETTINGS, seat, taken)
    assert (placed[0] if placed else None) == stage


def test_a_run_is_complete_with_every_seat_and_nobody_else() -> None:
    assert complete(SETTINGS, MEMBERS)
    assert not complete(SETTINGS, MEMBERS[1:])
    assert not complete(SETTINGS, (*MEMBERS, Member("late", 0)))
    assert not complete(msgspec.structs.replace(SETTINGS, seats=()), ())


def test_microbatches_go_round_the_seats_and_then_those_without_one() -> None:
    members = (Member("late", 0), MEMBERS[2], MEMBERS[0], MEMBERS[3], MEMBERS[1])
    assert [members[at].peer for at in owners_of(members, 6)] == ["a", "b", "c", "d", "late", "a"]

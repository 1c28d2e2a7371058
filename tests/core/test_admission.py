"""A peer that no view lists asks to be admitted, and keeps its pause."""

from __future__ import annotations

from random import Random

from shoal.core.member.admission import FIND_BEATS
from shoal.core.messages import Command, Found, Join, JoinRefused, Received, Send, Settings, Tick
from shoal.core.peer import PeerMachine

SETTINGS = Settings(stages=1, microbatches=4, steps=10, peers=3, heartbeat_s=0.5)


def joins(commands: list[Command]) -> int:
    return sum(isinstance(each, Send) and isinstance(each.message, Join) for each in commands)


def newcomer() -> PeerMachine:
    machine = PeerMachine("new", SETTINGS, Random(0), found=False)
    machine.handle(Tick(), 0.0)
    assert joins(machine.handle(Found(peers=("a", "b", "c")), 0.1)) == 3
    return machine


def test_views_that_a_newcomer_has_missed_do_not_make_it_ask_once_for_each() -> None:
    machine, sent = newcomer(), 0
    for view in range(40):
        now = 0.1 + view / 100
        machine.admission.seek(now)
        sent += joins(machine.handle(Tick(), now))
    assert sent == 0
    assert joins(machine.handle(Tick(), FIND_BEATS * SETTINGS.heartbeat_s)) == 3


def test_whoever_was_refused_keeps_its_pause_while_steps_are_committed() -> None:
    machine, sent = newcomer(), 0
    machine.handle(Received(peer="a", message=JoinRefused(reason="full")), 0.2)
    for view in range(40):
        now = 0.2 + view * SETTINGS.ban_s / 41
        machine.admission.seek(now)
        sent += joins(machine.handle(Tick(), now))
    assert sent == 0
    assert joins(machine.handle(Tick(), 0.2 + SETTINGS.ban_s)) == 3


def test_a_member_that_is_removed_asks_at_once() -> None:
    machine = newcomer()
    machine.admission.enter()
    assert joins(machine.handle(Tick(), 30.0)) == 0
    machine.admission.seek(31.0)
    assert joins(machine.handle(Tick(), 31.0)) == 3

"""Peers that the run's authority has revoked: whoever leads removes them, at once and after a change of leader."""

from __future__ import annotations

from random import Random

from shoal.core.leader.leader import Leader
from shoal.core.messages import Barred, Join, Member, Note, Propose, Received, Send, Settings, Tick, View
from shoal.core.peer import PeerMachine

SETTINGS = Settings(stages=1, microbatches=4, steps=10, peers=3)


def a_view(*names: str) -> View:
    return View(number=1, step=0, members=tuple(Member(peer=name, stage=0) for name in names))


def test_a_revoked_member_is_removed_by_the_next_view_and_not_asked_in_again() -> None:
    leader = PeerMachine("a", SETTINGS, Random(0), found=True)
    leader.handle(Tick(), 0.0)
    for name in ("b", "c"):
        leader.handle(Received(peer=name, message=Join()), 0.1)
    now = 0.1
    while leader.view is None or {m.peer for m in leader.view.members + leader.view.joining} != {"a", "b", "c"}:
        now += 0.1
        assert now < 10.0, leader.view
        leader.handle(Tick(), now)
    commands = leader.handle(Barred(peers=("b",)), now)
    commands += leader.handle(Received(peer="b", message=Join()), now)
    now += 1.0
    commands += leader.handle(Tick(), now)
    assert leader.view is not None
    assert {m.peer for m in leader.view.members + leader.view.joining} == {"a", "c"}
    assert any(isinstance(c, Note) and "b revoked by the run's authority" in c.text for c in commands)
    assert not [c for c in commands if isinstance(c, Send) and c.peer == "b" and isinstance(c.message, Propose)]


def test_a_leader_that_is_elected_later_bars_them_too() -> None:
    leader = Leader("a", SETTINGS, Random(1).random)
    leader.lead(a_view("a", "b", "c"), 1, 0.0)
    leader.bar(("b", "nobody"))
    leader.lead(a_view("a", "b", "c"), 2, 1.0)  # forgets all
    assert leader.facts.evidence.guilty == {}
    leader.bar(("b", "nobody"))
    assert leader.facts.evidence.guilty == {"b": "revoked by the run's authority"}

"""What keeps a large swarm affordable: newcomers share a view, and what a view says of everybody is looked up, not searched."""

from __future__ import annotations

import random

from shoal.core.consensus.register import Register
from shoal.core.leader.leader import Leader
from shoal.core.messages import Join, Member, Settings, View
from shoal.core.replica_state import ReplicaState

SETTINGS = Settings(stages=2, microbatches=4, steps=3, peers=1000)


def test_peers_that_come_within_a_beat_of_the_last_are_admitted_by_one_view() -> None:
    register, mind = Register("a", SETTINGS, random.Random(1)), Leader("a", SETTINGS, random.Random(1).random)
    register.found(View(number=1, step=0, members=(Member("a", 0),)), 0.0)
    register.take()
    assert register.agreed is not None
    mind.lead(register.agreed, 1, 0.0)
    views: list[View] = []
    for tick in range(200):  # one newcomer every 10 ms for two seconds
        now = tick / 100
        mind.on_message(f"p{tick}", Join(), now)
        mind.decide(register, now)
        for view in register.take():
            views.append(view)
            mind.on_view(view, now)
    assert [len(view.joining) for view in views[:1]] == [1]  # a lone newcomer does not wait
    assert len(views) <= 2.0 / (0.9 * SETTINGS.heartbeat_s) + 1
    assert len(views[-1].joining) > 150


def test_a_seat_knows_the_members_and_joiners_of_its_newest_view() -> None:
    replica = ReplicaState()
    assert replica.known.serving == replica.known.present == {}
    first = View(number=1, step=0, members=(Member("a", 0), Member("b", 1)), joining=(Member("c", 1),))
    replica.view = first
    assert replica.known.serving == {"a": 0, "b": 1}
    assert replica.known.present == {"a": 0, "b": 1, "c": 1}
    assert replica.known is replica.known
    replica.view = View(number=2, step=0, members=(Member("c", 1),))
    assert replica.known.present == {"c": 1}

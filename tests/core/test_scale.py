"""What keeps a large swarm affordable: newcomers share a view, and what a view says of everybody is looked up, not searched."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from itertools import pairwise

import msgspec
import pytest
from tests.sim.test_full_lines import undisturbed

from shoal.core.consensus.register import Register
from shoal.core.leader import facts
from shoal.core.leader.books import jams
from shoal.core.leader.leader import Leader
from shoal.core.leader.rules import removal
from shoal.core.messages import (
    Accept,
    Command,
    Event,
    Heartbeat,
    Join,
    Lead,
    Member,
    Peer,
    Propose,
    Send,
    Settings,
    Signed,
    Tick,
    View,
)
from shoal.core.replica_state import ReplicaState
from shoal.core.timers import CROWD, RARER, beat_s
from shoal.sim.scenarios.catalogue import load
from shoal.sim.swarm import Swarm

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


def test_a_view_goes_to_each_peer_once_where_nothing_is_lost() -> None:
    """It was sent again to whoever had spoken before its proof came, and each member spoke when that came."""

    def look(now: float, peer: Peer, event: Event, commands: list[Command]) -> None:
        views = [(one.peer, one.message) for one in commands if isinstance(one, Send)]
        sent.update((to, message.entry.view.number) for to, message in views if isinstance(message, Propose))

    sent: Counter[tuple[Peer, int]] = Counter()
    outcome = Swarm(undisturbed(3, load("calm")), look).run()
    assert outcome.committed and not outcome.violations
    assert sent and set(sent.values()) == {1}


@pytest.mark.parametrize("votes", [True, False])
def test_a_view_whose_proof_was_lost_is_sent_again_after_a_beat_to_a_joiner_that_was_sent_no_proposal_at_once(
    votes: bool,
) -> None:
    register, once_s = Register("a", SETTINGS, random.Random(1)), SETTINGS.heartbeat_s
    other = (Member("b", 0, since=1),)
    first = View(number=1, step=0, members=(Member("a", 0), *other * votes), joining=other * (not votes), founder="a")
    register.found(first, 0.0)
    second = msgspec.structs.replace(first, number=2, step=1)
    register.propose(second, 1.0)
    register.on_message("b", Accept(1, 2, second.digest, Signed("b")), 1.1)
    assert register.agreed == second
    replication = register.replication
    assert bool(register.repair("b", 1, 1, 1.2)) is not votes
    replication.lost("b")
    assert bool(register.repair("b", 1, 1, 1.2)) is votes, "it has the proof, and lacks the proposal"
    assert register.repair("b", 1, 1, 1.3) == []
    assert register.repair("b", 1, 1, 1.3 + once_s)
    assert register.repair("b", 1, 1, 1.4 + once_s) == [], "the last one may have crossed that word"
    replication.lost("b")
    assert register.repair("b", 1, 1, 1.4 + once_s) == [], "all of it is on its way"
    assert register.repair("b", 1, 2, 2.0 + 2 * once_s) == []


def test_in_larger_runs_heartbeats_come_more_rarely_and_before_anybody_is_called_silent() -> None:
    assert beat_s(0.5, 2) == beat_s(0.5, CROWD) == 0.5
    assert 0.5 < beat_s(0.5, CROWD + 10) < beat_s(0.5, 2 * CROWD) == beat_s(0.5, 10_000) == 1.0
    assert RARER < min(jams.FRESH_BEATS, removal.DOUBT_BEATS, facts.QUIET_BEATS)


def test_peers_and_leader_of_a_larger_run_keep_to_it() -> None:
    def look(now: float, peer: Peer, event: Event, commands: list[Command]) -> None:
        for one in commands if isinstance(event, Tick) else ():
            if isinstance(one, Send) and isinstance(one.message, Lead | Heartbeat):
                times_s[peer, one.peer, type(one.message)].append(now)

    times_s: defaultdict[tuple[Peer, Peer, type], list[float]] = defaultdict(list)
    many = msgspec.structs.replace(load("calm"), peers=(2 * CROWD, 2 * CROWD), microbatches=(64, 64), steps=(4, 4))
    outcome = Swarm(undisturbed(3, many), look).run()
    assert outcome.committed and not outcome.violations
    for kind in (Lead, Heartbeat):
        apart_s = [
            after - before for key, at in times_s.items() if key[2] is kind for before, after in pairwise(at[-3:])
        ]
        assert len(apart_s) > CROWD
        assert min(apart_s) >= 0.99, kind

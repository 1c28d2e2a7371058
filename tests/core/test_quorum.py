"""The replicated value: one successor per view, whoever dies, is cut off or comes late."""

from __future__ import annotations

import random

import pytest

from shoal.core.consensus.certificates import majority
from shoal.core.consensus.register import Register
from shoal.core.messages import Member, Send, Settings, View

SETTINGS = Settings(stages=1, microbatches=1, steps=1)


class Net:
    """Registers joined by a network that delivers in random order, loses what crosses a cut, and drops at will."""

    def __init__(self, peers: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.names = [f"p{i}" for i in range(peers)]
        self.nodes = {n: Register(n, SETTINGS, random.Random(f"{seed}/{n}")) for n in self.names}
        self.now, self.wire, self.drop = 0.0, [], 0.0
        self.dead: set[str] = set()
        self.cut: set[str] = set()
        self.agreed: dict[int, View] = {}
        self.broken: list[str] = []
        view = View(number=1, step=0, members=tuple(Member(n, 0) for n in self.names))
        self.send("p0", self.nodes["p0"].found(View(number=1, step=0, members=(Member("p0", 0),)), 0.0))
        self.send("p0", self.nodes["p0"].propose(View(number=2, step=0, members=view.members), 0.0))

    def send(self, source: str, commands: list) -> None:
        for command in commands:
            assert isinstance(command, Send)
            self.wire.append((source, command.peer, command.message))
        for view in self.nodes[source].take():
            if self.agreed.setdefault(view.number, view) != view:
                self.broken.append(f"{source} agreed on another view {view.number}")

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.05
            for name in self.names:
                node = self.nodes[name]
                if name not in self.dead and node.deadline is not None and self.now >= node.deadline:
                    self.send(name, node.tick(self.now))
                heard = self.now - node.heard_leader_at < SETTINGS.heartbeat_timeout_s
                if name not in self.dead and node.leader not in (None, name) and heard:
                    number = node.agreed.number if node.agreed is not None else 0
                    self.wire.append((name, node.leader, (node.term, number)))  # the heartbeat that peer.py sends
            batch, self.wire = self.wire, []
            self.rng.shuffle(batch)
            for source, target, message in batch:
                if self.rng.random() < 0.2:
                    self.wire.append((source, target, message))  # later, so reordered
                elif target not in self.dead and (source in self.cut) == (target in self.cut):
                    if self.rng.random() >= self.drop:
                        self.nodes[target].show_life(source, self.now)
                        if isinstance(message, tuple):
                            self.send(target, self.nodes[target].repair(source, *message))
                        else:
                            self.send(target, self.nodes[target].on_message(source, message, self.now))

    def leaders(self) -> list[str]:
        return [n for n in self.names if n not in self.dead and self.nodes[n].leading]

    def propose(self) -> None:
        """Every peer that believes it leads puts its own successor forward."""
        for name in self.leaders():
            node = self.nodes[name]
            if not node.proposing:
                view = node.agreed
                assert view is not None
                successor = View(
                    number=view.number + 1, step=view.step, members=view.members, reason=f"{name}@{self.now}"
                )
                self.send(name, node.propose(successor, self.now))


@pytest.mark.parametrize("seed", range(12))
def test_no_two_peers_agree_on_different_successors_of_one_view(seed: int) -> None:
    net = Net(5, seed)
    net.drop = 0.1
    for _ in range(25):
        net.run(net.rng.choice((0.3, 1.0, 4.0)))
        net.propose()
        choice = net.rng.random()
        if choice < 0.4:
            net.cut = set(net.rng.sample(net.names, net.rng.randint(0, 3)))
        elif choice < 0.5 and len(net.dead) < 2:
            net.dead.add(net.rng.choice(net.names))
    assert not net.broken, f"{net.broken}; rerun: pytest tests/core/test_quorum.py -k 'one_view and {seed}'"
    net.cut, net.drop = set(), 0.0
    before = max(net.agreed)
    net.run(15.0)
    assert len(net.leaders()) == 1, "after healing one peer leads"
    net.propose()
    net.run(3.0)
    assert max(net.agreed) > before, "after healing there is progress"
    assert not net.broken


def test_a_minority_leader_stops_leading() -> None:
    net = Net(5, 1)
    net.run(2.0)
    assert net.leaders() == ["p0"]
    net.cut = {"p0", "p1"}
    net.run(10.0)
    assert len(net.leaders()) == 1 and net.leaders()[0] not in net.cut


def test_a_lonely_peer_does_not_disturb_a_working_leader() -> None:
    net = Net(5, 2)
    net.run(2.0)
    net.cut = {"p3"}
    net.run(20.0)
    term = net.nodes["p0"].term
    net.cut = set()
    net.run(5.0)
    assert net.leaders() == ["p0"] and net.nodes["p0"].term == term


def test_a_dead_leader_is_replaced_within_twice_the_silence() -> None:
    net = Net(5, 3)
    net.run(2.0)
    net.dead = {"p0"}
    net.run(2 * SETTINGS.heartbeat_timeout_s)
    assert len(net.leaders()) == 1


def test_a_proposal_needs_majorities_of_the_voters_before_and_after() -> None:
    net = Net(4, 4)
    net.run(2.0)
    net.dead = {"p2", "p3"}  # two of four: no majority
    successor = View(number=3, step=0, members=(Member("p0", 0), Member("p1", 0)))
    net.send("p0", net.nodes["p0"].propose(successor, net.now))
    net.run(2.0)
    assert 3 not in net.agreed


def test_a_peer_that_missed_a_view_is_given_the_newest() -> None:
    net = Net(3, 5)
    net.run(2.0)
    net.cut = {"p2"}
    net.propose()
    net.run(1.0)
    net.cut = set()
    net.send("p0", net.nodes["p0"].repair("p2", 1, 2))
    net.run(1.0)
    agreed = net.nodes["p2"].agreed
    assert agreed is not None and agreed.number == 3


def test_majority_counts_more_than_half() -> None:
    assert majority((), set())
    assert not majority(("a", "b"), {"a"})
    assert majority(("a", "b", "c"), {"a", "c"})

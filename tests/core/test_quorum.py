"""The replicated value: one successor per view, whoever dies, is cut off or comes late."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest

from shoal.core.consensus.agreed import COMMITS, AgreedViews
from shoal.core.consensus.certificates import can_agree, casting_voter, quorum
from shoal.core.consensus.register import Register
from shoal.core.messages import Entry, Member, Proof, Send, Settings, Signed, View

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
        self.send("p0", self.nodes["p0"].found(View(number=1, step=0, members=(Member("p0", 0),), founder="p0"), 0.0))
        self.send("p0", self.nodes["p0"].propose(View(number=2, step=0, members=view.members, founder="p0"), 0.0))

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
                            self.send(target, self.nodes[target].repair(source, *message, self.now))
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
                    number=view.number + 1,
                    step=view.step,
                    members=view.members,
                    reason=f"{name}@{self.now}",
                    founder=view.founder,
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


def test_a_proposal_needs_quorums_of_the_voters_before_and_after() -> None:
    net = Net(4, 4)
    net.run(2.0)
    net.dead = {"p2", "p3"}  # half of those before, without the casting voter; two of the three after
    members = (Member("p0", 0), Member("p2", 0), Member("p3", 0))
    successor = View(number=3, step=0, members=members, founder="p0")
    net.send("p0", net.nodes["p0"].propose(successor, net.now))
    net.run(2.0)
    assert 3 not in net.agreed


def test_a_peer_of_this_term_that_missed_the_leaders_votes_asks_for_them_and_follows() -> None:
    net = Net(3, 5)
    net.run(2.0)
    net.dead = {"p0"}
    net.run(10.0)
    (name,) = net.leaders()
    (other,) = {"p1", "p2"} - {name}
    leader, late = net.nodes[name], Register(other, SETTINGS, random.Random(0))
    entry, proof = leader.views.entry, leader.views.proof
    assert entry is not None and proof is not None
    late.views.agree(entry, proof)
    late.election.step_down(leader.term, net.now)  # it voted in this term, as a candidate's request told it
    leader.repair(other, leader.term, entry.view.number, net.now)  # its heartbeat of this term, whoever it follows
    (lead,) = [one for one in leader.replication.beat(net.now) if one.peer == other]
    (refused,) = late.on_message(name, lead.message, net.now)
    assert late.leader is None
    (again,) = leader.on_message(other, refused.message, net.now)
    late.on_message(name, again.message, net.now)
    assert late.leader == name


def test_a_peer_that_missed_a_view_is_given_the_newest() -> None:
    net = Net(3, 5)
    net.run(2.0)
    net.cut = {"p2"}
    net.propose()
    net.run(1.0)
    net.cut = set()
    net.send("p0", net.nodes["p0"].repair("p2", 1, 2, net.now))
    net.run(1.0)
    agreed = net.nodes["p2"].agreed
    assert agreed is not None and agreed.number == 3


def test_a_joiner_is_given_the_view_after_each_commit_that_it_missed_others_the_newest() -> None:
    views = AgreedViews("p0")
    for number in range(1, 2 * COMMITS):  # two views of each step
        view = View(number=number, step=number // 2, members=(Member("p0", 0),), joining=(Member("p1", 0),))
        views.agree(Entry(1, view, () if number == 1 else ("p0",)), Proof("p0", (Signed("p0"),)))
    assert [one.entry.view.number for one in views.certified(2)] == [2 * COMMITS - 1]
    begun = [one.entry.view for one in views.certified(2, commits=True)]
    assert [view.step for view in begun] == [*range(2, COMMITS), COMMITS - 1]
    assert [view.number for view in begun[:-1]] == list(range(4, 2 * COMMITS - 1, 2)), "the first view of each step"
    views.agree(Entry(2, msgspec.structs.replace(view, number=99, step=99), ("p0",)), None)
    assert views.certified(2, commits=True) == [], "the operator's override has no proof"


def test_a_quorum_is_more_than_half_or_half_with_the_casting_voter() -> None:
    assert quorum((), set(), "a")
    assert not quorum(("a", "b"), {"b"}, "a")
    assert quorum(("a", "b"), {"a"}, "a")
    assert not quorum(("a", "b"), {"a"}, ""), "nobody founded the run"
    assert quorum(("a", "b", "c"), {"b", "c"}, "a"), (
        "an odd number of voters has a majority without anybody's casting vote"
    )
    assert not quorum(("a", "b", "c"), {"a"}, "a")


HOST, GUEST = ("k1.1.host.9", "k2.1.host.9", "k3.1.host.9"), ("k4.1.guest.9", "k5.1.guest.9", "k6.1.guest.9")


@pytest.mark.parametrize("voters", [(*HOST[:mine], *GUEST[:others]) for mine in range(4) for others in range(4)])
def test_two_quorums_of_the_same_voters_always_have_a_peer_in_common(voters: tuple[str, ...]) -> None:
    quorums = [
        set(some)
        for size in range(len(voters) + 1)
        for some in itertools.combinations(voters, size)
        if quorum(voters, some, "host")
    ]
    assert quorums
    assert not voters or all(one & other for one in quorums for other in quorums)


def test_the_founders_half_goes_on_when_the_other_half_is_gone_and_the_other_never_does() -> None:
    for here, goes_on in ((HOST, True), (GUEST, False)):
        view = View(number=1, step=0, members=tuple(Member(peer, 0) for peer in HOST + GUEST), founder="host")
        assert can_agree(view, here) is goes_on


@pytest.mark.parametrize("seed", range(8))
def test_of_two_equal_halves_exactly_the_one_with_the_casting_voter_agrees(seed: int) -> None:
    net = Net(4, seed)
    net.run(2.0)
    casting = casting_voter(net.names, "p0")
    net.cut = set(net.rng.sample(net.names, 2))
    here = net.cut if casting in net.cut else set(net.names) - net.cut
    before = max(net.agreed)
    for _ in range(6):
        net.run(3.0)
        net.propose()
    net.run(3.0)
    numbers = {name: node.agreed.number if node.agreed is not None else 0 for name, node in net.nodes.items()}
    assert not net.broken
    assert min(numbers[name] for name in here) > before, f"{numbers}: the half with {casting} goes on"
    assert max(numbers[name] for name in set(net.names) - here) == before, f"{numbers}: the other half waits"

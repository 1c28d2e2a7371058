"""Trainers against servers that lose, repeat, delay, refuse, cancel and die, while views change under them.

Every peer runs a real Trainer beside a model of a server (40 lines that follow the protocol and compute nothing). Hypothesis
chooses what the network, the servers and the quorum do; the invariants look from outside, at what servers have taken.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shoal.core.messages import (
    Backward,
    BlobRef,
    Books,
    BooksRequest,
    Busy,
    Cancel,
    Cancelled,
    Command,
    Do,
    Done,
    Drop,
    Fetch,
    Forward,
    Gradient,
    Member,
    Message,
    Missing,
    Output,
    Phase,
    Recall,
    Refused,
    Result,
    Send,
    Settings,
    View,
)
from shoal.core.trainer.trainer import Trainer

REQUESTS = (Forward, Backward, Recall, Cancel, BooksRequest)
QUEUE = 3


@dataclass
class Server:
    """What the protocol asks of a server, with the work reduced to being asked to do some."""

    peer: str
    stage: int
    stages: int
    view: View
    queue: list[tuple[str, Forward | Backward]] = field(default_factory=list)
    running: tuple[str, Forward | Backward] | None = None
    booked: list[int] = field(default_factory=list)
    void: dict[tuple[int, int, int], int] = field(default_factory=dict)  # attempts up to this one will not be booked
    asked: list[tuple[str, BooksRequest]] = field(default_factory=list)
    out: list[tuple[str, Message]] = field(default_factory=list)  # to, message; receipts carry no tensor

    def owner(self, index: int) -> str:
        return self.view.members[self.view.owners[index]].peer

    def taken(self) -> list[int]:
        at_work = [*self.queue, *([self.running] if self.running else [])]
        return self.booked + [message.index for _, message in at_work if isinstance(message, Backward)]

    def see(self, view: View) -> None:
        if (view.epoch, view.step) != (self.view.epoch, self.view.step):
            self.queue, self.running, self.booked, self.asked = [], None, [], []
        self.view = view
        self.queue = [(owner, m) for owner, m in self.queue if self.owner(m.index) == owner]
        self.show_books()

    def show_books(self) -> None:
        if self.running and self.owner(self.running[1].index) != self.running[0]:
            return
        for owner, ask in [(owner, ask) for owner, ask in self.asked if ask.view <= self.view.number]:
            self.asked.remove((owner, ask))
            here = self.view
            self.out.append((owner, Books(here.epoch, here.step, here.number, self.stage, tuple(self.booked))))

    def gradient(self, owner: str, index: int, attempt: int) -> None:
        self.out.append((owner, Gradient(self.view.epoch, self.view.step, index, self.stage, attempt)))

    def receive(self, owner: str, message: Message, refuse: bool = False) -> None:
        if (message.epoch, message.step) < (self.view.epoch, self.view.step):  # type: ignore[union-attr]
            return
        if isinstance(message, BooksRequest):
            if (message.epoch, message.step) == (self.view.epoch, self.view.step):
                self.asked.append((owner, message))
                self.show_books()
            return
        assert isinstance(message, Forward | Backward | Recall | Cancel)
        ids = (message.epoch, message.step, message.index, message.stage, message.attempt)
        backward = isinstance(message, Backward)
        key = (message.epoch, message.step, message.index)
        if message.view > self.view.number:
            if backward:
                self.void[key] = max(self.void.get(key, 0), message.attempt)
            self.out.append((owner, Busy(*ids, backward, 0.1)))
            return
        if self.owner(message.index) != owner:
            return
        at_work = [*self.queue, *([self.running] if self.running else [])]
        same = [entry for entry in at_work if isinstance(entry[1], Backward) and entry[1].index == message.index]
        if isinstance(message, Forward):
            if refuse and message.input_from:
                self.out.append((owner, Missing(*ids, False, False)))
            elif len(self.queue) < QUEUE:
                self.queue.append((owner, message))
            else:
                self.out.append((owner, Busy(*ids, False, 0.3)))
        elif message.index in self.booked:
            self.gradient(owner, message.index, message.attempt)
        elif isinstance(message, Recall):
            self.out.append((owner, Cancelled(*ids)))
        elif isinstance(message, Cancel):
            if same and same[0] is self.running:
                return
            self.queue = [entry for entry in self.queue if entry not in same]
            self.void[key] = max(self.void.get(key, 0), message.attempt)
            self.out.append((owner, Cancelled(*ids)))
        elif message.attempt > self.void.get(key, 0) and not same:
            if refuse or len(self.queue) >= QUEUE:
                self.void[key] = message.attempt
                self.out.append((owner, self.refusal(message, ids) if refuse else Busy(*ids, True, 0.3)))
            else:
                self.queue.append((owner, message))

    def refusal(self, message: Backward, ids: tuple[int, int, int, int, int]) -> Message:
        """Now it is wrong, now its input does not come, now the gradient of its output."""
        held = [None, *([False] if message.input_from else []), *([True] if message.grad_from else [])]
        gradient = held[message.attempt % len(held)]
        return Refused(*ids, True, "a test") if gradient is None else Missing(*ids, True, gradient)

    def work(self) -> None:
        if self.running is None:
            self.running = self.queue.pop(0) if self.queue else None
            return
        owner, message = self.running
        self.running = None
        if isinstance(message, Forward):
            ids = (message.epoch, message.step, message.index, message.stage, message.attempt)
            self.out.append((owner, Output(*ids)))
        else:
            self.booked.append(message.index)
            self.gradient(owner, message.index, message.attempt)
        self.show_books()


@dataclass
class Node:
    trainer: Trainer
    server: Server
    view: View
    blobs: set[str] = field(default_factory=set)
    fetches: list[Fetch] = field(default_factory=list)


@dataclass
class Letter:
    source: str
    to: str
    message: Message
    blobs: int


class Swarm(RuleBasedStateMachine):
    @initialize(
        stages=st.integers(1, 3), replicas=st.integers(1, 3), microbatches=st.integers(1, 7), seed=st.integers(0, 99)
    )
    def found(self, stages: int, replicas: int, microbatches: int, seed: int) -> None:
        self.settings = Settings(stages=stages, microbatches=microbatches, steps=100, inflight=2)
        self.rng, self.now, self.serial = Random(seed), 0.0, 0
        self.mail: list[Letter] = []
        self.sent: set[tuple[str, int, int, int, int]] = set()
        self.nodes: dict[str, Node] = {}
        self.views = [View(number=1, step=0, members=())]
        members = tuple(Member(f"p{stage}{letter}", stage) for stage in range(stages) for letter in "abc"[:replicas])
        self.agree(members, step=0)
        for member in members:
            self.start(member, Trainer(member.peer, self.settings, Random(f"{seed} {member.peer}")))

    # ------------------------------------------------------------------------------------------------- the world

    def start(self, member: Member, trainer: Trainer) -> None:
        server = Server(member.peer, member.stage, self.settings.stages, self.views[-1])
        self.nodes[member.peer] = Node(trainer, server, self.views[0])
        self.carry_out(member.peer, trainer.on_view(self.views[-2], self.now))
        self.show(member.peer, len(self.views) - 1)

    def agree(self, members: tuple[Member, ...], step: int, epoch: int | None = None) -> None:
        """A new view; owners stay what they are within a step, as far as they are still there."""
        old = self.views[-1]
        epoch = old.epoch if epoch is None else epoch
        peers = [member.peer for member in members]
        owners = []
        for index in range(self.settings.microbatches):
            before = old.members[old.owners[index]].peer if old.owners else ""
            stays = before in peers and (old.step, old.epoch) == (step, epoch)
            owners.append(peers.index(before) if stays else self.rng.randrange(len(peers)))
        view = View(
            number=old.number + 1, step=step, members=members, owners=tuple(owners), phase=Phase.TRAINING, epoch=epoch
        )
        self.views.append(view)

    def show(self, peer: str, at: int) -> None:
        node, view = self.nodes[peer], self.views[at]
        fresh = (node.view.step, node.view.epoch, node.view.started) != (view.step, view.epoch, view.started)
        node.view = view
        node.server.see(view)
        held = set(node.blobs)
        self.carry_out(peer, node.trainer.on_view(view, self.now))
        if fresh:
            assert not held & node.blobs, "blobs of the old step are kept"
        self.post(node.server)

    def carry_out(self, peer: str, commands: list[Command]) -> None:
        node = self.nodes[peer]
        for command in commands:
            if isinstance(command, Drop):
                assert set(command.blobs) <= node.blobs or command.blobs[0].endswith("/x"), "dropped twice"
                node.blobs -= set(command.blobs)
            elif isinstance(command, Do):
                assert isinstance(command.task, Fetch)
                node.fetches.append(command.task)
            elif isinstance(command, Send) and isinstance(command.message, REQUESTS):
                self.check_request(peer, node, command)
                self.mail.append(Letter(peer, command.peer, command.message, len(command.blobs)))

    def check_request(self, peer: str, node: Node, send: Send) -> None:
        message = send.message
        assert set(send.blobs) <= node.blobs, "sends what it does not hold"
        assert send.peer in [member.peer for member in node.view.members]
        if not isinstance(message, BooksRequest):
            attempt = (peer, message.epoch, message.step, message.index, message.attempt)  # type: ignore[union-attr]
            assert attempt not in self.sent, "an attempt number is sent twice"
            self.sent.add(attempt)

    def post(self, server: Server) -> None:
        self.mail += [Letter(server.peer, to, message, 0) for to, message in server.out]
        server.out.clear()

    def hand_over(self, letter: Letter, fault: str = "", refuse: bool = False) -> None:
        node = self.nodes.get(letter.to)
        if node is None:
            return
        if isinstance(letter.message, REQUESTS):
            node.server.receive(letter.source, letter.message, refuse)
            self.post(node.server)
            return
        blobs = []
        for _ in range(letter.blobs):
            self.serial += 1
            blobs.append(BlobRef(f"r{self.serial}", 4))
        node.blobs |= {blob.id for blob in blobs}
        self.carry_out(letter.to, node.trainer.on_message(letter.source, letter.message, tuple(blobs), fault, self.now))

    def fetch(self, peer: str) -> None:
        node = self.nodes[peer]
        task = node.fetches.pop(0)
        node.blobs.add(task.out)
        self.carry_out(peer, node.trainer.on_done(Done(task.id, Result()), self.now))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for peer, node in list(self.nodes.items()):
            if node.trainer.deadline is not None and node.trainer.deadline <= self.now:
                self.carry_out(peer, node.trainer.tick(self.now))
                assert node.trainer.deadline is None or node.trainer.deadline > self.now

    def pick(self, at: int) -> str:
        return sorted(self.nodes)[at % len(self.nodes)]

    # ----------------------------------------------------------------------------------------------------- rules

    @precondition(lambda self: self.mail)
    @rule(at=st.integers(0, 1000), refuse=st.sampled_from([False] * 9 + [True]))
    def deliver(self, at: int, refuse: bool) -> None:
        self.hand_over(self.mail.pop(at % len(self.mail)), refuse=refuse)

    @precondition(lambda self: self.mail)
    @rule(count=st.integers(1, 20))
    def deliver_oldest(self, count: int) -> None:
        for _ in range(min(count, len(self.mail))):
            self.hand_over(self.mail.pop(0))

    @precondition(lambda self: self.mail)
    @rule(at=st.integers(0, 1000))
    def deliver_damaged(self, at: int) -> None:
        letter = self.mail.pop(at % len(self.mail))
        faulty = isinstance(letter.message, Output | Gradient)
        self.hand_over(letter, fault="a tensor in a receipt" if faulty else "")

    @precondition(lambda self: self.mail)
    @rule(at=st.integers(0, 1000))
    def repeat(self, at: int) -> None:
        self.mail.append(self.mail[at % len(self.mail)])

    @precondition(lambda self: self.mail)
    @rule(at=st.integers(0, 1000))
    def lose(self, at: int) -> None:
        self.mail.pop(at % len(self.mail))

    @rule(at=st.integers(0, 1000))
    def work(self, at: int) -> None:
        server = self.nodes[self.pick(at)].server
        server.work()
        self.post(server)

    @rule(rounds=st.integers(1, 8))
    def go_well(self, rounds: int) -> None:
        for _ in range(rounds):
            self.smooth_round()

    @precondition(lambda self: any(node.fetches for node in self.nodes.values()))
    @rule(at=st.integers(0, 1000))
    def read(self, at: int) -> None:
        able = [peer for peer, node in self.nodes.items() if node.fetches]
        self.fetch(able[at % len(able)])

    @rule(seconds=st.sampled_from([0.01, 0.2, 2.1, 12.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.pass_time(seconds)

    @rule(at=st.integers(0, 1000), about=st.integers(0, 1000))
    def cut_off(self, at: int, about: int) -> None:
        peer = self.pick(at)
        self.carry_out(peer, self.nodes[peer].trainer.on_unreachable(self.pick(about), self.now))

    @rule(at=st.integers(0, 1000), lives_on=st.booleans())
    def remove(self, at: int, lives_on: bool) -> None:
        """A peer is voted out; it is dead, or goes on with the view it knows."""
        members = self.views[-1].members
        leaver = members[at % len(members)]
        if self.can_lose(leaver):
            self.agree(tuple(member for member in members if member != leaver), self.views[-1].step)
            if not lives_on:
                self.nodes.pop(leaver.peer, None)

    @rule(at=st.integers(0, 1000))
    def crash(self, at: int) -> None:
        """A peer dies, and the view does not know yet."""
        members = self.views[-1].members
        leaver = members[at % len(members)]
        if self.can_lose(leaver):
            self.nodes.pop(leaver.peer, None)

    def can_lose(self, leaver: Member) -> bool:
        others = [m for m in self.views[-1].members if m.stage == leaver.stage and m != leaver]
        return any(member.peer in self.nodes for member in others)

    @rule(at=st.integers(0, 1000), skip=st.booleans())
    def learn(self, at: int, skip: bool) -> None:
        """A peer is shown the next view, or misses some and is shown the newest."""
        peer = self.pick(at)
        known = self.views.index(self.nodes[peer].view)
        if peer in [member.peer for member in self.views[-1].members] and known < len(self.views) - 1:
            self.show(peer, len(self.views) - 1 if skip else known + 1)

    @precondition(lambda self: self.complete())
    @rule(joins=st.booleans())
    def commit(self, joins: bool) -> None:
        members = tuple(member for member in self.views[-1].members if member.peer in self.nodes)
        new = Member(f"n{len(self.views)}", self.rng.randrange(self.settings.stages))
        self.agree((*members, new) if joins else members, self.views[-1].step + 1)
        if joins:
            self.start(new, Trainer(new.peer, self.settings, Random(new.peer)))

    @precondition(lambda self: len(self.views) > 3)
    @rule()
    def go_back(self) -> None:
        self.agree(self.views[-1].members, step=0, epoch=self.views[-1].epoch + 1)

    # ------------------------------------------------------------------------------------------------ invariants

    def now_serving(self) -> list[Server]:
        """Servers whose books count: members of the newest view, in its step."""
        view = self.views[-1]
        servers = [self.nodes[member.peer].server for member in view.members if member.peer in self.nodes]
        return [s for s in servers if (s.view.epoch, s.view.step) == (view.epoch, view.step)]

    def complete(self) -> bool:
        wanted = [(stage, i) for stage in range(self.settings.stages) for i in range(self.settings.microbatches)]
        return sorted((s.stage, index) for s in self.now_serving() for index in s.booked) == wanted

    @invariant()
    def no_backward_is_taken_by_two_members(self) -> None:
        taken = [(server.stage, index) for server in self.now_serving() for index in server.taken()]
        assert len(taken) == len(set(taken)), f"taken twice: {sorted(taken)}"

    @invariant()
    def no_microbatch_is_forgotten(self) -> None:
        for peer, node in self.nodes.items():
            load = node.trainer.summary()
            view = node.view
            mine = sum(view.members[at].peer == peer for at in view.owners)
            assert load.waiting + load.inflight + load.finished == mine
            assert load.inflight <= self.settings.inflight
            if load.finished < mine:
                assert node.trainer.deadline is not None or node.fetches, "waits for nothing"

    def smooth_round(self) -> None:
        mail, self.mail = self.mail, []
        for letter in mail:
            self.hand_over(letter)
        for peer, node in list(self.nodes.items()):
            while node.fetches:
                self.fetch(peer)
            while node.server.queue or node.server.running:
                node.server.work()
            self.post(node.server)
        self.pass_time(0.1)

    def teardown(self) -> None:
        """Heal: everybody learns the newest view and nothing is lost any more; then every microbatch gets done."""
        if not hasattr(self, "nodes"):
            return
        alive = tuple(member for member in self.views[-1].members if member.peer in self.nodes)
        if alive != self.views[-1].members:
            self.agree(alive, self.views[-1].step)
        view = self.views[-1]
        self.nodes = {member.peer: self.nodes[member.peer] for member in alive}
        for peer in self.nodes:
            if self.nodes[peer].view is not view:
                self.show(peer, len(self.views) - 1)
        for _ in range(2000):
            self.smooth_round()
            deadlines = [node.trainer.deadline for node in self.nodes.values() if node.trainer.deadline is not None]
            if not self.mail and deadlines:  # long ones, where answers took long before
                self.pass_time(max(min(deadlines) - self.now, 0.0))
            self.no_backward_is_taken_by_two_members()
            if all(n.trainer.summary().waiting + n.trainer.summary().inflight == 0 for n in self.nodes.values()):
                break
        self.no_microbatch_is_forgotten()
        assert self.complete(), "healed, and still not done"


Swarm.TestCase.settings = settings(
    max_examples=120, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
test_trainers_among_bad_servers = Swarm.TestCase


HAPPENINGS = (
    ("deliver", 12), ("deliver_oldest", 3), ("deliver_damaged", 1), ("repeat", 3), ("lose", 2), ("work", 8), ("read", 4),
    ("wait", 3), ("cut_off", 1), ("remove", 1), ("crash", 0.3), ("learn", 4), ("go_well", 0.5), ("go_back", 0.1),
)  # fmt: skip
NEED_MAIL = ("deliver", "deliver_oldest", "deliver_damaged", "repeat", "lose")


def happen(swarm: Swarm, what: str, rng: Random) -> None:
    at = rng.randrange(1000)
    if what in NEED_MAIL and not swarm.mail:
        return
    if what == "deliver":
        swarm.deliver(at, rng.random() < 0.05)
    elif what == "deliver_oldest":
        swarm.deliver_oldest(rng.randint(1, 10))
    elif what == "wait":
        swarm.wait(rng.choice([0.01, 0.2, 2.1, 12.0]))
    elif what == "cut_off":
        swarm.cut_off(at, rng.randrange(1000))
    elif what == "remove":
        swarm.remove(at, rng.random() < 0.5)
    elif what == "learn":
        swarm.learn(at, rng.random() < 0.5)
    elif what == "go_well":
        swarm.go_well(rng.randint(1, 4))
    elif what == "go_back":
        if len(swarm.views) > 3:
            swarm.go_back()
    elif what != "read":
        getattr(swarm, what)(at)
    elif any(node.fetches for node in swarm.nodes.values()):
        swarm.read(at)


def walk(seed: int, steps: int) -> None:
    """The same swarm, led by chance and for longer than hypothesis does it."""
    rng = Random(seed)
    swarm = Swarm()
    swarm.found(rng.randint(1, 3), rng.randint(2, 4), rng.randint(1, 12), seed)
    names, weights = zip(*HAPPENINGS, strict=True)
    for _ in range(steps):
        happen(swarm, rng.choices(names, weights)[0], rng)
        swarm.no_backward_is_taken_by_two_members()
        swarm.no_microbatch_is_forgotten()
        if swarm.complete() and rng.random() < 0.3:
            swarm.commit(rng.random() < 0.7)
    swarm.teardown()


@pytest.mark.parametrize("seed", range(60))
def test_trainers_survive_a_long_walk(seed: int) -> None:
    walk(seed, steps=300)

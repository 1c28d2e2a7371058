"""Whole peers that agree: what followers hear of a stall, what a leader that resigns does, and whose questions are answered."""

from __future__ import annotations

from collections import deque
from random import Random

from shoal.core.leader.rules.checks import STALLED
from shoal.core.member.notes import SAY_AGAIN_BEATS
from shoal.core.messages import (
    BlobRef,
    Booker,
    BookerRequest,
    Command,
    Do,
    Done,
    Event,
    Find,
    Finish,
    Found,
    Init,
    Message,
    Note,
    Peer,
    Received,
    Result,
    Round,
    RunBackward,
    Send,
    Settings,
    Tick,
)
from shoal.core.peer import PeerMachine

SETTINGS = Settings(stages=1, microbatches=3, steps=9, peers=3)
QUIET_S = STALLED * SETTINGS.heartbeat_s


class Play:
    """a, b and c on a network without delay. Their states are built at once; nothing is ever read, so that no step gets on."""

    def __init__(self, names: str = "abc") -> None:
        self.now = 0.0
        self.machines = {name: PeerMachine(name, SETTINGS, Random(i), found=not i) for i, name in enumerate(names)}
        self.notes: dict[Peer, list[str]] = {name: [] for name in names}
        self.answers: list[tuple[Peer, Peer, Message]] = []  # Bookers: from, to
        self._events: deque[tuple[Peer, Event]] = deque()
        while not all(one.view is not None and one.view.started for one in self.machines.values()):
            self.wait(0.25)
            assert self.now < 20.0

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += 0.25
            for name in self.machines:
                self.tell(name, Tick())

    def tell(self, name: Peer, event: Event) -> None:
        self._events.append((name, event))
        while self._events:
            to, next_ = self._events.popleft()
            for command in self.machines[to].handle(next_, self.now):
                self._carry(to, command)

    def _carry(self, name: Peer, command: Command) -> None:
        match command:
            case Send():
                if isinstance(command.message, Booker):
                    self.answers.append((name, command.peer, command.message))
                if command.peer in self.machines:
                    self._events.append((command.peer, Received(name, command.message)))
            case Do(task=Init() as task):
                self._events.append((name, Done(task.id, Result(digest="parameters", length=10))))
            case Find():
                self._events.append((name, Found(tuple(self.machines))))
            case Note():
                self.notes[name].append(f"{command.kind}: {command.text}")
            case Finish():
                raise AssertionError(f"{name} ends: {command.reason}")

    def stalls(self, name: Peer) -> list[str]:
        return [note for note in self.notes[name] if note.startswith("stall: ")]

    def leaders(self) -> set[Peer | None]:
        return {one.leader for one in self.machines.values()}


def test_everybody_is_told_why_nothing_is_committed_and_not_before_it_takes_long() -> None:
    play = Play()
    play.wait(QUIET_S - 1.0)
    assert [play.stalls(name) for name in "abc"] == [[], [], []]
    play.wait(3.0)
    said = [play.stalls(name) for name in "abc"]
    assert [len(one) for one in said] == [1, 1, 1]
    assert all("step 0 is not committed for" in one[0] and "stage 0 has 0 of 3 microbatches" in one[0] for one in said)


def test_it_is_said_again_from_time_to_time_and_not_with_every_beat() -> None:
    play = Play()
    play.wait(QUIET_S + 1.0)
    for name in "ab":
        notes = play.machines[name].judge.notes
        assert notes.noted_at is not None
        after = notes.noted_at + SAY_AGAIN_BEATS * SETTINGS.heartbeat_s
        assert notes.note("it hangs", after - 0.1) == []
        assert notes.note("it hangs", after) == [Note("stall", "it hangs")]


def test_a_commit_ends_it_for_everybody() -> None:
    play = Play()
    play.wait(QUIET_S + 1.0)
    assert all(play.stalls(name) for name in "abc")
    leader = play.machines["a"]
    leader.leadership.facts.history.step_at = play.now  # as with a new step
    play.wait(1.0)
    assert [play.stalls(name)[-1] for name in "abc"] == ["stall: steps are committed again"] * 3


def test_a_leader_that_resigns_is_followed_by_another_and_stays_in_the_run() -> None:
    play = Play()
    assert play.leaders() == {"a"}
    play.machines["a"].leadership.facts.evidence.resigns = "cannot receive"
    play.wait(0.25)
    assert "leader: a leads no more: it cannot receive" in play.notes["a"] and not play.machines["a"].leading
    play.wait(3 * SETTINGS.heartbeat_timeout_s)
    (leader,) = play.leaders()
    assert leader in ("b", "c") and not any(machine.outside for machine in play.machines.values())
    assert play.notes["a"].count("leader: a leads no more: it cannot receive") == 1


def test_a_leader_that_is_elected_again_may_stay() -> None:
    play = Play()
    play.machines["a"].leadership.facts.evidence.resigns = "cannot receive"
    play.wait(0.25)
    for name in "bc":
        play.machines[name].leadership.facts.evidence.resigns = "cannot receive either"
    play.wait(4 * SETTINGS.heartbeat_timeout_s)
    (leader,) = play.leaders()
    assert leader is not None and play.machines[leader].leadership.facts.evidence.resigns == ""


def test_an_owner_answers_the_leader_and_nobody_else() -> None:
    play = Play()
    view = play.machines["b"].view
    assert view is not None
    index = next(i for i, at in enumerate(view.owners) if view.members[at].peer == "b")
    ask = BookerRequest(view.epoch, view.step, index, 0)
    for stranger in ("c", "x"):
        play.tell("b", Received(stranger, ask))
    assert play.answers == []
    play.tell("b", Received("a", ask))
    assert play.answers == [("b", "a", Booker(view.epoch, view.step, index, 0))]


def test_a_leader_whose_own_booking_completes_the_step_averages_it_at_once() -> None:
    """Not with the next message that it receives, which can be a beat later."""
    leader = PeerMachine("a", Settings(stages=1, microbatches=1, steps=9, peers=1), Random(0), found=True)
    events: deque[Event] = deque([Tick()])
    backward = ""
    for _ in range(100):
        event = events.popleft() if events else Tick()
        commands = leader.handle(event, now=1.0)
        if isinstance(event, Done) and event.id == backward:
            assert any(isinstance(command, Send) and isinstance(command.message, Round) for command in commands)
            return
        for command in commands:
            if isinstance(command, Send) and command.peer == "a":
                events.append(Received("a", command.message, tuple(BlobRef(f"r/{name}", 1) for name in command.blobs)))
            elif isinstance(command, Do):
                backward = command.task.id if isinstance(command.task, RunBackward) else backward
                events.append(Done(command.task.id, Result(digest="parameters", length=10, nbytes=1, loss=1.0)))
    raise AssertionError("no backward pass was asked for")

"""A replica's part in inference: bounds on what strangers ask, whose keys and values are kept, and training first."""

from __future__ import annotations

from typing import Any

from shoal.core import messages as m
from shoal.core.inference.server import IDLE_S, OF_CLIENT, PATIENCE_S, QUEUE, InferenceServer

ROUTE = ("p0", "p1")
EACH = 10  # bytes of one position


class AServer:
    """What InferenceServer asks of the replica that it belongs to."""

    def __init__(self) -> None:
        self.busy, self.has_state, self.unfit = False, True, ""
        self.epoch = self.stage = self.step = 0

    @property
    def held(self) -> tuple[int, int] | None:
        return (self.epoch, self.stage) if self.has_state and not self.unfit else None

    def stage_of(self, peer: str) -> int | None:
        return {"p0": 0, "p1": 1}.get(peer)


class Desk:
    """One server at stage 0 of two, and a driver that ends its tasks."""

    def __init__(self, cache_bytes: int = 1000) -> None:
        self.replica: Any = AServer()
        self.server = InferenceServer(
            "p0", m.Settings(stages=2, microbatches=1, steps=1, cache_bytes=cache_bytes), self.replica
        )
        self.lengths: dict[str, int] = {}
        self.now = 0.0

    def ask(self, client: str, position: int, count: int, **fields: Any) -> list[m.Command]:
        fields = {"session": 1, "call": position + 1, "route": ROUTE} | fields
        message = m.Generate(position=position, tokens=tuple(range(count)), **fields)
        commands = self.server.on_message(client, message, (), "", self.now)
        return self.carry_out(commands + self.server.go_on(self.now))

    def carry_out(self, commands: list[m.Command]) -> list[m.Command]:
        """All that follows, tasks ended at once."""
        done: list[m.Command] = []
        while commands:
            command = commands.pop(0)
            done.append(command)
            if isinstance(command, m.Do) and isinstance(command.task, m.Forget):
                for session in command.task.sessions:
                    self.lengths.pop(session, None)
            if isinstance(command, m.Do) and isinstance(command.task, m.Infer):
                task = command.task
                length = (0 if task.start else self.lengths[task.session]) + len(task.tokens)
                self.lengths[task.session] = length
                assert sum(self.lengths.values()) * EACH <= self.server.settings.cache_bytes
                commands += self.server.on_done(m.Done(task.id, m.Result(nbytes=length * EACH)), self.now)
        return done


def declined(commands: list[m.Command]) -> list[tuple[str, str]]:
    return [(each.peer, each.message.kind) for each in sent(commands, m.NotServed)]


def sent(commands: list[m.Command], kind: type) -> list[Any]:
    return [each for each in commands if isinstance(each, m.Send) and isinstance(each.message, kind)]


def test_a_text_goes_on_to_the_next_replica_and_its_client_gets_a_receipt() -> None:
    desk = Desk()
    commands = desk.ask("c1", 0, 5)
    (onward,) = sent(commands, m.HiddenStates)
    assert (onward.peer, onward.message.stage, onward.message.count, onward.message.client) == ("p1", 1, 5, "c1")
    assert [each.peer for each in sent(commands, m.Passed)] == ["c1"]
    assert not declined(desk.ask("c1", 5, 1))


def test_positions_that_do_not_follow_those_kept_are_missing() -> None:
    desk = Desk()
    desk.ask("c1", 0, 5)
    assert declined(desk.ask("c1", 7, 1, call=9)) == [("c1", "missing")]
    assert declined(desk.ask("c2", 5, 1)) == [("c2", "missing")], "another client's"
    desk.replica.epoch = 1
    assert declined(desk.ask("c1", 5, 1, call=10)) == [("c1", "missing")]


def test_the_least_recently_used_texts_make_room_and_no_more_than_the_bytes_are_kept() -> None:
    desk = Desk(cache_bytes=1000)
    for client in ("c1", "c2", "c3"):
        desk.ask(client, 0, 30)
    desk.ask("c1", 30, 1)
    desk.ask("c4", 0, 30)
    assert sorted(desk.lengths) == ["c1/1", "c3/1", "c4/1"]
    assert declined(desk.ask("c4", 30, 80)) == [("c4", "refused")], "110 positions take more than all there is"


def test_a_key_keeps_few_texts_whatever_it_asks() -> None:
    desk = Desk(cache_bytes=10**6)
    desk.ask("other", 0, 1)
    for session in range(20):
        desk.ask("c1", 0, 1, session=session)
    assert len(desk.lengths) == OF_CLIENT + 1 and "other/1" in desk.lengths


def test_texts_wait_for_training_but_not_for_ever_and_their_number_is_bounded() -> None:
    desk = Desk()
    desk.replica.busy = True
    waiting = [desk.ask(f"c{n}", 0, 1) for n in range(QUEUE + 1)]
    assert not any(waiting[:QUEUE])
    assert declined(waiting[QUEUE]) == [(f"c{QUEUE}", "busy")]
    assert desk.server.deadline is not None and desk.server.deadline < PATIENCE_S
    pending = sent(desk.server.tick(desk.server.deadline), m.TextPending)
    assert len(pending) == QUEUE, "clients learn that their requests wait"
    desk.now = PATIENCE_S
    assert len(sent(desk.carry_out(desk.server.go_on(desk.now)), m.HiddenStates)) == QUEUE


def test_texts_that_nobody_asks_for_are_forgotten() -> None:
    desk = Desk()
    desk.ask("c1", 0, 3)
    assert desk.server.deadline == IDLE_S
    desk.carry_out(desk.server.tick(IDLE_S))
    assert not desk.lengths and desk.server.deadline is None


def test_what_leads_elsewhere_is_declined() -> None:
    desk = Desk()
    assert declined(desk.ask("c1", 0, 1, route=("p1", "p0"))) == [("c1", "refused")]
    assert declined(desk.ask("c1", 0, 1, call=2, route=("p0", "p9"))) == [("c1", "elsewhere")]
    desk.replica.has_state = False
    assert declined(desk.ask("c1", 0, 1, call=3)) == [("c1", "elsewhere")]
    assert declined(Desk(cache_bytes=0).ask("c1", 0, 1)) == [("c1", "elsewhere")]

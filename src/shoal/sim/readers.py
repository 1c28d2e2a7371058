"""Clients of a simulated swarm that have it continue a text, by the real client's machine, and check every token.

A token is right if it is the one that follows from the text alone (tasks/texts.py): whatever route it took, whoever died on the way.
"""

from __future__ import annotations

from shoal.core import messages as m
from shoal.core.inference.client import Client
from shoal.sim.context import Context
from shoal.sim.delivery import Delivery
from shoal.sim.processes import Processes
from shoal.sim.tasks.texts import next_token

PROMPT = 40  # tokens
THINK_S = 0.3  # between two tokens
LOOK_S = 1.0  # between two look-ups of the run's peers


class Reader:
    """One client, with one text."""

    def __init__(self, context: Context, processes: Processes, delivery: Delivery, number: int) -> None:
        self.name = f"c{number}.0"
        self._context, self._processes, self._delivery = context, processes, delivery
        self._rng = context.case.rng(self.name)
        self.client = Client(self.name, context.settings, self._rng)
        self.tokens = tuple(self._rng.randrange(1000) for _ in range(PROMPT))
        self._wanted = False
        self._armed_s: float | None = None
        delivery.clients[self.name] = self.receive

    def ask(self, _: object) -> None:
        self._wanted = True
        self._carry_out(self.client.predict(self.tokens, 1, self._context.kernel.now))

    def look(self, _: object) -> None:
        """The directory's answer."""
        context = self._context
        if context.over:
            return
        self._carry_out(self.client.on_found(tuple(self._processes.nodes), context.kernel.now))
        context.kernel.after(LOOK_S, self.look)

    def receive(self, peer: m.Peer, message: m.Message | None) -> None:
        """`message` None: that peer cannot be reached."""
        now, client = self._context.kernel.now, self.client
        self._carry_out(client.on_unreachable(peer, now) if message is None else client.on_message(peer, message, now))

    def _carry_out(self, commands: list[m.Command]) -> None:
        context = self._context
        if context.over:
            return
        for command in commands:
            if isinstance(command, m.Send):
                self._delivery.carry(self.name, command.peer, command.message, ())
            elif isinstance(command, m.Note):
                context.note(f"{self.name}: {command.text}")
        if self.client.predicted is not None and self._wanted:
            self._check(self.client.predicted)
        deadline = self.client.deadline
        if deadline is not None and (self._armed_s is None or deadline < self._armed_s):
            self._armed_s = deadline
            context.kernel.at(max(deadline, context.kernel.now), self._tick)

    def _check(self, predicted: m.Predicted) -> None:
        context, self._wanted = self._context, False
        expected = next_token(self.tokens, context.settings.stages)
        if predicted.tokens[0] != expected:
            context.watch.report(
                self.name, "text", f"token {len(self.tokens)} is {predicted.tokens[0]}, not {expected}"
            )
        self.tokens += (predicted.tokens[0],)
        context.kernel.after(THINK_S, self.ask)

    def _tick(self, _: object) -> None:
        self._armed_s = None
        now = self._context.kernel.now
        due = self.client.deadline is not None and self.client.deadline <= now
        self._carry_out(self.client.tick(now) if due else [])


class Readers:
    def __init__(self, context: Context, processes: Processes, delivery: Delivery) -> None:
        self._context = context
        self._readers = [Reader(context, processes, delivery, number) for number in range(context.case.scenario.texts)]

    def begin(self) -> None:
        """The run has begun."""
        for reader in self._readers:
            self._context.kernel.after(0.1, reader.ask)
            self._context.kernel.after(0.2, reader.look)

    def outcome(self) -> tuple[tuple[int, int], ...]:
        return tuple((len(reader.tokens) - PROMPT, reader.client.replays) for reader in self._readers)

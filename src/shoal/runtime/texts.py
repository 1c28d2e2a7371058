"""A client of the swarm's inference over a real network: drives core/inference/client.py. For `shoal generate` and `shoal chat`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from random import Random

import msgspec

from shoal.core.inference.client import Client
from shoal.core.messages import Command, Note, Predicted, Send, Settings
from shoal.transport.base import Event, Incoming, Lost, Transport, Unknown
from shoal.transport.directory.directory import Directory

LOOK_S = 1.0  # between two look-ups of the run's peers


class Cost(msgspec.Struct):
    """Bytes of this client's own messages, and what it asked for."""

    sent_bytes: int = 0
    received_bytes: int = 0
    requests: int = 0  # each a round trip through all stages


class TextClient:
    """One text at a time. `say` gets what there is to say to people: what is waited for, which peer failed."""

    def __init__(
        self, transport: Transport, directory: Directory, settings: Settings, rng: Random, say: Callable[[str], None]
    ) -> None:
        self._transport, self._directory, self._say = transport, directory, say
        self._settings, self._rng = settings, rng
        self._event: asyncio.Task[Event] | None = None
        self._looked_at = float("-inf")
        self.cost = Cost()
        self.begin()

    def begin(self) -> None:
        """Another text."""
        self.client = Client(self._transport.name, self._settings, self._rng)

    async def next(self, tokens: tuple[int, ...], scores: int) -> Predicted:
        """The `scores` likeliest tokens after `tokens`. Waits while the run lacks a peer. ValueError: the peers refuse the text."""
        client = self.client
        self._carry_out(client.predict(tokens, scores, time.monotonic()))
        self.cost.requests += 1
        while client.predicted is None:
            if client.refused:
                raise ValueError(f"the run's peers refuse this text: {client.refused}")
            await self._look_up()
            await self._step()
        return client.predicted

    async def _look_up(self) -> None:
        """Where the peers are, until every stage is served."""
        now = time.monotonic()
        if (self.client.ready and self._looked_at > 0) or now < self._looked_at + LOOK_S:
            return
        self._looked_at = now
        await self._directory.announce()  # so that peers find the way back
        peers = tuple(record.peer for record in await self._directory.peers())
        self._carry_out(self.client.on_found(peers, time.monotonic()))

    async def _step(self) -> None:
        """What happens next, or the deadline."""
        if self._event is None:
            self._event = asyncio.create_task(self._transport.receive())
        now, client = time.monotonic(), self.client
        wait_s = LOOK_S if client.deadline is None else min(LOOK_S, max(0.0, client.deadline - now))
        await asyncio.wait({self._event}, timeout=wait_s)
        now = time.monotonic()
        if self._event.done():
            event, self._event = self._event.result(), None
            match event:
                case Incoming():
                    self.cost.received_bytes += event.nbytes
                    self._carry_out(client.on_message(event.peer, event.message, now))
                case Lost():
                    self._carry_out(client.on_unreachable(event.peer, now))
                case Unknown():
                    self._looked_at = float("-inf")
        if client.deadline is not None and now >= client.deadline:
            self._carry_out(client.tick(now))

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Send():
                    self.cost.sent_bytes += self._transport.send(command.peer, command.message)
                case Note():
                    self._say(command.text)

    def close(self) -> None:
        if self._event is not None:
            self._event.cancel()

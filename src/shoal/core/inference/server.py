"""A replica's part in inference: which request of a text runs next, and whose keys and values are kept.

A text is a session of a client, who keeps its tokens: what is held here may be forgotten at any time, and the client is then told
(NotServed, `missing`) and sends the text anew. Requests run one at a time, while no hop of training waits here, or after PATIENCE_S; each
is of MOST_POSITIONS at most, so that a hop of training never waits long. The keys and values stay when a step is committed: later
positions are computed with newer parameters, and the answer names the versions. For peer.py.
"""

from __future__ import annotations

from itertools import count

import msgspec

from shoal.core.messages import (
    BlobRef,
    Command,
    Do,
    Done,
    Drop,
    Failed,
    Forget,
    Generate,
    HiddenStates,
    Infer,
    NotServed,
    Passed,
    Peer,
    Predicted,
    Send,
    Settings,
    TextPending,
    Wire,
)
from shoal.core.names import key_of
from shoal.core.replica_state import TEXT, drop
from shoal.core.server.server import Server
from shoal.core.timers import soonest

# Between two messages that a request waits or runs: a client hears nothing else of a peer that computes
PENDING_S = 0.5
PATIENCE_S = 1.0  # that a request waits for hops of training: under full load one runs each second
QUEUE = 16  # requests that wait, each with the tensor of MOST_POSITIONS at most
SESSIONS = 256  # whose keys and values are kept
OF_CLIENT = 4  # of those, of one key
IDLE_S = 600.0  # until keys and values that nobody uses are forgotten


class Request(msgspec.Struct, frozen=True):
    """What a client asks of this replica. `blob`: the stage's input; '' at stage 0, which has `tokens`."""

    client: Peer
    stage: int
    message: Generate | HiddenStates
    blob: str
    since: float

    @property
    def key(self) -> str:
        return f"{self.client}/{self.message.session}"

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.message.tokens if isinstance(self.message, Generate) else ()

    @property
    def count(self) -> int:
        return self.message.count if isinstance(self.message, HiddenStates) else len(self.message.tokens)


class Kept(msgspec.Struct):
    """Keys and values of one session."""

    client: Peer
    call: int
    length: int = 0  # positions
    nbytes: int = 0
    used_at: float = 0.0


class InferenceServer:
    def __init__(self, name: Peer, settings: Settings, server: Server) -> None:
        self.name, self.settings = name, settings
        self.asked = False  # ever, for texts: in most runs never, and nothing needs to be looked at
        self._server = server
        self._serial = count()
        self._queue: dict[str, Request] = {}  # by session, the oldest first
        self._running: tuple[Infer, Request] | None = None
        self._kept: dict[str, Kept] = {}  # the least recently used first
        self._held: tuple[int, int] | None = None  # epoch and stage that those belong to
        self._pending_at: float | None = None  # when the clients of what waits or runs are told so
        self._position_bytes = 0.0  # of keys and values, the most that was seen

    @property
    def deadline(self) -> float | None:
        if not self._queue and not self._kept:  # asked after every event of every peer
            return self._pending_at
        waiting = next(iter(self._queue.values()), None) if self._running is None else None
        oldest = next(iter(self._kept.values()), None)
        return soonest(
            self._pending_at,
            None if waiting is None else waiting.since + PATIENCE_S,
            None if oldest is None else oldest.used_at + IDLE_S,
        )

    # ----------------------------------------------------------------------------------------------------- requests

    def on_message(
        self, peer: Peer, message: Wire, blobs: tuple[BlobRef, ...], fault: str, now: float
    ) -> list[Command]:
        self.asked = True
        names = tuple(blob.id for blob in blobs)
        if isinstance(message, Generate):
            request = Request(peer, 0, message, "", now)
        elif isinstance(message, HiddenStates):
            request = Request(message.client, message.stage, message, "".join(names[:1]), now)
        else:
            return drop(names)
        if fault:
            return drop(names) + self._decline(request, "refused", fault)
        before = self._queue.pop(request.key, None)
        if before is not None and before.message.call > message.call:  # it was overtaken
            request, before = before, request
        commands = self._drop(before) if before is not None else []
        if len(self._queue) >= QUEUE:
            return commands + self._drop(request) + self._decline(request, "busy", f"{QUEUE} texts wait here")
        self._queue[request.key] = request
        return commands

    def _fault(self, request: Request) -> tuple[str, str]:
        """Why the request is not taken: the kind of NotServed and words; ('', '') when it is."""
        server, message, settings = self._server, request.message, self.settings
        if not settings.cache_bytes:
            return "elsewhere", "this peer serves no texts: device.cache_bytes = 0"
        route = message.route
        if self._held is None or self._held[1] != request.stage:
            return (
                "elsewhere",
                f"this peer does not hold stage {request.stage}" + f", but {server.stage}" * server.has_state,
            )
        if len(route) != settings.stages or route[request.stage] != self.name:
            return "refused", f"a route of {len(route)} peers through {settings.stages} stages that does not lead here"
        kept = self._kept.get(request.key)
        if message.position and (kept is None or kept.length != message.position):
            return "missing", "the text's keys and values are not kept here"
        if (message.position + request.count) * self._position_bytes > settings.cache_bytes:
            return "refused", (
                f"{message.position + request.count} positions take more than device.cache_bytes = {settings.cache_bytes} of this peer"
            )
        return "", ""

    # ------------------------------------------------------------------------------------------------------ running

    @property
    def waits(self) -> bool:
        """`go_on` has something to do."""
        return (
            bool(self._queue)
            or (self._pending_at is None) != (self._running is None)
            or self._server.held != self._held
        )

    def go_on(self, now: float) -> list[Command]:
        """Start the oldest request, where no hop of training is in its way."""
        commands = self._settle()
        while self._running is None and self._queue:
            key, request = next(iter(self._queue.items()))
            if self._server.busy and now < request.since + PATIENCE_S:
                break
            del self._queue[key]
            kind, reason = self._fault(request)
            if kind:
                commands += self._drop(request) + self._decline(request, kind, reason)
                continue
            commands += self._start(request, now)
        if self._running is None and not self._queue:
            self._pending_at = None
        elif self._pending_at is None:
            self._pending_at = now + PENDING_S
        return commands

    def _settle(self) -> list[Command]:
        """Keys and values belong to one stage of one epoch."""
        held = self._server.held
        if held == self._held:
            return []
        self._held = held
        return self._forget(list(self._kept))

    def _start(self, request: Request, now: float) -> list[Command]:
        message, key = request.message, request.key
        commands: list[Command] = []
        kept = self._kept.pop(key, None)
        if kept is None or not message.position:
            kept = Kept(request.client, message.call)
        commands += self._make_room(request)
        kept.call, kept.used_at = message.call, now
        self._kept[key] = kept
        last = request.stage == self.settings.stages - 1
        number = next(self._serial)
        task = Infer(
            id=f"i/{number}",
            session=key,
            stage=request.stage,
            start=not message.position,
            tokens=request.tokens,
            x=request.blob,
            out="" if last else f"i/{number}/out",
            scores=message.scores if last else 0,
        )
        self._running = task, request
        return [*commands, Do(task)]

    def _make_room(self, request: Request) -> list[Command]:
        """Evict the least recently used sessions, first of this client where it has too many."""
        needed = request.count * self._position_bytes + self._kept_bytes(request)
        evicted: list[str] = []
        mine = [key for key, kept in self._kept.items() if key_of(kept.client) == key_of(request.client)]
        evicted += mine[: max(0, len(mine) - OF_CLIENT + 1)]
        left = {key: kept for key, kept in self._kept.items() if key not in evicted}
        taken = sum(kept.nbytes for kept in left.values())
        for key, kept in left.items():
            if taken + needed <= self.settings.cache_bytes and len(self._kept) - len(evicted) < SESSIONS:
                break
            evicted.append(key)
            taken -= kept.nbytes
        return self._forget(evicted)

    def _kept_bytes(self, request: Request) -> float:
        """Of the positions before those of the request."""
        return request.message.position * self._position_bytes

    def _forget(self, keys: list[str]) -> list[Command]:
        for key in keys:
            self._kept.pop(key, None)
        return [Do(Forget(f"i/{next(self._serial)}", tuple(keys)))] if keys else []

    # ------------------------------------------------------------------------------------------------------- events

    def on_done(self, done: Done, now: float) -> list[Command]:
        if self._running is None or self._running[0].id != done.id:
            return []
        (task, request), self._running = self._running, None
        message, kept = request.message, self._kept.get(request.key)
        if kept is not None:
            kept.length, kept.nbytes, kept.used_at = message.position + request.count, done.result.nbytes, now
            self._position_bytes = max(self._position_bytes, kept.nbytes / kept.length)
            self._kept[request.key] = self._kept.pop(request.key)
        return self._drop(request) + self._send_on(task, request, done) + self.go_on(now)

    def _send_on(self, task: Infer, request: Request, done: Done) -> list[Command]:
        message, step = request.message, self._server.step
        oldest, newest = (
            (min(message.oldest, step), max(message.newest, step))
            if isinstance(message, HiddenStates)
            else (step, step)
        )
        if not task.out:
            result = done.result
            predicted = Predicted(message.session, message.call, result.tokens, result.scores, oldest, newest)
            return [Send(request.client, predicted)]
        stage = request.stage + 1
        target = message.route[stage]
        if self._server.stage_of(target) != stage:
            gone = NotServed(
                message.session, message.call, stage, "elsewhere", f"{target} does not serve stage {stage}"
            )
            return [Send(request.client, gone), Drop((task.out,))]
        onward = HiddenStates(
            client=request.client,
            session=message.session,
            call=message.call,
            position=message.position,
            count=request.count,
            stage=stage,
            route=message.route,
            scores=message.scores,
            oldest=oldest,
            newest=newest,
        )
        receipt = Passed(message.session, message.call, request.stage)
        return [Send(target, onward, (task.out,)), Drop((task.out,)), Send(request.client, receipt)]

    def on_failed(self, failed: Failed, now: float) -> list[Command]:
        """Whatever failed left keys and values that fit no text."""
        if self._running is None or self._running[0].id != failed.id:
            return []
        (task, request), self._running = self._running, None
        commands = self._forget([request.key]) + self._drop(request) + drop((task.out,) if task.out else ())
        return commands + self._decline(request, "refused", failed.reason) + self.go_on(now)

    def tick(self, now: float) -> list[Command]:
        commands = self._forget([key for key, kept in self._kept.items() if now >= kept.used_at + IDLE_S])
        if self._pending_at is None or now < self._pending_at:
            return commands
        self._pending_at = now + PENDING_S
        here = [*self._queue.values(), *([self._running[1]] if self._running is not None else [])]
        return commands + [
            Send(one.client, TextPending(one.message.session, one.message.call, one.stage)) for one in here
        ]

    # ------------------------------------------------------------------------------------------------------- words

    def _decline(self, request: Request, kind: str, reason: str) -> list[Command]:
        message = request.message
        fields = {"session": message.session, "call": message.call, "stage": request.stage}
        return [Send(request.client, NotServed(**fields, kind=kind, reason=reason[:TEXT]))]  # type: ignore[arg-type]

    def _drop(self, request: Request) -> list[Command]:
        return drop((request.blob,) if request.blob else ())

"""The boundary tensors that one replica keeps: they travel straight from server to server. For hops.py.

A tensor is named by its step, microbatch, stage and direction: every replica of a stage computes the same one, so any copy
will do and no attempt number is needed. Both ends of a boundary keep it until the step is committed, so that a lost hop is
redone alone. What a hop needs and is not here is awaited, or pulled from whom its owner names; what does not arrive is reported to
the owner, who knows where else it may be. Over the limit what was booked here goes first: the other end has
it too, and it can be computed again. The gradients made here cannot, not without booking twice: they stay, beyond the limit.
Left to others: what runs when (hops.py), who is asked (trainer.py), the tensors (the driver).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import NamedTuple

import msgspec

from shoal.core.latency import COLD_Bps, Latency
from shoal.core.messages import (
    AUDIT_CALL,
    Backward,
    BoundaryTensor,
    Command,
    Forward,
    Index,
    Peer,
    Send,
    Settings,
    Stage,
    TensorGone,
    TensorPending,
    TensorRequest,
    Withdraw,
)
from shoal.core.replica_state import ReplicaState, complain, drop
from shoal.core.trainer.routing import EXTENSIONS, PATIENCE

PULLS = 2  # of each holder: the first or its answer may be lost
SAID = 2  # requests for an audit in a row that are told that the tensor is on its way
COLD_MOST_S = 30.0  # that a tensor is waited for by what is said of its size, before any has come


class Key(NamedTuple):
    """The input of a microbatch at a stage, or the gradient of its output there."""

    step: int
    microbatch: Index
    stage: Stage
    gradient: bool


class HeldTensor(NamedTuple):
    """A blob, its size in bytes and who sent it; "": it was made here."""

    blob: str
    nbytes: int
    sender: Peer | str = ""


class AwaitedTensor(msgspec.Struct):
    """A tensor that a hop waits for, until `due` from the first of `turns`. From myself: another peer was asked to send it here."""

    sources: tuple[Peer, ...]
    turns: list[Peer]
    due: float
    calls: list[float]  # when it was awaited first, and when each Pull was sent
    coming: bool = False  # as its sender has said
    nbytes: int = 0  # likewise
    seen_at: float = 0.0  # when another of its sender's tensors had come, the last time that its hop's owner asked
    extensions: int = 0  # of `due`, for such tensors


def needs(message: Forward | Backward) -> dict[Key, tuple[Peer, ...]]:
    """What that hop reads from the activation store, its input first, and who are said to hold it."""
    needed = {}
    if message.input_from:
        needed[Key(message.step, message.index, message.stage, False)] = message.input_from
    if isinstance(message, Backward) and message.grad_from:
        needed[Key(message.step, message.index, message.stage, True)] = message.grad_from
    return needed


class ActivationStore:
    def __init__(self, name: Peer, settings: Settings, replica: ReplicaState) -> None:
        self.nbytes = 0  # all that is kept
        self.tensor_bytes = 0  # the largest boundary tensor so far, as it is sent
        self._bounded = 0  # of these, what the limit holds for
        self._name, self._settings, self._replica = name, settings, replica
        self.held: dict[Key, HeldTensor] = {}  # in the order of their arrival
        self.wants: dict[Key, AwaitedTensor] = {}
        self.failed: dict[Key, None] = {}  # what does not come
        self._no_room: dict[Key, None] = {}  # received, and not kept
        self._given_up: dict[Key, list[float]] = {}  # calls for what nothing waits for any more
        # By receiver, and whether for an audit: the number of the request that it was sent for, if the connection has held since
        self._sent: dict[Key, dict[tuple[Peer, bool], int]] = {}
        self._oldest = math.inf  # step of what may still wait for a line
        self._arrived: dict[Peer, float] = {}  # when a tensor came from that peer last
        self._usual = Latency()  # seconds from a want to its tensor; of real arrivals only, late ones too

    def __contains__(self, key: Key) -> bool:
        return key in self.held

    def __len__(self) -> int:
        return len(self.held)

    def blob(self, key: Key) -> str:
        return self.held[key].blob

    def size(self, key: Key) -> int:
        return self.held[key].nbytes if key in self.held else 0

    @property
    def full(self) -> bool:
        return self._bounded >= self._settings.activation_store_bytes

    @property
    def deadline(self) -> float | None:
        first = None  # a want or two: a loop is quicker than min()
        for want in self.wants.values():
            if first is None or want.due < first:
                first = want.due
        return first

    # ---------------------------------------------------------------------------------------------------- what is kept

    def put(self, key: Key, blob: str, nbytes: int, sender: str = "") -> list[Command]:
        """Keep what was made here, or has come from `sender`. A second copy is no use."""
        if key in self.held:
            return drop((blob,))
        self.held[key] = HeldTensor(blob, nbytes, sender)
        self.tensor_bytes = max(self.tensor_bytes, nbytes)
        self._no_room.pop(key, None)
        self._count(key, nbytes)
        return []

    def turn(self, everything: bool, read: Collection[str], goes_on: bool = False) -> list[Command]:
        """The step is over, or (`everything`) my replica is. Blobs that a task still `read`s go with the task. `goes_on`: only what is
        older than the view's step goes, hops do not notice."""
        view = self._replica.view
        step = -1 if view is None else view.step
        over = [key for key in self.held if everything or key.step < step]
        void: list[Command] = [Withdraw(view.epoch, step)] if view is not None and self._oldest < step else []
        self._oldest = max(self._oldest, step)
        if goes_on:
            return void + drop(tuple(blob for blob in map(self._remove, over) if blob not in read))
        self.wants.clear()
        self.failed.clear()
        self._no_room.clear()
        self._given_up.clear()
        self._sent.clear()
        self._arrived.clear()
        return void + drop(tuple(blob for blob in map(self._remove, over) if blob not in read))

    def make_room(self, used: Collection[Key], booked: Collection[Index], force: bool) -> dict[Key, HeldTensor]:
        """Let go of what can be missed until the limit is kept: of hops booked here; with `force` of any that none needs. The caller drops
        these blobs."""
        dropped: dict[Key, HeldTensor] = {}
        if not self.full:
            return dropped
        for always in (True, False):
            for key in [key for key in self.held if key not in used and not self._made_gradient(key)]:
                if not self.full or not (always or force):
                    break
                if not always or self._closed(key) or (key.microbatch in booked and self._of_now(key)):
                    dropped[key] = self.held[key]
                    self._remove(key)
                    self._no_room[key] = None
        return dropped

    def under_way(self, booked: Collection[Index]) -> bool:
        """Something is kept for a hop that is not booked here yet: booking it will free memory."""
        return any(key.microbatch not in booked and not self._made_gradient(key) for key in self.held)

    def _made_gradient(self, key: Key) -> bool:
        return key.gradient and key.stage != self._replica.stage

    def _of_now(self, key: Key) -> bool:
        return self._replica.view is not None and key.step == self._replica.view.work

    def _closed(self, key: Key) -> bool:
        """Of a step whose books are whole: only a death could ask for it again."""
        return self._replica.view is not None and key.step < self._replica.view.work

    def _remove(self, key: Key) -> str:
        held = self.held.pop(key)
        self._count(key, -held.nbytes)
        return held.blob

    def _count(self, key: Key, nbytes: int) -> None:
        self.nbytes += nbytes
        self._bounded += 0 if self._made_gradient(key) else nbytes

    # --------------------------------------------------------------------------------------------------- what is wanted

    def want(self, needed: dict[Key, tuple[Peer, ...]], now: float) -> list[Command]:
        """A hop that was taken needs these."""
        commands: list[Command] = []
        for key, sources in needed.items():
            if key in self.held:
                continue
            known = self.wants.get(key)
            if known is not None and known.sources == sources:
                continue
            others = [peer for peer in sources if peer != self._name] * PULLS
            mine = [self._name] if self._name in sources and key not in self._no_room else []
            self.wants[key] = AwaitedTensor(sources, [*mine, *others], now, [now])
            commands += self._ask(key, now)
        return commands

    def waits_for(self, needed: dict[Key, tuple[Peer, ...]]) -> Peer:
        """Who is to give what a hop lacks: whoever was asked, else whoever made it; '' if it lacks nothing."""
        for key in needed:
            want = self.wants.get(key)
            if want is not None and key not in self.held:
                return self._source(want)
        return ""

    def coming(self, needed: dict[Key, tuple[Peer, ...]]) -> bool:
        """Whether a tensor that a hop lacks is to come from a peer whose other tensors have come since this was asked last."""
        comes = False
        for key in needed:
            want = self.wants.get(key)
            if want is not None and key not in self.held:
                arrived_at = self._arrived.get(self._source(want), 0.0)
                comes |= arrived_at > max(want.calls[0], want.seen_at)
                want.seen_at = arrived_at
        return comes

    def _source(self, want: AwaitedTensor) -> Peer:
        """Who is to give it: whoever was asked, else whoever made it."""
        return next((peer for peer in (want.turns[0], *want.sources) if peer != self._name), self._name)

    def keep_wants(self, needed: Collection[Key]) -> None:
        """No hop needs the others any more."""
        self.wants = {key: want for key, want in self.wants.items() if key in needed}

    def take_failed(self) -> dict[Key, None]:
        failed, self.failed = self.failed, {}
        return failed

    def on_view(self, now: float) -> list[Command]:
        """Nobody waits for a peer that has left."""
        present, commands = self._replica.known.present, list[Command]()
        for key in [key for key, want in self.wants.items() if want.turns[0] not in present]:
            commands += self._ask(key, now)
        return commands

    def tick(self, now: float) -> list[Command]:
        commands: list[Command] = []
        for key, want in [(key, want) for key, want in self.wants.items() if want.due <= now]:
            patience_s = self.patience_s(want.nbytes)
            if want.extensions < EXTENSIONS and self._line_moves(self._source(want), patience_s, now):
                want.extensions += 1
                want.due = now + patience_s
            else:
                del want.turns[0]
                commands += self._ask(key, now)
        return commands

    def _line_moves(self, peer: Peer, patience_s: float, now: float) -> bool:
        """Another tensor of its came while this one was waited for: what it sent later comes later, and a copy would come last."""
        return now - self._arrived.get(peer, float("-inf")) < patience_s

    def _ask(self, key: Key, now: float) -> list[Command]:
        """The next in turn that is still there; when none is left, the tensor does not come."""
        want = self.wants[key]
        while want.turns and want.turns[0] not in self._replica.known.present:
            del want.turns[0]
        if not want.turns:
            self._given_up[key] = self.wants.pop(key).calls
            self.failed[key] = None
            return []
        want.due = now + self.patience_s(want.nbytes)
        if want.turns[0] == self._name:
            return []
        want.calls.append(now)
        return [Send(want.turns[0], TensorRequest(self._replica.epoch, *key, len(want.calls) - 1))]

    def patience_s(self, nbytes: int = 0) -> float:
        """For a tensor; before any has come, as its size says: a first step fills lines that nobody has measured."""
        usual_s = self._usual.value
        long_s = min(COLD_MOST_S, PATIENCE * nbytes / COLD_Bps) if usual_s is None else PATIENCE * usual_s
        return max(self._settings.min_request_timeout_s, long_s)

    # -------------------------------------------------------------------------------------------------------- messages

    def on_boundary(
        self, peer: Peer, message: BoundaryTensor, blobs: tuple[tuple[str, int], ...], fault: str, now: float
    ) -> list[Command]:
        """Of this step or the next one, for my stage, from a peer of the view; nothing else may fill my memory."""
        names, key = tuple(blob for blob, _ in blobs), key_of(message)
        if not self._admits(peer, message):
            return drop(names)
        if fault or len(blobs) != 1:
            tensor = (
                f"{'gradient' if message.gradient else 'input'} of microbatch {message.index} for stage {message.stage}"
            )
            commands = drop(names) + self._skip((peer, self._name), key, now)
            return commands + complain(self._replica, peer, f"{tensor}: {fault or f'{len(blobs)} blobs, not 1'}")
        self._arrived[peer] = now
        want = self.wants.pop(key, None)
        if want is None and self.full and not message.gradient:  # a gradient's hop is about to free memory
            self._no_room[key] = None
            return drop(names)  # its sender has it
        calls = self._given_up.pop(key, []) if want is None else want.calls
        if message.call < len(calls):
            self._usual.add(now - calls[message.call])
        return self.put(key, *blobs[0], peer)

    def _admits(self, peer: Peer, message: BoundaryTensor) -> bool:
        view, known = self._replica.view, self._replica.known
        if view is None or message.epoch != view.epoch or not view.step <= message.step <= view.work + 1:
            return False
        at_my_stage = known.present.get(self._name) == message.stage
        return peer in known.serving and at_my_stage and message.index < self._settings.count(message.step)

    def on_pull(self, peer: Peer, message: TensorRequest) -> list[Command]:
        view, key = self._replica.view, key_of(message)
        if view is None or (message.epoch, message.step) != (view.epoch, view.work):
            return []
        if peer not in self._replica.known.serving:
            return []
        if key not in self.held:
            return [Send(peer, TensorGone(message.epoch, *key))]
        audited = message.call >= AUDIT_CALL
        answered = self._sent.get(key, {}).get((peer, audited))
        if answered is not None and 0 < message.call - answered <= (SAID if audited else 1):
            # It waits for a line, as a second copy would
            return [Send(peer, TensorPending(message.epoch, *key, self.size(key)))]
        return self.send(peer, key, message.call)

    def on_coming(self, peer: Peer, message: TensorPending, now: float) -> list[Command]:
        """It gets as long again: another copy would only make the line longer."""
        want = self.wants.get(key_of(message))
        view = self._replica.view
        if want is None or view is None or message.epoch != view.epoch or want.turns[0] != peer or want.coming:
            return []
        want.coming, want.nbytes = True, message.nbytes
        want.turns.insert(0, peer)
        want.due = now + self.patience_s(want.nbytes)
        return []

    def on_unreachable(self, peer: Peer) -> None:
        for sent in self._sent.values():
            sent.pop((peer, False), None)
            sent.pop((peer, True), None)

    def on_gone(self, peer: Peer, message: TensorGone, now: float) -> list[Command]:
        view = self._replica.view
        return self._skip((peer,), key_of(message), now) if view is not None and message.epoch == view.epoch else []

    def _skip(self, peers: tuple[Peer, ...], key: Key, now: float) -> list[Command]:
        """From these that tensor does not come."""
        want = self.wants.get(key)
        if want is None:
            return []
        asked = want.turns[0] in peers
        want.turns = [other for other in want.turns if other not in peers]
        return self._ask(key, now) if asked else []

    def send(self, peer: Peer, key: Key, call: int = 0) -> list[Command]:
        """A kept tensor to whoever goes on with it, or has called for it."""
        view = self._replica.view
        assert view is not None
        self._oldest = min(self._oldest, key.step)
        self._sent.setdefault(key, {})[peer, call >= AUDIT_CALL] = call
        return [Send(peer, BoundaryTensor(view.epoch, *key, call), (self.blob(key),))]


def key_of(message: BoundaryTensor | TensorRequest | TensorPending | TensorGone) -> Key:
    return Key(message.step, message.index, message.stage, message.gradient)


def keys_of(messages: Iterable[Forward | Backward]) -> dict[Key, None]:
    return {key: None for message in messages for key in needs(message)}

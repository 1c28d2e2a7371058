"""Hops of another replica of my stage that I compute again and compare, since an owner asks for it. For hops.py.

What I compare comes from those who gave the hop its inputs and from whoever went on with its result, never from the replica that is
checked: it does not learn of a check, and cannot show other tensors than it has sent. So a difference is the fault of one of several, and
the complaint names them all (core/leader/findings.py judges). Nothing is booked or kept, and at most a few checks wait at a time, one for
each hop and step. docs/design/2026-11-24-spot-checks.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import msgspec

from shoal.core.messages import (
    BlobRef,
    BoundaryTensor,
    Check,
    Checked,
    Command,
    Complaint,
    Do,
    Done,
    Failed,
    Index,
    Peer,
    RunCheck,
    Send,
    Settings,
    Stage,
    TensorGone,
    TensorRequest,
    View,
)
from shoal.core.replica_state import TEXT, ReplicaState, drop, speaks_for
from shoal.core.server.activation_store import Key, key_of

MOST = 4  # checks that wait: each holds up to three boundary tensors
PATIENCE = 4  # times that of a hop which waits for a tensor
MOST_OTHERS = 16  # as many as a complaint can name
UNASKED = 2  # number of a request that is answered with the tensor, even where it was sent before


class Waiting(msgspec.Struct):
    """A check that was taken. `sources`: who has each tensor; the result's comes last."""

    check: Check
    owner: Peer
    tokens: tuple[str, ...]
    sources: dict[Key, Peer]
    due: float
    blobs: dict[Key, str] = {}

    @property
    def complete(self) -> bool:
        return len(self.blobs) == len(self.sources)

    @property
    def key(self) -> tuple[bool, Index]:
        """Its turn among the hops (jobs.Job.key): that of a forward."""
        return True, self.check.index

    @property
    def held(self) -> tuple[str, ...]:
        return self.tokens + tuple(self.blobs.values())


class Checks:
    def __init__(self, name: Peer, settings: Settings, serial: Iterator[int], replica: ReplicaState) -> None:
        self._name, self._settings, self._serial, self._replica = name, settings, serial, replica
        self._waiting: list[Waiting] = []
        self._running: dict[str, Waiting] = {}  # by task: at most one
        self._taken: set[tuple[Index, bool]] = set()  # in the step that is computed

    @property
    def running(self) -> bool:
        return bool(self._running)

    @property
    def deadline(self) -> float | None:
        return min((one.due for one in self._waiting), default=None)

    # --------------------------------------------------------------------------------------------------- what is asked

    def on_check(
        self, owner: Peer, check: Check, tokens: tuple[str, ...], fault: str, patience_s: float, now: float
    ) -> list[Command]:
        """`patience_s`: of a hop that waits for a tensor."""
        last = self._settings.stages - 1
        sources = sources_of(check, last)
        wanted = int(check.stage == 0 or (check.backward and check.stage == last))
        if fault or len(tokens) != wanted or not sources or not self._allowed(owner, check, sources):
            return drop(tokens)
        self._taken.add((check.index, check.backward))
        waiting = Waiting(check, owner, tokens, sources, now + PATIENCE * patience_s)
        self._waiting.append(waiting)
        return [Send(peer, TensorRequest(check.epoch, *key, UNASKED)) for key, peer in sources.items()]

    def _allowed(self, owner: Peer, check: Check, sources: dict[Key, Peer]) -> bool:
        """Of a hop of this step at my stage, whose owner asks, and once."""
        replica, view, serving = self._replica, self._replica.view, self._replica.known.serving
        if view is None or (check.epoch, check.step) != (view.epoch, view.work) or check.view > view.number:
            return False
        if not replica.able or serving.get(self._name) != check.stage or serving.get(check.of) != check.stage:
            return False
        if check.of == self._name or any(abs(serving.get(peer, -2) - check.stage) != 1 for peer in sources.values()):
            return False
        if not self._settings.spot_checks or check.index >= self._settings.microbatches:
            return False
        asked = (check.index, check.backward) in self._taken or len(self._waiting) >= MOST
        return not asked and speaks_for(view, check.index, owner, check.view)

    # --------------------------------------------------------------------------------------------------------- tensors

    def on_boundary(self, peer: Peer, message: BoundaryTensor, blobs: tuple[BlobRef, ...]) -> bool:
        """Take a tensor that a check waits for; False: none does."""
        key, view = key_of(message), self._replica.view
        if view is None or message.epoch != view.epoch or len(blobs) != 1:
            return False
        for one in self._waiting:
            if one.sources.get(key) == peer and key not in one.blobs:
                one.blobs[key] = blobs[0].id
                return True
        return False

    def on_gone(self, peer: Peer, message: TensorGone) -> list[Command]:
        key = key_of(message)
        return self._give_up([one for one in self._waiting if one.sources.get(key) == peer and key not in one.blobs])

    def tick(self, now: float) -> list[Command]:
        return self._give_up([one for one in self._waiting if one.due <= now])

    def on_view(self, before: View | None, view: View) -> list[Command]:
        """Of a step that is over, or of peers that have left, nothing can be compared. What runs is compared still."""
        if before is None or (before.epoch, before.work, before.since) != (view.epoch, view.work, view.since):
            self._taken.clear()
        serving = self._replica.known.serving
        void = [
            one
            for one in self._waiting
            if (one.check.epoch, one.check.step) != (view.epoch, view.work)
            or not {one.owner, one.check.of, *one.sources.values()} <= serving.keys()
        ]
        return self._give_up(void)

    def forget(self) -> list[Command]:
        """What I hold is void, or another version."""
        return self._give_up(self._waiting)

    def _give_up(self, given_up: list[Waiting]) -> list[Command]:
        self._waiting = [one for one in self._waiting if one not in given_up]
        return [command for one in given_up for command in (*drop(one.held), self._answer(one, "unable"))]

    # ----------------------------------------------------------------------------------------------------------- running

    @property
    def next(self) -> Waiting | None:
        """The oldest microbatch's that can run."""
        return min((one for one in self._waiting if one.complete), key=lambda one: one.key, default=None)

    def start(self, waiting: Waiting) -> list[Command]:
        self._waiting.remove(waiting)
        check, task = waiting.check, f"s/{next(self._serial)}"
        self._running[task] = waiting
        tensors = [waiting.blobs[key] for key in waiting.sources]
        result = tensors.pop()
        x, *more = (*waiting.tokens, *tensors) if check.stage == 0 else (*tensors, *waiting.tokens)
        grad = more[0] if more else ""
        return [Do(RunCheck(task, check.step, check.index, check.stage, check.backward, x, grad, result))]

    def on_done(self, done: Done) -> list[Command] | None:
        """None: not a task of mine."""
        one = self._running.pop(done.id, None)
        if one is None:
            return None
        check, distance = one.check, done.result.distance
        if check.loss is not None and done.result.loss is not None:
            distance = max(distance, abs(done.result.loss - check.loss) / max(1.0, abs(done.result.loss)))
        commands = drop(one.held)
        if math.isfinite(distance) and distance <= self._settings.spot_tolerance:
            return [*commands, self._answer(one, "same")]
        return [*commands, *self._complain(one, distance), self._answer(one, "differs")]

    def on_failed(self, failed: Failed) -> list[Command] | None:
        """None: not a task of mine."""
        one = self._running.pop(failed.id, None)
        return None if one is None else [*drop(one.held), self._answer(one, "unable")]

    def _answer(self, one: Waiting, outcome: Literal["same", "differs", "unable"]) -> Command:
        check = one.check
        return Send(
            one.owner,
            Checked(check.epoch, check.step, check.index, check.stage, check.backward, check.of, outcome),
        )

    def _complain(self, one: Waiting, distance: float) -> list[Command]:
        check, leader = one.check, self._replica.leader
        if leader is None:
            return []
        known = dict.fromkeys((one.owner, *one.sources.values(), *check.others))
        others = tuple(peer for peer in known if peer != self._name)[:MOST_OTHERS]
        what = "input gradient" if check.backward else "output"
        reason = f"{what} of stage {check.stage} for microbatch {check.index} differs by {distance:.2g} of its norm"
        return [Send(leader, Complaint(check.of, reason[:TEXT], "differs", others))]


def sources_of(check: Check, last: Stage) -> dict[Key, Peer]:
    """The tensors that are needed and who has them, the result last; none where there is nothing to compare, or nobody has one."""
    step, index, stage = check.step, check.index, check.stage
    sources = {Key(step, index, stage, False): check.input_from} if stage > 0 else {}
    if check.backward:
        if stage < last:
            sources[Key(step, index, stage, True)] = check.grad_from
        result = Key(step, index, stage - 1, True)
    else:
        result = Key(step, index, stage + 1, False)
    compared = stage > 0 if check.backward else stage < last
    sources[result] = check.result_from
    return sources if compared and all(sources.values()) else {}

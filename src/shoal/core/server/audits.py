"""Audited steps, a replica's part: what its hops have used and made, and the hops of another that it computes again. For hops.py.

The leader asks when the parts of a round cannot be changed any more (core/leader/audits.py judges). Inputs come from those who made them,
tokens from the data, nothing from the replica that is audited. Nothing is booked or kept. What goes for want of room is described
before it does. docs/design/2026-11-24-audited-steps.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import msgspec

from shoal.core.allreduce.checked import SummedChunk, plus
from shoal.core.messages import (
    AUDIT_CALL,
    AUDIT_RECORDS,
    AuditAnswer,
    AuditedHop,
    AuditRequest,
    BlobRef,
    BoundaryTensor,
    Command,
    Describe,
    Do,
    Done,
    Drop,
    EndAudit,
    Failed,
    Fetch,
    Index,
    Message,
    Peer,
    Recomputed,
    RecomputedHop,
    RecomputeRequest,
    RunAudit,
    Send,
    Settings,
    Sketch,
    TensorGone,
    TensorPending,
    TensorRecord,
    TensorRequest,
    View,
)
from shoal.core.replica_state import ReplicaState, drop
from shoal.core.server.activation_store import ActivationStore, HeldTensor, Key, key_of
from shoal.core.server.jobs import Job

AHEAD = 4  # hops whose inputs are here or on their way: each is up to two boundary tensors
TRIES = 4  # requests for one tensor


class Hop(msgspec.Struct, eq=False):
    """Of another replica, to be computed again. `sources`: who has its input and the gradient of its output, in that order."""

    of: AuditedHop
    sources: dict[Key, Peer]
    needs_tokens: bool
    blobs: dict[Key, str] = {}
    tokens: str = ""
    fetching: bool = False
    tries: int = 0
    said: int = 0  # the newest try upon which an input was said to be on its way
    due: float = 0.0

    @property
    def complete(self) -> bool:
        return len(self.blobs) == len(self.sources) and bool(self.tokens) == self.needs_tokens

    @property
    def held(self) -> tuple[str, ...]:
        return (*self.blobs.values(), *((self.tokens,) if self.tokens else ()))


class Audit(msgspec.Struct, eq=False):
    """All booked hops of one replica."""

    request: RecomputeRequest
    leader: Peer
    hops: list[Hop]  # not computed yet
    chunks: tuple[SummedChunk, ...]
    done: list[RecomputedHop] = []
    task: str = ""  # that runs
    running: Hop | None = None
    began: bool = False


class Audits:
    def __init__(
        self, name: Peer, settings: Settings, serial: Iterator[int], replica: ReplicaState, store: ActivationStore
    ) -> None:
        self._name, self._settings, self._serial, self._replica, self._store = name, settings, serial, replica, store
        self._tokens: dict[Key, HeldTensor] = {}  # of booked hops
        self._gone: dict[Key, TensorRecord] = {}  # for which there was no room any more
        self._unknown = False  # what went could not be described: nothing is said in this step
        # By task; None: of a step that is over
        self._describing: dict[str, tuple[AuditRequest | None, list[TensorRecord]] | None] = {}
        self._answer: tuple[AuditAnswer, ...] = ()
        self.jobs: list[Audit] = []  # the first one is worked at
        self._fetches: dict[str, Hop | None] = {}  # by task; None: nobody wants it any more
        self._ended: dict[tuple[int, Peer], Recomputed] = {}  # answers of this step

    @property
    def running(self) -> bool:
        return bool(self.jobs) and any(job.task for job in self.jobs)

    @property
    def deadline(self) -> float | None:
        return min((hop.due for hop in self._waiting()), default=None)

    def _waiting(self) -> list[Hop]:
        return [hop for hop in self._ahead() if hop.tries and not hop.complete]

    def _ahead(self) -> list[Hop]:
        return self.jobs[0].hops[:AHEAD] if self.jobs else []

    # ---------------------------------------------------------------------------------------- what my hops have used

    def keep_tokens(self, job: Job) -> list[Command]:
        """A backward that was given these, if any, is booked."""
        of, stage = job.message, self._replica.stage
        if not self._settings.spot_checks or of.index >= self._settings.microbatches or len(job.blobs) != 1:
            return drop(job.blobs)
        key = Key(
            of.step, of.index, stage, stage > 0
        )  # of the first stage its input, of the last the gradient of its output
        self._tokens[key] = HeldTensor(job.blobs[0], 0, job.sender)
        return []

    def before_drop(self, tensors: dict[Key, HeldTensor], booked: Collection[Index]) -> list[Command]:
        """There is no room for these any more: what booked hops have used and what was made here is described before it goes."""
        wanted = {
            key: held
            for key, held in tensors.items()
            if self._settings.spot_checks and (key.stage != self._replica.stage or key.microbatch in booked)
        }
        return self._describe(wanted, None) if wanted else []

    def on_request(self, message: AuditRequest, booked: Collection[Index]) -> list[Command]:
        view = self._replica.view
        if view is None or (message.epoch, message.step) != (view.epoch, view.step) or not self._settings.spot_checks:
            return []
        if self._unknown or any(one is not None and one[0] == message for one in self._describing.values()):
            return []
        if self._answer and self._answer[0].round == message.round:
            return self._tell(*self._answer)
        tensors = {
            key: held
            for key, held in (self._store.held | self._tokens).items()
            if (key.step == message.step and key.microbatch < self._settings.microbatches)
            and (key.stage != self._replica.stage or key.microbatch in booked)
        }
        return self._describe(tensors, message)

    def _describe(self, tensors: dict[Key, HeldTensor], request: AuditRequest | None) -> list[Command]:
        records = [
            TensorRecord(key.microbatch, key.stage, key.gradient, "", held.sender) for key, held in tensors.items()
        ]
        task = self._id()
        self._describing[task] = request, records
        blobs = tuple(held.blob for held in tensors.values())
        return [Do(Describe(task, blobs, request.seed if request is not None else ""))]

    def _on_described(self, done: Done, request: AuditRequest | None, records: list[TensorRecord]) -> list[Command]:
        sketches = done.result.sketches or (Sketch(),) * len(records)
        described = [
            msgspec.structs.replace(record, digest=digest, sketch=sketch)
            for record, digest, sketch in zip(records, done.result.digests, sketches, strict=True)
        ]
        view = self._replica.view
        if request is None:
            step = view.step if view is not None else 0
            self._gone.update({Key(step, one.index, one.stage, one.gradient): one for one in described})
            return []
        if self._unknown or view is None or (request.epoch, request.step) != (view.epoch, view.step):
            return []  # a list without what is unknown would accuse whoever says to have used it
        every, key = (*described, *self._gone.values()), (request.epoch, request.step, request.round)
        pieces = [every[at : at + AUDIT_RECORDS] for at in range(0, max(1, len(every)), AUDIT_RECORDS)]
        self._answer = tuple(AuditAnswer(*key, piece, number, len(pieces)) for number, piece in enumerate(pieces))
        return self._tell(*self._answer)

    def _tell(self, *messages: Message) -> list[Command]:
        leader = self._replica.leader
        return [Send(leader, message) for message in messages] if leader is not None else []

    # --------------------------------------------------------------------------------------------- hops of another's

    def on_recompute(
        self, leader: Peer, message: RecomputeRequest, chunks: tuple[SummedChunk, ...], now: float
    ) -> list[Command]:
        """`chunks`: of the round that it belongs to."""
        view, serving = self._replica.view, self._replica.known.serving
        if view is None or (message.epoch, message.step) != (view.epoch, view.step) or not self._replica.able:
            return []
        if answer := self._ended.get((message.round, message.of)):
            return [Send(leader, answer)]
        if any(job.request == message for job in self.jobs):
            return []
        if message.of == self._name or serving.get(message.of) != serving.get(self._name) or not message.hops:
            return []
        hops = [self._hop(one) for one in message.hops]
        self.jobs.append(Audit(message, leader, hops, chunks))
        return self._go_on(now)

    def _hop(self, of: AuditedHop) -> Hop:
        step, stage, last = self._replica.step, self._replica.stage, self._settings.stages - 1
        sources = {Key(step, of.index, stage, False): of.input_from} if stage else {}
        if stage < last:
            sources[Key(step, of.index, stage, True)] = of.grad_from
        return Hop(of, sources, stage in (0, last))

    def _go_on(self, now: float) -> list[Command]:
        """Ask for what the next hops need."""
        commands: list[Command] = []
        for hop in self._ahead():
            if not hop.tries:
                commands += self._ask(hop, now)
        return commands

    def _ask(self, hop: Hop, now: float) -> list[Command]:
        call, hop.tries, hop.due = AUDIT_CALL + hop.tries, hop.tries + 1, now + self._store.patience_s()
        epoch = self._replica.epoch
        commands: list[Command] = [
            Send(peer, TensorRequest(epoch, *key, call)) for key, peer in hop.sources.items() if key not in hop.blobs
        ]
        if hop.needs_tokens and not hop.fetching:
            hop.fetching, task = True, self._id()
            self._fetches[task] = hop
            commands.append(Do(Fetch(task, self._replica.step, hop.of.index, f"{task}/x")))
        return commands

    def on_boundary(self, peer: Peer, message: BoundaryTensor, blobs: tuple[BlobRef, ...]) -> bool:
        """Take a tensor that a hop waits for; False: none does."""
        key, view = key_of(message), self._replica.view
        if view is None or message.epoch != view.epoch or len(blobs) != 1:
            return False
        for hop in self._waiting():
            if hop.sources.get(key) == peer and key not in hop.blobs:
                hop.blobs = {**hop.blobs, key: blobs[0].id}
                return True
        return False

    def on_coming(self, peer: Peer, message: TensorPending, now: float) -> None:
        """It waits for its line: twice as long again each time."""
        key, view = key_of(message), self._replica.view
        for hop in self._waiting() if view is not None and message.epoch == view.epoch else ():
            if hop.sources.get(key) == peer and key not in hop.blobs and hop.said < hop.tries:
                hop.said = hop.tries
                hop.due = max(hop.due, now + 2 ** (hop.tries - 1) * self._store.patience_s(message.nbytes))

    def on_gone(self, peer: Peer, message: TensorGone, now: float) -> list[Command]:
        key = key_of(message)
        lost = any(hop.sources.get(key) == peer and key not in hop.blobs for hop in self._waiting())
        return self._end(self.jobs[0], now) if lost else []

    def tick(self, now: float) -> list[Command]:
        commands: list[Command] = []
        for hop in [hop for hop in self._waiting() if hop.due <= now]:
            if hop.tries >= TRIES:
                return commands + self._end(self.jobs[0], now)
            commands += self._ask(hop, now)
        return commands

    def on_view(self, view: View, now: float) -> list[Command]:
        """Of the hops of one that has left, or whose inputs have, nothing is said."""
        serving, commands = self._replica.known.serving, list[Command]()
        for job in list(self.jobs):
            wanted = {job.request.of, *(peer for hop in job.hops for peer in hop.sources.values())}
            if not wanted <= serving.keys():
                commands += self._end(job, now)
        return commands

    def forget(self) -> list[Command]:
        """The step is over, or what I hold of it is void."""
        tokens = tuple(held.blob for held in self._tokens.values())
        commands = drop(tokens)
        for job in self.jobs:
            commands += self._let_go(job)
        self._tokens, self._gone, self._answer, self.jobs, self._ended = {}, {}, (), [], {}
        self._unknown, self._describing = False, dict.fromkeys(self._describing)
        return commands

    def _let_go(self, job: Audit) -> list[Command]:
        hops = [*job.hops, *([job.running] if job.running is not None else [])]
        self._fetches = {task: None if hop in hops else hop for task, hop in self._fetches.items()}
        commands = drop(tuple(blob for hop in job.hops for blob in hop.held))
        return [*commands, Do(EndAudit(self._id()))] if job.began else commands

    def _end(self, job: Audit, now: float) -> list[Command]:
        """I cannot do it."""
        self.jobs.remove(job)
        return [*self._let_go(job), *self._answered(job, (), ()), *self._go_on(now)]

    def _answered(self, job: Audit, hops: tuple[RecomputedHop, ...], parts: tuple[Sketch, ...]) -> list[Command]:
        of = job.request
        answer = Recomputed(of.epoch, of.step, of.round, of.of, hops, parts)
        self._ended[of.round, of.of] = answer
        return [Send(job.leader, answer)]

    # ----------------------------------------------------------------------------------------------------------- tasks

    def start(self) -> list[Command]:
        """The next hop, if its inputs are here and none runs."""
        if self.running or not self.jobs:
            return []
        job = self.jobs[0]
        hop = next((hop for hop in self._ahead() if hop.complete), None)
        if hop is None:
            return []
        job.hops.remove(hop)
        job.task, job.running = self._id(), hop
        x, *more = (hop.tokens, *hop.blobs.values()) if self._replica.stage == 0 else (*self._in_order(hop), hop.tokens)
        first, job.began, request = not job.began, True, job.request
        grad = more[0] if more else ""
        task = RunAudit(job.task, request.step, hop.of.index, self._replica.stage, x, grad, request.seed, first)
        return [Do(task), Drop(hop.held)]

    def _in_order(self, hop: Hop) -> list[str]:
        return [hop.blobs[key] for key in hop.sources]

    def on_done(self, done: Done, now: float) -> list[Command] | None:
        """None: not a task of mine."""
        if done.id in self._describing:
            described = self._describing.pop(done.id)
            return self._on_described(done, *described) if described is not None else []
        if done.id in self._fetches:
            hop, tokens = self._fetches.pop(done.id), f"{done.id}/x"
            if hop is None:
                return [Drop((tokens,))]
            hop.tokens = tokens
            return []
        job = next((job for job in self.jobs if job.task == done.id), None)
        if job is None:
            return None
        return self._on_hop(job, done, now) if job.running is not None else self._on_parts(job, done, now)

    def _on_hop(self, job: Audit, done: Done, now: float) -> list[Command]:
        assert job.running is not None
        result, index = done.result, job.running.of.index
        (tokens, x, grad), (output, gradient) = result.digests, result.sketches
        job.done = [*job.done, RecomputedHop(index, tokens, x, grad, output, gradient, result.loss)]
        job.task, job.running = "", None
        if job.hops:
            return self._go_on(now)
        job.task = self._id()
        bounds = (*(chunk.start for chunk in job.chunks), *(chunk.stop for chunk in job.chunks[-1:]))
        return [Do(EndAudit(job.task, bounds, tuple(chunk.digest for chunk in job.chunks)))]

    def _on_parts(self, job: Audit, done: Done, now: float) -> list[Command]:
        parts: dict[int, Sketch] = {}
        for chunk, sketch in zip(job.chunks, done.result.sketches, strict=True):
            parts[chunk.owner] = plus((parts.get(chunk.owner, Sketch()), sketch))
        self.jobs.remove(job)
        return [*self._answered(job, tuple(job.done), tuple(parts[at] for at in sorted(parts))), *self._go_on(now)]

    def on_failed(self, failed: Failed, now: float) -> list[Command] | None:
        """None: not a task of mine."""
        if failed.id in self._describing:
            described = self._describing.pop(failed.id)
            self._unknown |= described is not None and described[0] is None
            return []
        if failed.id in self._fetches:
            hop = self._fetches.pop(failed.id)
            job = next((job for job in self.jobs if hop in job.hops), None)
            return self._end(job, now) if job is not None else []
        job = next((job for job in self.jobs if job.task == failed.id), None)
        return None if job is None else self._end(job, now)

    def _id(self) -> str:
        return f"s/{next(self._serial)}"

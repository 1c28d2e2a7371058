"""A replica of one stage: what agreed views, the leader's rounds and commits do to the state held here.

For peer.py, which shows it agreed views and messages and reports its books to the leader. Left to others: which hop runs and what is
booked (hops.py), averaging (rounds.py), checkpoints (shards.py), how the state is downloaded (transfer.py), who owns what (the view),
and tensors: the driver carries out tasks in the order in which they are given.
"""

from __future__ import annotations

from itertools import count

from shoal.core.allreduce.rounds import Rounds
from shoal.core.leader.ledger import trained
from shoal.core.messages import (
    Apply,
    AuditRequest,
    Backward,
    BlobRef,
    BookerRequest,
    Booking,
    BooksRequest,
    BoundaryTensor,
    Cancel,
    Command,
    Committed,
    Do,
    Done,
    Failed,
    Forward,
    GatherChunk,
    Holding,
    Message,
    Note,
    Peer,
    PublishRequest,
    Query,
    Recall,
    RecomputeRequest,
    ReduceChunk,
    Resend,
    Reset,
    Round,
    SaveRequest,
    Settings,
    Share,
    TensorGone,
    TensorPending,
    TensorRequest,
    View,
)
from shoal.core.replica_state import ReplicaState, ViewChange, change_of, drop, is_fenced, member_of
from shoal.core.server.early import EarlyRequests
from shoal.core.server.hops import Hops
from shoal.core.server.shards import Shards
from shoal.core.server.verdict import Request
from shoal.core.timers import soonest
from shoal.core.transfer.catch_up import CatchUp

REPEAT_BEATS = 4  # between two calls for a fresh state


class Server:
    """peer.py sets `leader` before each call. `changed` asks for a heartbeat at once; `stale` says in words why this replica needs
    its stage's state again; peer.py clears both when it has reported them."""

    def __init__(self, name: Peer, settings: Settings) -> None:
        self.name, self.settings = name, settings
        self.changed = False
        self.stale = ""
        self._replica = ReplicaState(staleness=settings.staleness)
        self._serial = count()
        self._hops = Hops(name, settings, self._serial, self._replica)
        self._rounds = Rounds(name, settings, self._serial, self._replica)
        self._catch_up = CatchUp(name, settings, self._serial, self._replica)
        self._early = EarlyRequests(self._replica, settings.queue_limit)
        self._shards = Shards(self._serial)
        self._round: tuple[Peer, Round] | None = None  # received before its view or version, or while a backward ran
        self._retell_at: float | None = None
        self._kept: tuple[Holding, int, str] | None = None  # what I held when I was evicted; its length and digest
        self._unreported = False  # bookings that the leader gets with the next heartbeat

    # ---------------------------------------------------------------------------------------------------- questions

    @property
    def leader(self) -> Peer | None:
        return self._replica.leader

    @leader.setter
    def leader(self, peer: Peer | None) -> None:
        self._replica.leader = peer

    @property
    def has_state(self) -> bool:
        return self._replica.has_state

    @property
    def ready(self) -> bool:
        return self._replica.ready

    @property
    def stage(self) -> int:
        return self._replica.stage

    @property
    def step(self) -> int:
        return self._replica.step

    @property
    def epoch(self) -> int:
        return self._replica.epoch

    @property
    def held(self) -> tuple[int, int] | None:
        """Epoch and stage of the state held here, if it is what the run agreed on."""
        replica = self._replica
        return (replica.epoch, replica.stage) if replica.has_state and not replica.unfit else None

    @property
    def digest(self) -> str:
        return self._replica.digest

    @property
    def busy(self) -> bool:
        """A hop of training runs, or could."""
        return self._hops.busy

    def stage_of(self, peer: Peer) -> int | None:
        """The stage that this member of the view serves."""
        return self._replica.known.serving.get(peer)

    @property
    def work(self) -> int:
        """The step that is computed, as far as I know."""
        view = self._replica.view
        return view.work if view is not None else 0

    @property
    def books(self) -> tuple[Booking, ...]:
        """Of the step that is computed."""
        return self._hops.books(self.work)

    @property
    def closed(self) -> tuple[Booking, ...]:
        """Of the step before it, until that is committed."""
        return self._hops.books(self.work - 1)

    @property
    def queue_s(self) -> float:
        return self._hops.queue_s

    @property
    def tensor_bytes(self) -> int:
        """Of a boundary tensor; 0 before the first."""
        return self._hops.store.tensor_bytes

    @property
    def gradient(self) -> int:
        """Values of the stage's flat gradient; 0 without its state."""
        return self._replica.length if self._replica.has_state else 0

    @property
    def rate(self) -> float:
        return self._hops.pace.rate

    @property
    def line_rates(self) -> dict[Peer, int]:
        """Of my stage's replicas, as the last round said."""
        return self._rounds.line_rates

    @property
    def deadline(self) -> float | None:
        hops, rounds, catch_up = self._hops, self._rounds, self._catch_up  # asked after every event of every peer
        first = hops.deadline if hops.store.wants or hops.audits.jobs else None
        if rounds.current is not None:
            first = soonest(first, rounds.deadline)
        if catch_up.commits or self._retell_at is not None:
            first = soonest(first, catch_up.deadline, self._retell_at)
        return first

    @property
    def since(self) -> int:
        """The oldest version of my stage's state that can be brought up to date with the sums received."""
        return self._catch_up.since

    def hurries(self, peer: Peer) -> bool:
        """What that joiner waits for is urgent."""
        return self._replica.hurries(peer)

    def rests_on(self, step: int) -> list[Command]:
        """A state of that version is on its way: sums of older steps are not needed."""
        return self._catch_up.rests_on(step)

    def hears(self, state_s: float, now: float) -> None:
        """A chunk of the state came, all of which takes about so long."""
        self._catch_up.hears(state_s, now)

    @property
    def unfit(self) -> str:
        """Why the state held here is not what the run agreed on; '' while it is."""
        return self._replica.unfit

    def vouches(self, last: Committed) -> bool:
        """I have reported the gradient of my stage that this commits, of the same microbatches."""
        return self._rounds.holds(last) and self._rounds.shares == last.groups[self.stage]

    @property
    def kept_bytes(self) -> int:
        """Boundary tensors kept for the step."""
        return self._hops.store.nbytes

    # -------------------------------------------------------------------------------------------------------- state

    def load_state(self, stage: int, step: int, epoch: int, length: int, digest: str, now: float) -> list[Command]:
        """The stage's state stands, freshly built: its sum is empty."""
        commands, replica = self._forget(), self._replica
        if stage != replica.stage:
            self._hops.pace.measure_anew()
        replica.has_state, replica.stage, replica.step, replica.epoch = True, stage, step, epoch
        replica.length, replica.digest, replica.unfit, replica.applying = length, digest, "", None
        self.stale, self._retell_at, self.changed = "", None, True
        return commands + self._check(now) + self._continue(now)

    def stop_catching_up(self, view: View, now: float) -> list[Command]:
        """`view` lists this peer no more: the sums that it received as a joiner are void."""
        return self._catch_up.on_view(view, now)

    def drop_state(self, *, keep: bool = False) -> list[Command]:
        """The state held here is void; or, with `keep`, good for nothing but to come back with (`take_back`)."""
        replica = self._replica
        held = Holding(epoch=replica.epoch, stage=replica.stage, step=replica.step)
        self._kept = (held, replica.length, replica.digest) if keep and replica.ready else None
        commands = self._early.forget() + (self._forget(empty_sum=True) if replica.has_state else [])
        replica.has_state, replica.digest, replica.unfit, replica.applying = False, "", "", None
        self.stale, self._retell_at, self.changed = "", None, True
        self._shards.kept = None
        return commands

    @property
    def holding(self) -> Holding | None:
        """The state that I was evicted with, as long as nothing has replaced it."""
        return self._kept[0] if self._kept is not None else None

    def take_back(self, view: View, stage: int, now: float) -> list[Command] | None:
        """Serve with the state that I was evicted with, if that is what the view's epoch goes on with; else None."""
        kept, self._kept = self._kept, None
        if kept is None or kept[0].stage != stage or not view.keeps(kept[0]):
            return None
        return self.load_state(stage, view.step, view.epoch, kept[1], kept[2], now)

    def _need_state(self, reason: str, now: float) -> list[Command]:
        self._replica.unfit, self.changed = reason, True
        self._call_stale(now)
        return [Note("state", f"stage {self.stage} must be downloaded again: {reason}")]

    def _call_stale(self, now: float) -> None:
        """Repeated, since the message that peer.py makes of it may vanish. A joiner's sync sees to itself."""
        self._retell_at = now + REPEAT_BEATS * self.settings.heartbeat_s
        view = self._replica.view
        if view is not None and member_of(view.members, self.name):
            self.stale = self._replica.unfit

    def _forget(self, empty_sum: bool = False, everything: bool = True) -> list[Command]:
        """Let go of everything that belongs to the step: it is over, or what I hold of it is void."""
        self.changed = self.changed or bool(self.books)
        commands = self._rounds.turn(everything)
        drops, dirty = self._hops.forget(everything)
        reset: list[Command] = [Do(Reset(self._id()))] if empty_sum and dirty else []
        return commands + drops + reset

    def _continue(self, now: float) -> list[Command]:
        """What may go on after anything has changed: a round that waited, questions, the next hop."""
        commands = (self._try_round(now) if self._round is not None else []) + self._catch_up.go_on()
        for held in self._early.ripe() if self._early.held else ():
            commands += self._hops.on_hop(held, now)
        commands += self._hops.answer_asks() + self._hops.start(self._rounds.cutting)
        if self._unreported and not self._hops.running(self.work):  # else the step is not complete
            self.changed, self._unreported = True, False
        return commands

    def _check(self, now: float) -> list[Command]:
        """Say so when the state held here can no longer be brought to the view's step."""
        replica, view = self._replica, self._replica.view
        if not replica.ready or view is None or (replica.epoch, replica.step) >= (view.epoch, view.step):
            return []
        if self._catch_up.active and replica.epoch == view.epoch and replica.step >= self._catch_up.since:
            return []
        return self._need_state(f"holds step {replica.step} and not what led to step {view.step}", now)

    # -------------------------------------------------------------------------------------------------------- views

    def on_view(self, view: View, now: float) -> list[Command]:
        replica, before = self._replica, self._replica.view
        if before is not None and view.number < before.number:
            return []
        change = change_of(self.name, replica, before, view)
        replica.adopt(view)
        match change:
            case ViewChange.STATE_VOID:
                commands = self.drop_state()
                me = member_of(view.members + view.joining, self.name)
                if view.started and member_of(view.members, self.name) == me:  # the others train: I must come in anew
                    replica.unfit = f"holds nothing that epoch {view.epoch} began with"
                    self._call_stale(now)
            case ViewChange.EPOCH_KEEPS_STATE:
                replica.epoch, self.changed = view.epoch, True
                commands = self._forget(empty_sum=True)
            case ViewChange.STEP:
                commands = self._next_step(before, view)
            case ViewChange.FENCED:
                commands = self._forget(empty_sum=True)  # others compute again what I had booked
            case ViewChange.SAME_STEP:
                assert before is not None
                commands = self._same_step(before, view)
        commands += self._catch_up.on_view(view, now)
        return commands + self._hops.on_view(before, view, now) + self._check(now) + self._continue(now)

    def _same_step(self, before: View, view: View) -> list[Command]:
        commands = self._rounds.on_view(view)
        if (before.work, before.since) != (view.work, view.since):
            commands += self._hops.turn(before, view)
        if view.finished:  # what held-out samples were measured with
            commands += self._hops.forget(everything=True)[0]
        return commands

    def _next_step(self, before: View | None, view: View) -> list[Command]:
        """Do to the parameters what was committed, or say that I cannot."""
        replica, last = self._replica, view.last
        held = last is not None and (bool(last.skipped) or self._rounds.holds(last))
        if not self.settings.staleness or before is None or before.epoch != view.epoch:
            commands = self._forget(everything=False)
        elif is_fenced(self.name, before, view):
            commands = self._forget(empty_sum=True)
        else:
            self.changed = self.changed or bool(self.books)
            commands = self._rounds.turn(everything=False) + self._hops.turn(before, view)
        if not replica.ready or last is None or not held or replica.step + 1 != view.step:
            return commands  # there already, or `_check` sees what is to be done
        scale = self.settings.scale(last.counted)
        number = last.round_of(replica.stage)
        replica.applying = Apply(self._id(), replica.step, number, last.norm, last.save, bool(last.skipped), scale)
        return [*commands, Do(replica.applying)]

    # ------------------------------------------------------------------------------------------------------- events

    def on_message(
        self, peer: Peer, message: Message, blobs: tuple[BlobRef, ...], fault: str, now: float
    ) -> list[Command]:
        names = tuple([blob.id for blob in blobs]) if blobs else ()
        match message:
            case Forward() | Backward():
                request = Request(peer, message, names, fault)
                if self._early.keep(request):
                    return []
                return self._hops.on_hop(request, now) + self._hops.start(self._rounds.cutting)
            case BoundaryTensor() | TensorRequest() | TensorPending() | TensorGone():
                return self._hops.on_tensor(peer, message, blobs, fault, now) + self._hops.start(self._rounds.cutting)
            case GatherChunk() if message.to_joiner:
                return self._catch_up.take(peer, message, blobs, fault, now) + self._continue(now)
            case ReduceChunk() | GatherChunk() | Resend():
                return self._rounds.on_message(peer, message, names, fault, now)
            case Recall() | Cancel():
                commands = self._hops.on_cancel(peer, message)
            case Query():
                commands = self._hops.on_query(peer, message)
            case BooksRequest():
                commands = self._hops.on_ask_books(peer, message)
            case Round():
                commands = self._on_round(peer, message, now)
            case AuditRequest():
                commands = self._hops.on_audit(message)
            case RecomputeRequest():
                chunks = self._rounds.summed(message.exchange)
                commands = self._hops.audits.on_recompute(peer, message, chunks, now)
            case SaveRequest() | PublishRequest():
                commands = self._on_ask_shard(peer, message)
            case _:
                commands = []
        return commands + drop(names)

    def on_who_booked(self, peer: Peer, asked: BookerRequest) -> list[Command]:
        """The leader wonders what a hop that an owner waits for here waits for."""
        return self._hops.on_who_booked(peer, asked)

    def on_unreachable(self, peer: Peer) -> None:
        """What was on its way there is lost."""
        self._hops.on_unreachable(peer)
        self._rounds.on_unreachable(peer)

    def on_done(self, done: Done, now: float) -> list[Command]:
        work, applying = self.work, self._replica.applying
        booked, closed = len(self._hops.books(work)), len(self._hops.books(work - 1))
        commands = self._hops.on_done(done, now)
        self.changed = self.changed or len(self._hops.books(work - 1)) > closed
        self._unreported = self._unreported or len(self._hops.books(work)) > booked
        if commands is None and applying is not None and applying.id == done.id:
            commands = self._applied(applying, done)
        if commands is None:
            commands = self._catch_up.on_done(done)
        if commands is None:
            commands = self._shards.on_done(done) + self._rounds.on_done(done, now)
        return commands + self._check(now) + self._continue(now)

    def on_failed(self, failed: Failed, now: float) -> list[Command]:
        commands, applying = self._hops.on_failed(failed, now), self._replica.applying
        if commands is None and applying is not None and applying.id == failed.id:
            self._replica.applying = None
            commands = self._need_state(f"the optimizer step failed: {failed.reason}", now)
        if commands is None:
            commands = self._catch_up.on_failed(failed)
        if commands is None:
            commands = self._shards.on_failed(failed) + self._rounds.on_failed(failed, now)
        return commands + self._check(now) + self._continue(now)

    def _applied(self, task: Apply, done: Done) -> list[Command]:
        replica = self._replica
        replica.applying, replica.step, replica.digest, self.changed = None, task.step + 1, done.result.digest, True
        if task.save:
            self._shards.kept = replica.stage, replica.step
        return self._shards.go_on(replica.stage, replica.step, held=True)

    def tick(self, now: float) -> list[Command]:
        if self._retell_at is not None and now >= self._retell_at:
            self._call_stale(now)
        return self._hops.tick(now) + self._rounds.tick(now) + self._catch_up.tick(now) + self._check(now)

    # ------------------------------------------------------------------------------------------ asked by the leader

    def _on_round(self, peer: Peer, message: Round, now: float) -> list[Command]:
        view = self._replica.view
        if view is None or peer != self.leader or message.epoch != view.epoch or message.step < view.step:
            return []
        if self._round is None or message.round >= self._round[1].round:
            self._round = peer, message
        return self._try_round(now)

    def _try_round(self, now: float) -> list[Command]:
        """Begin the round that was asked for, once my view and version are there and nothing is being added to my sum."""
        view = self._replica.view
        if self._round is None or view is None:
            return []
        peer, message = self._round
        if peer != self.leader or message.epoch != view.epoch or message.step < view.step:
            self._round = None
            return []
        if message.view > view.number or message.step != view.step or not self._replica.current:
            return []
        message = message.at(self._replica.stage)
        if self._hops.adding(message.step) and self._rounds.active != message.round:
            return []
        self._round = None
        me = Share(self.name, trained(self._hops.books(message.step), self.settings.microbatches))
        commands = self._rounds.begin(message, me, now)
        if self._rounds.active != message.round:
            self.changed = True  # the leader may not know my books as they are
        return commands

    def _on_ask_shard(self, peer: Peer, message: SaveRequest | PublishRequest) -> list[Command]:
        replica = self._replica
        if replica.view is None or peer != self.leader or message.epoch != replica.view.epoch:
            return []
        if isinstance(message, PublishRequest):
            heldout = replica.view.heldout
            best = heldout.best_step if heldout is not None and self.settings.save_measured else 0
            return self._shards.publish(peer, message, best)
        sound = replica.has_state and not replica.unfit
        step = replica.step if sound else message.step  # of a lost version nothing will come
        held = sound and replica.applying is None
        return self._shards.save(peer, message) + self._shards.go_on(replica.stage, step, held)

    def _id(self) -> str:
        return f"s/{next(self._serial)}"

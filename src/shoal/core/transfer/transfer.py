"""How a peer obtains the state of its stage.

A machine without the model first gets the frozen weights of its stage from the stage's replicas (`Settings.borrows`).
Before the first step the state is built from the seed, or from the checkpoint that the run resumes (Init). Later it is downloaded
(download.py) and imported once it is whole and verified (Import); a stage without replicas may be made from its two neighbours (Blend).
A download goes on while the run commits steps: those are applied afterwards (catch_up.py), so that it begins anew only when its version
is older than what was received of the commits. Giving the state to others is donor.py's business, and shards of checkpoints, which this
peer keeps for others or lacks itself, are copies.py's. For peer.py.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from shoal.core.messages import (
    FROZEN,
    Blend,
    BlobRef,
    Chunk,
    ChunkRequest,
    Command,
    CopyRequest,
    Do,
    Done,
    Failed,
    Import,
    Init,
    Lack,
    LoadFailed,
    Member,
    Note,
    Offer,
    Peer,
    Settings,
    StateRequest,
    View,
    Wire,
)
from shoal.core.replica_state import TEXT, member_of
from shoal.core.timers import soonest
from shoal.core.transfer.copies import Copier, ShardDonor
from shoal.core.transfer.donor import Donor
from shoal.core.transfer.download import Download, Downloader, Target

if TYPE_CHECKING:
    from random import Random

    from shoal.core.server.server import Server


class Build:
    """The task that makes a state: Init, Import or Blend. It cannot be cancelled, so that a newer one waits until it has ended."""

    def __init__(self) -> None:
        self.id = ""  # of the task under way, '' if none is wanted
        self.step = 0  # the version that it makes
        self._void = ""  # a task that runs, but whose state is not wanted any more
        self._waiting: Init | Import | Blend | None = None

    def want(self, task: Init | Import | Blend) -> Init | Import | Blend | None:
        """The task to start now. Of those that are wanted while another one runs, only the newest is started later."""
        self.id, self.step = task.id, task.step
        if not self._void:
            return task
        self._waiting = task
        return None

    def abandon(self) -> None:
        if self.id and self._waiting is None:
            self._void = self.id
        self.id, self._waiting = "", None

    def is_void(self, task: str) -> bool:
        return task == self._void

    def void_ended(self) -> Init | Import | Blend | None:
        """The task to start now that the unwanted one has ended."""
        self._void, task, self._waiting = "", self._waiting, None
        return task


class StateTransfer:
    """Prepares the stage that the view gives this peer, and serves it to others (`donor`)."""

    def __init__(self, name: Peer, settings: Settings, rng: Random, server: Server) -> None:
        self._name, self._settings, self._server = name, settings, server
        self._serial = count(1)
        self._view: View | None = None
        self._member = False  # in the newest view
        self._build = Build()
        self.downloader = Downloader(name, settings, rng, self._serial)
        self._donor = Donor(name, server, self._serial)
        self.copier, self._shards = Copier(name, settings, rng, self._serial), ShardDonor(self._serial)
        self._unloadable: Failed | None = None  # why Init failed, while what it lacks is downloaded
        self._brought: set[Lack] = set()  # what it lacked before
        self.load_failed: LoadFailed | None = None  # for the leader: the checkpoint that all go back to is no good

    @property
    def deadline(self) -> float | None:
        return soonest(self.downloader.retry_at, self.copier.downloader.retry_at)

    @property
    def loaded(self) -> int:
        """Chunks that are here, of a state on its way or of frozen weights."""
        return self.downloader.loaded + self.copier.loaded

    # ------------------------------------------------------------------------------------------------ what to do

    def on_view(self, view: View, now: float) -> list[Command]:
        """Prepare the stage that the view gives this peer, unless its state is here."""
        self._view = view
        commands = self._donor.on_view(view)
        if self._me is None:
            self._abandon()
            return commands
        return commands + self._prepare(view, now) + self._repaired(self.copier.on_view(view, now), now)

    def _prepare(self, view: View, now: float) -> list[Command]:
        before, self._member = self._member, member_of(view.members, self._name) is not None
        if before and not self._member and self._server.has_state:  # demoted: the state held here is not trusted
            self._abandon()
            return self._server.drop_state() + self._begin(now)
        return self.review(now)

    def review(self, now: float) -> list[Command]:
        """Check whether the state held here, or on its way, is still what the view wants."""
        view, server, me = self._view, self._server, self._me
        if view is None or me is None:
            return []
        place = view.epoch, me.stage
        if server.has_state and (server.epoch, server.stage) == place and (self._member or not server.unfit):
            return []  # a member applies commits, a joiner catches up; a member that is unfit has told the leader
        target = self.downloader.target
        if target is None or (target.epoch, target.stage) != place:
            back = server.take_back(view, me.stage, now)
            return self._begin(now) if back is None else back
        if not self._build.id and target.sources != _sources(view, me.stage):
            return self._begin(now)
        return self._renew(now)

    def _renew(self, now: float) -> list[Command]:
        """Download a newer version if the one on its way has become too old."""
        current, since = self.downloader.current, self._server.since
        if self._build.id and self._build.step < since:
            return []  # handled when the build ends: it cannot be cancelled
        if current is None or current.step >= since:
            return []
        self.downloader.current = None
        why = f"version {current.step} is too old, version {since} or newer is needed"
        return [Note("state", f"the download begins anew: {why}"), *self._obtain(now)]

    def tick(self, now: float) -> list[Command]:
        return self._tick(now) + self._repaired(self.copier.tick(now), now)

    def _tick(self, now: float) -> list[Command]:
        if not self.downloader.due(now) or self.downloader.target is None or self._build.id:
            return []
        return self.downloader.give_up_late(now) if self.downloader.has_donors else self._obtain(now)

    @property
    def _me(self) -> Member | None:
        view = self._view
        return member_of(view.members + view.joining, self._name) if view is not None else None

    def _begin(self, now: float) -> list[Command]:
        """Prepare the stage that the view gives this peer, from nothing."""
        view, me = self._view, self._me
        assert view is not None and me is not None
        self._abandon()
        commands = self._server.drop_state() if self._server.has_state else []
        self.downloader.begin(Target(view.epoch, me.stage, _sources(view, me.stage)))
        return commands + self._obtain(now)

    def _obtain(self, now: float) -> list[Command]:
        """Build the state if all peers can, else request it of the stage's replicas."""
        view, target = self._view, self.downloader.target
        assert view is not None and target is not None
        frozen = Lack(target.stage, FROZEN)
        if self._settings.borrows and frozen not in self._brought:
            why = f"this machine has no model, and stage {target.stage} needs its frozen weights"
            return self._bring(Failed("", why, lacks=(frozen,)), now)
        self.downloader.wait(now)
        if view.step == self._settings.first_step or not (view.started or view.kept):
            undone = view.epoch if view.undoing is not None and view.undoing.epoch == view.epoch else 0
            return self._start(Init(self._id(), target.stage, view.step, void_before=undone))
        since, current = self._server.since, self.downloader.current
        half = since + (max(0, view.step - since) + 1) // 2  # an older one is too old soon
        begun = current is not None and current.have and current.step >= since
        return self.downloader.request(view, since if begun else half)

    def _bring(self, failed: Failed, now: float) -> list[Command]:
        """Download what it lacks, then go on."""
        assert self._view is not None
        self._brought |= set(failed.lacks)
        self._unloadable, self.downloader.retry_at = failed, None
        note = Note("state", f"asks the others for what is missing here: {failed.reason}")
        return [note, *self._repaired(self.copier.repair(failed.lacks, self._view, self._build.step, now), now)]

    def _repaired(self, commands: list[Command], now: float) -> list[Command]:
        """What Init lacked is here, so that it is tried again; or nobody has it, and the leader has to know."""
        why, failed, target = self.copier.repaired, self._unloadable, self.downloader.target
        if why is None or failed is None or target is None:
            return commands
        self.copier.repaired = self._unloadable = None
        if not why:
            return commands + self._obtain(now)
        self._brought.clear()
        self.downloader.start_over(now)
        return commands + self._cannot_load(failed, f"{failed.reason}; {why}")

    def _cannot_load(self, failed: Failed, reason: str) -> list[Command]:
        target, view = self.downloader.target, self._view
        if failed.older is not None and target is not None and view is not None:
            asked, step = len(view.members) + len(view.joining) - 1, self._build.step
            self.load_failed = LoadFailed(target.epoch, step, target.stage, failed.older, reason[:TEXT], asked)
        return [Note("state", f"the stage's state could not be built: {reason}")]

    def _abandon(self) -> None:
        self.copier.stop_repair()
        self._unloadable = None
        self._brought.clear()
        self._build.abandon()
        self.downloader.abandon()

    # --------------------------------------------------------------------------------------------------- events

    def on_message(
        self, peer: Peer, message: Wire, blobs: tuple[BlobRef, ...], fault: str, now: float
    ) -> list[Command]:
        match message:
            case CopyRequest():
                return self.copier.copy(peer, message, now)
            case Offer(shard=shard) | Chunk(shard=shard) | StateRequest(shard=shard) | ChunkRequest(shard=shard) if (
                shard
            ):
                return self._on_shard(peer, message, blobs, fault, now)
            case Offer():
                return self._on_offer(peer, message, now)
            case Chunk():
                commands = self.downloader.on_chunk(peer, message, blobs, fault, now)
                whole_s = self.downloader.whole_s
                if whole_s is not None and any(isinstance(one, Do) for one in commands):  # it was asked for
                    self._server.hears(whole_s, now)
                return commands
            case StateRequest():
                return self._donor.on_state_request(peer, message)
            case ChunkRequest():
                return self._donor.on_chunk_request(peer, message)
        return []

    def _on_offer(self, peer: Peer, offer: Offer, now: float) -> list[Command]:
        if self._build.id or self._server.has_state or self._view is None:
            return []
        commands = self.downloader.on_offer(peer, offer, self._view, self._server.since, now)
        current = self.downloader.current
        return commands + (self._server.rests_on(current.step) if current is not None else [])

    def _on_shard(self, peer: Peer, message: Wire, blobs: tuple[BlobRef, ...], fault: str, now: float) -> list[Command]:
        """About a shard of a checkpoint. Only those of the view receive any."""
        present = self._view is not None and member_of(self._view.members + self._view.joining, peer) is not None
        match message:
            case Offer():
                return self._repaired(self.copier.on_offer(peer, message, now), now)
            case Chunk():
                return self.copier.on_chunk(peer, message, blobs, fault, now)
            case StateRequest() if present:
                return self._shards.on_state_request(peer, message)
            case ChunkRequest() if present:
                return self._shards.on_chunk_request(peer, message)
        return []

    def on_unreachable(self, peer: Peer) -> None:
        """What was on its way there is lost."""
        self._donor.given.on_unreachable(peer)
        self._shards.given.on_unreachable(peer)

    def on_done(self, done: Done, now: float) -> list[Command]:
        commands = self.copier.on_done(done, now)
        if commands is not None:
            return self._repaired(commands, now)
        if done.id == self._build.id:
            return self._on_built(done, now)
        if self._build.is_void(done.id):
            return self._start_waiting()
        if self.downloader.is_checking(done.id):
            finished = self.downloader.on_right(done.id)
            return self.downloader.go_on(now) if finished is None else self._on_source(finished, now)
        return self._donor.on_done(done) + self._shards.on_done(done)

    def on_failed(self, failed: Failed, now: float) -> list[Command]:
        commands = self.copier.on_failed(failed, now)
        if commands is not None:
            return self._repaired(commands, now)
        if self._build.is_void(failed.id):
            return self._start_waiting()
        if failed.id == self._build.id:
            self._build.id = ""
            self.downloader.start_over(now)
            target = self.downloader.target
            again = self._brought.issuperset(failed.lacks)  # it was brought, and is not whole all the same
            self._brought = set() if again else self._brought
            if failed.lacks and target is not None and not again:
                return self._bring(failed, now)
            return self._cannot_load(failed, failed.reason)
        if self.downloader.is_checking(failed.id):
            return self.downloader.on_wrong(failed.id, failed.reason, now)
        return self._donor.on_failed(failed) + self._shards.on_failed(failed)

    def _on_source(self, finished: Download, now: float) -> list[Command]:
        """One source is whole: download the next one, or make the state."""
        target, whole = self.downloader.target, self.downloader.whole
        assert target is not None
        if not self.downloader.complete:
            return self._obtain(now)
        stage = target.stage
        if len(whole) == 1:
            return self._start(Import(id=self._id(), stage=stage, step=finished.step, chunks=whole[0]))
        rebuilt = self._view.rebuilt if self._view is not None else ()
        below = next(one.below for one in rebuilt if one.stage == stage) if self._view is not None else 0.5
        return self._start(
            Blend(id=self._id(), stage=stage, step=finished.step, chunks=(whole[0], whole[1]), below=below)
        )

    def _start(self, task: Init | Import | Blend) -> list[Command]:
        self.downloader.retry_at = None
        return self._do(self._build.want(task))

    def _start_waiting(self) -> list[Command]:
        return self._do(self._build.void_ended())

    def _do(self, task: Init | Import | Blend | None) -> list[Command]:
        """The driver drops the state held here, and the copy of it, when the task starts."""
        if task is None:
            return []
        self._donor.forget()
        return [Do(task)]

    def _on_built(self, done: Done, now: float) -> list[Command]:
        target, step = self.downloader.target, self._build.step
        assert target is not None
        self._build.id = ""
        self._abandon()
        commands: list[Command] = [Note("state", f"holds stage {target.stage} at step {step}")]
        length, digest = done.result.length, done.result.digest
        commands += self._server.load_state(target.stage, step, target.epoch, length, digest, now)
        return commands + self.review(now)

    def _id(self) -> str:
        return f"y/{next(self._serial)}"


def _sources(view: View, stage: int) -> tuple[int, ...]:
    """The stages whose states that stage's is made from: itself, or, if it is rebuilt before a step begins, its two neighbours."""
    rebuilt = not view.started and any(one.stage == stage for one in view.rebuilt)
    return (stage - 1, stage + 1) if rebuilt else (stage,)

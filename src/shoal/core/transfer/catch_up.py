"""How a joiner catches up with commits while it downloads: it receives the sums of each round, and applies them later.

A download of version v takes minutes over the internet, and no peer waits for it: the run commits steps v, v + 1, ... meanwhile. Chunk
owners, in a group of several rows those of one row, send the sums to the joiners of their stage too (`Round.joiners`), and each
agreed view says which round was committed with which norm. A joiner that has imported the state of version v applies the sums that it
received, step by step, until it holds the version being trained, with the same bytes and in the same order as all replicas.

What was not received (a message was lost, its sender has left, or too many steps are missing) cannot be applied: `since` moves up, and
transfer.py downloads a newer version. A joiner hears of a commit late by its round trip, which may be longer than a step: the leader
sends it the view after each step that it missed (consensus/agreed.py), and sums of steps ahead of its view are kept too. For server.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import msgspec

from shoal.core.allreduce.layout import layout_of
from shoal.core.messages import (
    Apply,
    BlobRef,
    Command,
    Committed,
    Do,
    Done,
    Failed,
    Gather,
    GatherChunk,
    Note,
    Peer,
    Settings,
    View,
)
from shoal.core.replica_state import ReplicaState, drop

CHUNKS = 1 << 16  # of one gradient that are kept of one peer at most: of 4096 pieces among 64 replicas
LONG = 1 << 40  # values; a gradient of that length has every chunk that the group may have
MOST = 4.0  # times as long as sums are waited for that do not come: for those of a commit, while anything comes
LATEST = 10.0  # of ready_timeout_s: that they are waited for, however long the state took
STEPS = 16  # whose sums are kept however large they are, up to the stage's gradient each
SMALL_BYTES, SMALL_STEPS = (
    64 << 20,
    1024,
)  # while sums take less than that in all, as an adapter's do, those of so many steps are kept


class RoundSums(msgspec.Struct):
    """Sums received of one step's newest round, by number of the chunk: the sender, and the blob."""

    round: int
    sums: dict[int, tuple[Peer, str]] = msgspec.field(default_factory=dict)
    nbytes: int = 0

    def blobs(self) -> tuple[str, ...]:
        return tuple(blob for _, blob in self.sums.values())


class CatchUp:
    """Idle in a peer that is not joining."""

    def __init__(self, name: Peer, settings: Settings, serial: Iterator[int], replica: ReplicaState) -> None:
        self._name, self._settings = name, settings
        self._serial = serial
        self._replica = replica
        self._key: tuple[int, int] | None = None  # (epoch, stage) that this joiner prepares
        self.since = 0  # a state of this version or a newer one can be brought up to date
        self._received: dict[int, RoundSums] = {}  # by step
        self.commits: dict[int, tuple[Committed, float]] = {}  # by step; and when the view that says so arrived
        self._heard_at = 0.0  # when a sum or a chunk of the state came last
        self._patience_s = settings.ready_timeout_s  # for more of them
        self._task: Gather | None = None

    @property
    def active(self) -> bool:
        """This peer is a joiner, and keeps the sums of what is committed."""
        return self._key is not None

    @property
    def deadline(self) -> float | None:
        waiting = [at for step, (_, at) in self.commits.items() if not self._complete(step)]
        return self._lost_at(min(waiting)) if waiting else None

    def on_view(self, view: View, now: float) -> list[Command]:
        joining = next((one for one in view.joining if one.peer == self._name), None)
        key = (view.epoch, joining.stage) if joining is not None and view.started and not view.finished else None
        commands: list[Command] = []
        if key != self._key:
            commands = self._forget()
            self._key, self.since, self._patience_s = key, view.step, self._settings.ready_timeout_s
        if key is None:
            self.since = view.step
            return commands
        commands += self._learn(view, now)
        commands += self._give_up(view.step - SMALL_STEPS)
        while view.step - self.since > STEPS and not self._small:
            commands += self._give_up(self.since + 1)
        if self._replica.has_state and (self._replica.epoch, self._replica.stage) == key:
            commands += self._give_up(min(self._replica.step, view.step))
        return commands

    def _learn(self, view: View, now: float) -> list[Command]:
        """Take in how the step before was committed. A view describes the newest commit only: those of missed views are unknown."""
        last, commands = view.last, list[Command]()
        if last is not None and last.step == view.step - 1 and last.step >= self.since:
            self.commits.setdefault(last.step, (last, now))
            if self._name not in last.joiners and not last.skipped:  # its round began before this joiner was listed
                commands = self._give_up(last.step + 1)
        missed = [step for step in range(self.since, view.step) if step not in self.commits]
        return commands + (self._give_up(max(missed) + 1) if missed else [])

    def rests_on(self, step: int) -> list[Command]:
        """A state of that version is on its way: what led to it is not needed."""
        view = self._replica.view
        return self._give_up(min(step, view.step)) if view is not None and self._key is not None else []

    def hears(self, state_s: float, now: float) -> None:
        """A chunk of the state came, all of which takes about so long. What the lines have for a joiner sums get, too: those that are sent
        whole, as a stage's only replica sends them, take a third of that at most."""
        self._heard_at = now
        patience_s = self._settings.ready_timeout_s
        self._patience_s = min(max(patience_s, state_s), LATEST * patience_s)

    def take(
        self, peer: Peer, message: GatherChunk, refs: tuple[BlobRef, ...], fault: str, now: float
    ) -> list[Command]:
        """Keep one chunk's sum."""
        blobs = tuple(ref.id for ref in refs)
        if len(blobs) != 1 or fault or not self._is_wanted(peer, message):
            return drop(blobs)
        received = self._received.setdefault(message.step, RoundSums(message.round))
        if message.round < received.round or self._of_another_round(message):
            return drop(blobs)
        commands: list[Command] = []
        if message.round > received.round:
            commands = drop(received.blobs())
            received.round, received.sums, received.nbytes = message.round, {}, 0
        if message.chunk in received.sums or sum(other == peer for other, _ in received.sums.values()) >= CHUNKS:
            return commands + drop(blobs)
        received.sums[message.chunk] = peer, blobs[0]
        self._heard_at = now
        received.nbytes += refs[0].nbytes
        return commands

    def _is_wanted(self, peer: Peer, message: GatherChunk) -> bool:
        """A replica of my stage sends it, of a step that I may have to apply."""
        view, key = self._replica.view, self._key
        if view is None or key is None or message.epoch != key[0] or self._replica.known.present.get(peer) != key[1]:
            return False
        return self.since <= message.step <= view.step + (STEPS if self._small else 1)

    def _of_another_round(self, message: GatherChunk) -> bool:
        """Its step was committed with another exchange of my stage."""
        known = self.commits.get(message.step)
        return known is not None and self._key is not None and known[0].round_of(self._key[1]) != message.round

    def go_on(self) -> list[Command]:
        """Apply the next step that was committed meanwhile, if the version before it and all of its sums are here. It cannot be, if who has
        to send one has left."""
        replica, view = self._replica, self._replica.view
        if self._key is None or view is None or self._task is not None:
            return []
        behind = replica.ready and (replica.epoch, replica.stage) == self._key and replica.step < view.step
        if not behind or replica.step not in self.commits:
            return []
        commit, _ = self.commits[replica.step]
        if not self._complete(replica.step):
            return self._give_up(replica.step + 1) if self._sender_left(commit) else []
        if commit.skipped:
            return self._apply(commit)
        received = self._received[replica.step]
        sums = tuple(received.sums[chunk][1] for chunk in self._senders(commit))
        self._task = Gather(f"s/{next(self._serial)}", replica.step, commit.round_of(replica.stage), sums)
        return [Do(self._task)]

    def on_done(self, done: Done) -> list[Command] | None:
        """None if the task is not one of this class."""
        task = self._task
        if task is None or done.id != task.id:
            return None
        self._task, replica = None, self._replica
        known = self.commits.get(task.step)
        if (
            self._key is None
            or known is None
            or not replica.ready
            or (replica.step, replica.epoch) != (task.step, self._key[0])
        ):
            return []  # what the task was for is void
        commit, _ = known
        if commit.round_of(replica.stage) != task.round or commit.digests[replica.stage] != done.result.digest:
            return self._give_up(task.step + 1)  # a peer sent other values than were committed
        return self._apply(commit)

    def on_failed(self, failed: Failed) -> list[Command] | None:
        if self._task is None or failed.id != self._task.id:
            return None
        task, self._task = self._task, None
        return self._give_up(task.step + 1)

    def tick(self, now: float) -> list[Command]:
        """Sums of a commit that are not complete in time have been lost."""
        late = [step for step, (_, at) in self.commits.items() if now >= self._lost_at(at) and not self._complete(step)]
        return self._give_up(max(late) + 1) if late else []

    # ------------------------------------------------------------------------------------------------------- private

    def _lost_at(self, committed_at: float) -> float:
        """When sums of what was committed then are lost if they are not complete. A large stage's take a narrow line minutes, so that they
        are waited for while any come."""
        patience_s = self._patience_s
        return min(max(committed_at, self._heard_at) + patience_s, committed_at + MOST * patience_s)

    @property
    def _small(self) -> bool:
        """The sums received take little memory."""
        return sum(received.nbytes for received in self._received.values()) < SMALL_BYTES

    def _apply(self, commit: Committed) -> list[Command]:
        task = f"s/{next(self._serial)}"
        self._replica.applying = Apply(
            task,
            commit.step,
            commit.round_of(self._replica.stage),
            commit.norm,
            save=False,
            skip=bool(commit.skipped),
            scale=self._settings.scale(commit.counted),
        )
        words = f"applies step {commit.step}, which was committed while it downloaded"
        return [Note("state", words), Do(self._replica.applying), *self._give_up(commit.step + 1)]

    def _complete(self, step: int) -> bool:
        """Each chunk of the round with which that step was committed is here, or none is needed."""
        commit, received = self.commits[step][0], self._received.get(step)
        if commit.skipped:
            return True
        if (
            received is None
            or self._key is None
            or received.round != commit.round_of(self._key[1])
            or self._key[1] >= len(commit.groups)
        ):
            return False
        return all(
            chunk in received.sums and received.sums[chunk][0] == sender
            for chunk, sender in self._senders(commit).items()
        )

    def _sender_left(self, commit: Committed) -> bool:
        """One that has not sent all of its sums of that round."""
        assert self._key is not None
        stage, received = self._key[1], self._received.get(commit.step)
        group = commit.groups[stage] if stage < len(commit.groups) else ()
        gone = {share.peer for share in group if self._replica.known.present.get(share.peer) != stage}
        if not gone:
            return False
        sums = received.sums if received is not None and received.round == commit.round_of(stage) else {}
        senders = self._senders(commit).items()
        return any(sender in gone and sums.get(chunk, ("",))[0] != sender for chunk, sender in senders)

    def _senders(self, commit: Committed) -> dict[int, Peer]:
        """The sender of each chunk of that round, in order. Until a state is here its length is unknown: of the first piece only."""
        assert self._key is not None
        shares = commit.groups[self._key[1]]
        has_state = self._replica.has_state and self._replica.stage == self._key[1]
        length, most = (self._replica.length, None) if has_state else (LONG, 0)
        senders: dict[int, Peer] = {}
        for piece in count():
            layout = layout_of(length, shares, self._settings, piece, most)
            senders.update(layout.receives(self._name))
            if layout.last:
                break
        return senders

    def _give_up(self, since: int) -> list[Command]:
        """Drop what is older than step `since`: it is not needed, or cannot be completed."""
        if since <= self.since:
            return []
        self.since = since
        commands: list[Command] = []
        for step in [step for step in self._received if step < since]:
            commands += drop(self._received.pop(step).blobs())
        for step in [step for step in self.commits if step < since]:
            del self.commits[step]
        return commands

    def _forget(self) -> list[Command]:
        blobs = tuple(blob for received in self._received.values() for blob in received.blobs())
        self._received.clear()
        self.commits.clear()
        return drop(blobs)

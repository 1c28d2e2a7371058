"""How a joiner keeps up with the run while it downloads: it receives the sums of every round, and applies them later.

A download of version v takes minutes over the internet, and nobody waits for it: the run commits steps v, v + 1, ... meanwhile.
Chunk owners, in a group of several rows those of one row, send the sums to the joiners of their stage too (`Round.listeners`), and
every agreed view says which round was committed with which norm. So a joiner that has taken the state of version v applies what it
heard, step by step, until it holds the version being trained, with the same bytes and in the same order as everybody else. For server.py.

What was not heard (a message lost, too far behind) cannot be applied: `since` moves up, and transfer.py downloads a newer version.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import msgspec

from shoal.core.allreduce.layout import split
from shoal.core.messages import (
    Apply,
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

CHUNKS = 1 << 16  # of one gradient that are heard of one peer at most: of 4096 pieces among 64 replicas
LONG = 1 << 40  # values; of a gradient so long every chunk is there that the group may have
HEARD = 16  # steps whose sums are kept at most: each is as large as the stage's gradient


class Heard(msgspec.Struct):
    """Sums of one step's newest round, by number of the chunk: who added it up, and blob."""

    round: int
    sums: dict[int, tuple[Peer, str]] = msgspec.field(default_factory=dict)

    def blobs(self) -> tuple[str, ...]:
        return tuple(blob for _, blob in self.sums.values())


class CatchUp:
    def __init__(self, name: Peer, settings: Settings, serial: Iterator[int], replica: ReplicaState) -> None:
        self._name, self._settings = name, settings
        self._serial = serial
        self._replica = replica
        self._key: tuple[int, int] | None = None  # (epoch, stage) that I prepare
        self.since = 0  # a state of this version or a newer one can be brought up to date
        self._heard: dict[int, Heard] = {}
        self._commits: dict[int, tuple[Committed, float]] = {}  # step -> how it was committed, and when I learned it
        self._task: Gather | None = None

    @property
    def active(self) -> bool:
        """I am a joiner, and hear what is committed."""
        return self._key is not None

    @property
    def deadline(self) -> float | None:
        if not self._commits:
            return None
        waiting = [at for step, (_, at) in self._commits.items() if not self._complete(step)]
        return min(waiting) + self._settings.hold_s if waiting else None

    def on_view(self, view: View, now: float) -> list[Command]:
        joining = next((one for one in view.joining if one.peer == self._name), None)
        key = (view.epoch, joining.stage) if joining is not None and view.started and not view.finished else None
        commands: list[Command] = []
        if key != self._key:
            commands = self._forget()
            self._key, self.since = key, view.step
        if key is None:
            self.since = view.step
            return commands
        last = view.last
        if last is not None and last.step == view.step - 1 and last.step >= self.since:
            self._commits.setdefault(last.step, (last, now))
            if self._name not in last.listeners:  # I was not known to listen when its round began
                commands += self._give_up(last.step + 1)
        missed = [step for step in range(self.since, view.step) if step not in self._commits]
        if missed:  # a newer view says nothing of the steps before its last
            commands += self._give_up(max(missed) + 1)
        if view.step - self.since > HEARD:
            commands += self._give_up(view.step)
        if self._replica.has_state and self._replica.epoch == key[0] and self._replica.stage == key[1]:
            commands += self._give_up(min(self._replica.step, view.step))
        return commands

    def take(self, peer: Peer, message: GatherChunk, blobs: tuple[str, ...], fault: str) -> list[Command]:
        view, key = self._replica.view, self._key
        stages = self._replica.known.present
        wanted = (
            view is not None
            and key is not None
            and message.epoch == key[0]
            and self.since <= message.step <= view.step + 1
            and stages.get(peer) == key[1]
            and len(blobs) == 1
            and not fault
        )
        if not wanted:
            return drop(blobs)
        heard = self._heard.setdefault(message.step, Heard(message.round))
        known = self._commits.get(message.step)
        if message.round < heard.round or (known is not None and known[0].round != message.round):
            return drop(blobs)
        commands: list[Command] = []
        if message.round > heard.round:
            commands = drop(heard.blobs())
            heard.round, heard.sums = message.round, {}
        if message.chunk in heard.sums or sum(other == peer for other, _ in heard.sums.values()) >= CHUNKS:
            return commands + drop(blobs)
        heard.sums[message.chunk] = peer, blobs[0]
        return commands

    def go_on(self) -> list[Command]:
        """Apply the next step that was committed without me, if I hold the version before it and heard all of it."""
        replica, view = self._replica, self._replica.view
        if self._key is None or view is None or self._task is not None:
            return []
        behind = replica.ready and (replica.epoch, replica.stage) == self._key and replica.step < view.step
        if not behind or replica.step not in self._commits or not self._complete(replica.step):
            return []
        commit, _ = self._commits[replica.step]
        heard = self._heard[replica.step]
        sums = tuple(heard.sums[chunk][1] for chunk in self._tellers(commit))
        self._task = Gather(f"s/{next(self._serial)}", replica.step, commit.round, sums)
        return [Do(self._task)]

    def on_done(self, done: Done) -> list[Command] | None:
        """None: not a task of mine."""
        task = self._task
        if task is None or done.id != task.id:
            return None
        self._task, replica = None, self._replica
        known = self._commits.get(task.step)
        if (
            self._key is None
            or known is None
            or not replica.ready
            or (replica.step, replica.epoch) != (task.step, self._key[0])
        ):
            return []  # meanwhile all of this was made void
        commit, _ = known
        if commit.round != task.round or commit.digests[replica.stage] != done.result.digest:
            return self._give_up(task.step + 1)  # somebody sent me other values than were committed
        replica.applying = Apply(f"s/{next(self._serial)}", task.step, task.round, commit.norm, False)
        said = f"applies step {task.step}, which was committed while it downloaded"
        return [Note("state", said), Do(replica.applying), *self._give_up(task.step + 1)]

    def on_failed(self, failed: Failed) -> list[Command] | None:
        if self._task is None or failed.id != self._task.id:
            return None
        task, self._task = self._task, None
        return self._give_up(task.step + 1)

    def tick(self, now: float) -> list[Command]:
        """What was committed and is not heard whole within hold_s has been lost."""
        late = [
            step
            for step, (_, at) in self._commits.items()
            if now - at >= self._settings.hold_s and not self._complete(step)
        ]
        return self._give_up(max(late) + 1) if late else []

    # ------------------------------------------------------------------------------------------------------- private

    def _complete(self, step: int) -> bool:
        """I have heard every chunk of the round with which that step was committed."""
        commit, heard = self._commits[step][0], self._heard.get(step)
        if heard is None or heard.round != commit.round or self._key is None or self._key[1] >= len(commit.groups):
            return False
        return all(
            chunk in heard.sums and heard.sums[chunk][0] == teller for chunk, teller in self._tellers(commit).items()
        )

    def _tellers(self, commit: Committed) -> dict[int, Peer]:
        """Of every chunk of that round, in order. Without a seat the length is not known: of the first piece only."""
        assert self._key is not None
        shares = commit.groups[self._key[1]]
        group, widths = tuple(share.peer for share in shares), tuple(share.width for share in shares)
        has_state = self._replica.has_state and self._replica.stage == self._key[1]
        most = self._settings.piece_values if has_state else 0
        senders: dict[int, Peer] = {}
        for piece in count():
            layout = split(self._replica.length if has_state else LONG, group, most, piece, widths)
            senders.update(layout.receives(self._name))
            if layout.last:
                break
        return senders

    def _give_up(self, since: int) -> list[Command]:
        """Nothing before step `since` is needed, or can be had."""
        if since <= self.since:
            return []
        self.since = since
        commands: list[Command] = []
        for step in [step for step in self._heard if step < since]:
            commands += drop(self._heard.pop(step).blobs())
        for step in [step for step in self._commits if step < since]:
            del self._commits[step]
        return commands

    def _forget(self) -> list[Command]:
        blobs = tuple(blob for heard in self._heard.values() for blob in heard.blobs())
        self._heard.clear()
        self._commits.clear()
        return drop(blobs)

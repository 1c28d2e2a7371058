"""One replica's part in a checkpoint: write its stage's shard when the leader asks, make the whole visible when it asks that.

For server.py. The leader repeats its questions because answers vanish; what was written once is answered from memory, what
failed is tried again. The leader's side is saving.py; files are the driver's.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from shoal.core.messages import (
    Command,
    Do,
    Done,
    Failed,
    Peer,
    Published,
    PublishRequest,
    RunPublish,
    RunSave,
    Saved,
    SaveRequest,
    Send,
)
from shoal.core.replica_state import TEXT


class Shards:
    def __init__(self, serial: Iterator[int]) -> None:
        self.kept: tuple[int, int] | None = None  # (stage, version) of the copy that Apply kept
        self._serial = serial
        self._asked: tuple[Peer, SaveRequest] | None = None  # not begun: that version may still come
        self._saving: tuple[str, Peer, Saved] | None = None
        self._publishing: tuple[str, Peer, Published] | None = None
        self._saved: Saved | None = None
        self._published: Published | None = None

    def save(self, peer: Peer, message: SaveRequest) -> list[Command]:
        """Note the wish; `go_on` sees to it."""
        done, key = self._saved, (message.epoch, message.step)
        if done is not None and (done.epoch, done.step) == key:
            return [Send(peer, done)]
        if self._saving is not None and (self._saving[2].epoch, self._saving[2].step) == key:
            self._saving = self._saving[0], peer, self._saving[2]
            return []
        self._asked = peer, message
        return []

    def go_on(self, stage: int, step: int, held: bool) -> list[Command]:
        """Begin what was asked for, once version `step` is the one it asks for or is past it. `held`: the parameters are still those of
        that version, so that a copy can be made now where none was kept."""
        if self._asked is None or self._saving is not None or self._asked[1].step > step:
            return []
        (peer, message), self._asked = self._asked, None
        answer = Saved(message.epoch, message.step, stage)
        if self.kept != (stage, message.step) and not (held and step == message.step):
            failed = f"no copy of stage {stage} at step {message.step} is kept here"
            return [Send(peer, Saved(message.epoch, message.step, stage, failed=failed))]
        task = f"s/{next(self._serial)}"
        self._saving = task, peer, answer
        return [Do(RunSave(task, stage, message.step))]

    def publish(self, peer: Peer, message: PublishRequest, best: int) -> list[Command]:
        done, key = self._published, (message.epoch, message.step, message.edition)
        if done is not None and (done.epoch, done.step, done.edition) == key:
            return [Send(peer, done)]
        if self._publishing is not None:
            task, _, answer = self._publishing
            if (answer.epoch, answer.step, answer.edition) == key:
                self._publishing = task, peer, answer
            return []
        task = f"s/{next(self._serial)}"
        self._publishing = task, peer, Published(message.epoch, message.step, edition=message.edition)
        return [Do(RunPublish(task, message.step, message.records, message.copies, best, message.epoch))]

    def on_done(self, done: Done) -> list[Command]:
        if self._saving is not None and self._saving[0] == done.id:
            (_, peer, saved), self._saving = self._saving, None
            self._saved = Saved(saved.epoch, saved.step, saved.stage, done.result.record, shard=done.result.digest)
            return [Send(peer, self._saved)]
        if self._publishing is not None and self._publishing[0] == done.id:
            (_, peer, published), self._publishing = self._publishing, None
            self._published = msgspec.structs.replace(published, path=done.result.record[:TEXT])
            return [Send(peer, self._published)]
        return []

    def on_failed(self, failed: Failed) -> list[Command]:
        reason = failed.reason[:TEXT] or "failed"
        if self._saving is not None and self._saving[0] == failed.id:
            (_, peer, saved), self._saving = self._saving, None
            return [Send(peer, Saved(saved.epoch, saved.step, saved.stage, failed=reason))]
        if self._publishing is not None and self._publishing[0] == failed.id:
            (_, peer, published), self._publishing = self._publishing, None
            return [Send(peer, msgspec.structs.replace(published, failed=reason))]
        return []

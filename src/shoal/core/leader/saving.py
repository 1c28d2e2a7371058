"""The leader's part in a checkpoint: one replica of each stage writes its shard, then one peer makes the whole visible.

If a replica cannot write, the next one of its stage is asked; if none can, the checkpoint is given up with its reason and training
goes on: older checkpoints stay. A new leader asks again, and the replicas answer from what they have written. For leader.py.
"""

from __future__ import annotations

from shoal.core.messages import (
    Command,
    Note,
    Peer,
    Published,
    PublishRequest,
    Saved,
    SaveRequest,
    Send,
    Settings,
    View,
    Wire,
)

PUBLISHER = -1


class Saving:
    """One checkpoint at a time; `idle` when none is being written."""

    def __init__(self, name: Peer, settings: Settings) -> None:
        self.name, self.settings = name, settings
        self.step: int | None = None
        self.published = 0  # newest version known to be visible
        self.epoch = 0  # of the checkpoint that is being written
        self.hasty = False  # the step may end before every stage has copied its parameters
        self.requested = -1  # the newest step that `begin_now` was called for
        self.seen = 0  # of the newest view
        self.records: dict[int, str] = {}
        self.unable: dict[int, dict[Peer, str]] = {}  # per stage: who could not, and why
        self.unpublished: dict[Peer, str] = {}
        self.asked: dict[int, tuple[Peer, float]] = {}  # stage, or PUBLISHER -> whom and when

    @property
    def idle(self) -> bool:
        return self.step is None

    def begin(self, view: View) -> None:
        """The view's last step asked for a checkpoint: of version `view.step`."""
        self.step, self.epoch, self.hasty = view.step, view.epoch, False
        self.records, self.unable, self.unpublished, self.asked = {}, {}, {}, {}

    def begin_now(self, view: View) -> None:
        """A checkpoint is requested in the middle of a step, which may take long: of the parameters that the step began with, once a step.
        If the step is committed before every stage has copied them, the commit asks for a checkpoint (rules/commit.py)."""
        if self.idle and self.requested < view.step:
            self.requested = view.step
            if view.step > max(view.saved, self.published):
                self.begin(view)
                self.hasty = True

    def on_view(self, view: View) -> None:
        """Forget requests to peers that are no members any more: they will not answer. When the run goes back, the newest checkpoint is the
        one that it goes back to, and a later one that is being written is void."""
        if view.epoch != self.seen and not view.kept:
            self.published = view.saved
            if self.epoch != view.epoch:
                self.step = None
        self.seen = view.epoch
        present = {member.peer for member in view.members}
        self.asked = {stage: asked for stage, asked in self.asked.items() if asked[0] in present}

    def on_message(self, peer: Peer, message: Wire, now: float) -> list[Command]:
        match message:
            case Saved() if not self._expected(peer, message.stage, message):
                pass
            case Published() if not self._expected(peer, PUBLISHER, message):
                pass
            case Saved() if not message.failed:
                self.records.setdefault(message.stage, message.record)
            case Saved():
                self.unable.setdefault(message.stage, {})[peer] = message.failed
                self.asked.pop(message.stage, None)
            case Published() if not message.failed:
                self.step, self.published = None, message.step
                return [Note("checkpoint", f"step {message.step} saved at {message.path}")]
            case Published():
                self.unpublished[peer] = message.failed
                self.asked.pop(PUBLISHER, None)
        return []

    def tick(self, view: View, now: float) -> list[Command]:
        """Send the requests that are due."""
        if self.step is None:
            return []
        commands: list[Command] = []
        for stage in range(self.settings.stages):
            if stage in self.records:
                continue
            able = [m.peer for m in view.members if m.stage == stage and m.peer not in self.unable.get(stage, {})]
            if not able:
                return self._give_up(self.unable.get(stage, {}), f"stage {stage}")
            commands += self._ask(stage, able[0], SaveRequest(epoch=self.epoch, step=self.step), now)
        if len(self.records) == self.settings.stages:
            able = [m.peer for m in view.members if m.peer not in self.unpublished]
            if not able:
                return self._give_up(self.unpublished, "publishing")
            publisher = self.name if self.name in able else able[0]
            records = tuple(self.records[stage] for stage in range(self.settings.stages))
            commands += self._ask(
                PUBLISHER, publisher, PublishRequest(epoch=self.epoch, step=self.step, records=records), now
            )
        return commands

    def _ask(self, stage: int, peer: Peer, message: SaveRequest | PublishRequest, now: float) -> list[Command]:
        asked = self.asked.get(stage)
        if asked is not None and asked[0] == peer and now - asked[1] < 4 * self.settings.beat_s:
            return []
        self.asked[stage] = (peer, now)
        return [Send(peer, message)]

    def _give_up(self, reasons: dict[Peer, str], what: str) -> list[Command]:
        step, self.step = self.step, None
        why = "; ".join(f"{peer}: {reason}" for peer, reason in reasons.items()) or "no replica left"
        if self.hasty:
            return [Note("checkpoint", f"step {step} was over before it could be saved: {what}: {why}")]
        return [Note("unsaved", f"NOT saved at step {step}: {what}: {why}; older checkpoints are kept")]

    def _expected(self, peer: Peer, stage: int, message: Saved | Published) -> bool:
        """It answers the newest request, and is about this checkpoint."""
        asked = self.asked.get(stage)
        return (message.step, message.epoch) == (self.step, self.epoch) and asked is not None and asked[0] == peer

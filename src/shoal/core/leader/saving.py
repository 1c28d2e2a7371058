"""The leader's part in a checkpoint: who writes which shard, where its copies are kept, and who makes the whole visible.

A place is where peers write checkpoints: a machine's directory, or one that several reach; each peer's heartbeat names its own. One
replica of each stage writes its shard to its place; peers of other places download copies of it until there are as many as wanted, or as
there are places. Then one peer of each place that has any makes the checkpoint visible there. The places of the view's first members come
first, so that as long as they have room each of a few machines holds the whole.

A replica that cannot write is followed by the next one of its stage, a place that cannot by the next place. If a stage cannot be saved
anywhere, the checkpoint is given up with its reason and training goes on: older checkpoints stay. A new leader asks again, and everybody
answers from what is written. For leader.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec

from shoal.core.messages import (
    Command,
    CopyRequest,
    Member,
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

PUBLISHER = -1  # in the place of a stage
SOURCE = "replica"  # in the place of a place
# Requests are repeated, since messages vanish: after so many beats, then after twice as many, so many times
REPEAT_BEATS, DOUBLED = 4, 4
HOLDERS = 4  # that a copy is downloaded from

Place = str


class SavedShard(msgspec.Struct):
    """A stage's shard of the checkpoint, and the places that hold it, each with the peer that wrote it."""

    record: str
    shard: str
    places: dict[Place, Peer]


class Saving:
    """One checkpoint at a time; `idle` when none is being written."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.step: int | None = None
        self.published = 0  # newest version known to be visible
        self.epoch = 0  # of the checkpoint that is being written
        self.hasty = False  # the step may end before every stage has copied its parameters
        self.requested = -1  # the newest step that `begin_now` was called for
        self.seen = 0  # of the newest view
        self._begin()

    def _begin(self) -> None:
        self.shards: dict[int, SavedShard] = {}
        self.unable: dict[int, dict[Peer, str]] = {}  # per stage, or PUBLISHER: who could not, and why
        self.refused: dict[tuple[int, Place], str] = {}  # copies of that stage's shard are not kept there
        self.paths: dict[Place, str] = {}  # where it is visible, as `edition` says it
        self.edition = ""  # of what places are to make visible: another when shards have come to other places
        # Stage and SOURCE or place -> whom, when, how often
        self.asked: dict[tuple[int, Place], tuple[Peer, float, int]] = {}

    @property
    def idle(self) -> bool:
        return self.step is None

    def begin(self, view: View) -> None:
        """The view's last step asked for a checkpoint: of version `view.step`."""
        self.step, self.epoch, self.hasty = view.step, view.epoch, False
        self._begin()

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
        self.asked = {key: asked for key, asked in self.asked.items() if asked[0] in present}

    def on_message(self, peer: Peer, message: Wire, places: Mapping[Peer, Place]) -> list[Command]:
        """`places`: of each peer that has sent a heartbeat."""
        place = places.get(peer, "")
        match message:
            case Saved() | Published() if (message.step, message.epoch) != (self.step, self.epoch):
                pass
            case Saved() if self._answers(peer, message.stage, SOURCE):
                self._on_source(peer, place, message)
            case Saved() if self._answers(peer, message.stage, place):
                self._on_copy(peer, place, message)
            case Published() if message.edition != self.edition or not self._answers(peer, PUBLISHER, place):
                pass
            case Published() if message.failed:
                self.unable.setdefault(PUBLISHER, {})[peer] = message.failed
                self.asked.pop((PUBLISHER, place), None)
            case Published():
                self.paths[place] = message.path
        return []

    def _on_source(self, peer: Peer, place: Place, message: Saved) -> None:
        if message.failed:
            self.unable.setdefault(message.stage, {})[peer] = message.failed
            self.asked.pop((message.stage, SOURCE), None)
        elif message.stage not in self.shards:
            self.shards[message.stage] = SavedShard(message.record, message.shard, {place: peer})

    def _on_copy(self, peer: Peer, place: Place, message: Saved) -> None:
        shard = self.shards.get(message.stage)
        if message.failed:
            self.refused[message.stage, place] = f"{peer}: {message.failed}"
            self.asked.pop((message.stage, place), None)
        elif shard is not None and shard.shard == message.shard:
            shard.places.setdefault(place, peer)

    def tick(self, view: View, places: Mapping[Peer, Place], now: float) -> list[Command]:
        """Send the requests that are due. Nothing before every member's place is known: a new leader learns them from heartbeats."""
        if self.step is None or any(member.peer not in places for member in view.members):
            return []
        seats = [(member, places[member.peer]) for member in view.members]
        self._forget_lost({place for _, place in seats})
        commands: list[Command] = []
        complete = True
        for stage in range(self.settings.stages):
            if stage not in self.shards:
                source = self._source(stage, seats)
                if source is None:
                    return self._give_up(self.unable.get(stage, {}), f"stage {stage}")
                commands += self._ask(stage, SOURCE, source, SaveRequest(epoch=self.epoch, step=self.step), now)
            copies = self._copy(stage, seats, now)
            complete = complete and copies is None
            commands += copies or []
        return commands + self._publish(seats, now) if complete else commands

    def _source(self, stage: int, seats: list[tuple[Member, Place]]) -> Peer | None:
        """The replica that writes the stage's shard: the one that was asked last, or the first at the place of the view's first member, or
        the first. None: every replica has failed."""
        unable = self.unable.get(stage, {})
        able = {m.peer: place for m, place in seats if m.stage == stage and m.peer not in unable}
        last = self.asked.get((stage, SOURCE), ("",))[0]
        return last if last in able else min(able, key=lambda peer: able[peer] != seats[0][1], default=None)

    def _forget_lost(self, places: set[Place]) -> None:
        """Nobody is left who reaches those other places."""
        for stage, shard in list(self.shards.items()):
            shard.places = {place: peer for place, peer in shard.places.items() if place in places}
            if not shard.places:
                del self.shards[stage]
                self.asked.pop((stage, SOURCE), None)
        self.paths = {place: path for place, path in self.paths.items() if place in places}

    def _copy(self, stage: int, seats: list[tuple[Member, Place]], now: float) -> list[Command] | None:
        """Requests for copies that are due; None: there are as many as there can be."""
        shard = self.shards.get(stage)
        if shard is None:
            return []
        others: dict[Place, list[Peer]] = {}
        for member, place in seats:
            if place and place not in shard.places:
                others.setdefault(place, []).append(member.peer)
        able = [place for place in others if (stage, place) not in self.refused]
        wanted = able[: max(0, self.settings.copies - len(shard.places))]
        if not wanted:
            return None
        assert self.step is not None
        holders = tuple(member.peer for member, place in seats if place in shard.places)[:HOLDERS]
        request = CopyRequest(self.epoch, self.step, stage, shard.record, shard.shard, holders)
        commands: list[Command] = []
        for place in wanted:  # a place's peers share the work
            last, peers = self.asked.get((stage, place), ("",))[0], others[place]
            commands += self._ask(stage, place, last if last in peers else peers[stage % len(peers)], request, now)
        return commands

    def _publish(self, seats: list[tuple[Member, Place]], now: float) -> list[Command]:
        assert self.step is not None
        shards = [self.shards[stage] for stage in range(self.settings.stages)]
        holding = {place for shard in shards for place in shard.places}
        request = self._request(shards, several=len(holding) > 1)
        if holding <= self.paths.keys():
            return self._end(shards, [place for _, place in seats if place in holding])
        commands: list[Command] = []
        for place in sorted(holding - self.paths.keys()):
            publisher = self._publisher(place, shards, seats)
            if publisher is None:
                return self._leave_out(place, seats)
            commands += self._ask(PUBLISHER, place, publisher, request, now)
        return commands

    def _request(self, shards: list[SavedShard], several: bool) -> PublishRequest:
        """What each place is asked; `several`: there are other places. A new edition, where shards have come to others: what is visible
        says that they are where they are no more, and lacks those that came."""
        assert self.step is not None
        records = tuple(shard.record for shard in shards)
        copies = tuple(tuple(shard.places) for shard in shards) if several else ()
        edition = hashlib.sha256(msgspec.msgpack.encode((records, copies))).hexdigest()[:32]
        if edition != self.edition:
            self.edition = edition
            self.paths.clear()
            self.asked = {key: asked for key, asked in self.asked.items() if key[0] != PUBLISHER}
        return PublishRequest(self.epoch, self.step, records, copies, edition)

    def _publisher(self, place: Place, shards: list[SavedShard], seats: list[tuple[Member, Place]]) -> Peer | None:
        """A peer of that place, one that wrote a shard there if possible. None: every peer there has failed."""
        unable = self.unable.get(PUBLISHER, {})
        able = [member.peer for member, other in seats if other == place and member.peer not in unable]
        writers = [shard.places[place] for shard in shards if place in shard.places]
        return next((peer for peer in (*writers, *able) if peer in able), None)

    def _leave_out(self, place: Place, seats: list[tuple[Member, Place]]) -> list[Command]:
        """Nobody there can make the checkpoint visible: what that place holds does not count."""
        failed = self.unable.get(PUBLISHER, {})
        reasons = {member.peer: failed[member.peer] for member, other in seats if other == place}
        for stage, shard in list(self.shards.items()):
            shard.places.pop(place, None)
            self.refused[stage, place] = "; ".join(f"{peer}: {why}" for peer, why in reasons.items())
            self.unable.setdefault(stage, {}).update(reasons)
            if not shard.places:
                del self.shards[stage]
                self.asked.pop((stage, SOURCE), None)
        return [] if self.shards else self._give_up(reasons, "publishing")

    def _end(self, shards: list[SavedShard], places: list[Place]) -> list[Command]:
        step, self.step = self.step, None
        assert step is not None
        self.published = step
        copies = min(len(shard.places) for shard in shards)
        text = f"step {step} saved at {self.paths[places[0]]}"
        notes: list[Command] = [Note("checkpoint", text if copies < 2 else f"{text} in {copies} copies")]
        if self.refused and copies < self.settings.copies:
            why = "; ".join(dict.fromkeys(self.refused.values()))
            notes.append(Note("state", f"step {step} is saved in {copies} of {self.settings.copies} copies: {why}"))
        return notes

    def _ask(
        self, stage: int, place: Place, peer: Peer, message: SaveRequest | CopyRequest | PublishRequest, now: float
    ) -> list[Command]:
        last, at, times = self.asked.get((stage, place), ("", 0.0, 0))
        if last != peer:
            times = 0
        elif now - at < REPEAT_BEATS * 2 ** min(times - 1, DOUBLED) * self.settings.heartbeat_s:
            return []  # a shard may take minutes, and its record may be as large as a chunk
        self.asked[stage, place] = (peer, now, times + 1)
        return [Send(peer, message)]

    def _give_up(self, reasons: Mapping[Peer, str], what: str) -> list[Command]:
        step, self.step = self.step, None
        why = "; ".join(f"{peer}: {reason}" for peer, reason in reasons.items()) or "no replica left"
        if self.hasty:
            return [Note("checkpoint", f"step {step} was over before it could be saved: {what}: {why}")]
        return [Note("unsaved", f"NOT saved at step {step}: {what}: {why}; older checkpoints are kept")]

    def _answers(self, peer: Peer, stage: int, place: Place) -> bool:
        """It answers the newest such request."""
        asked = self.asked.get((stage, place))
        return asked is not None and asked[0] == peer

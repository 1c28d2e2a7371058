"""One replica's part in a round: cut its sum, exchange chunks, hold the group's reduced gradient.

For server.py, which owns the books and decides whether a round may start now and what a commit does. layout.py decides who takes
part, who adds which chunk, and who sends it to whom. Here: ReduceChunk, GatherChunk and Resend, the order of the tasks, and what a
round that ends early leaves behind. At most one round is held; a newer number replaces it. A task that is running when its round
ends goes on, and its blobs go with it.

Rounds are numbered by stage: where a peer of another stage has died, the next Round keeps the number of my stage's exchange, which goes on
meanwhile. So a round here is my stage's exchange, and its number is Round.round_of(stage).

In a group of one row the owner of a chunk adds what all replicas send, and sends the sum to all. Of several rows the owner of a row's
chunk adds what its row sends, cuts that sum and sends it to those who add up the rows; the sum that it receives it sends to its row.

A large gradient goes piece by piece. No replica is further than one piece ahead of another, since every sum needs a ReduceChunk of each,
sent when the piece before was gathered: it may still ask for a sum of that one, and a chunk that is early belongs to the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from shoal.core.allreduce.bounds import allowed
from shoal.core.allreduce.checked import SumChecks, SummedChunk
from shoal.core.allreduce.chunks import part_of, resend_of, sum_for_joiner, sum_of
from shoal.core.allreduce.early_chunks import EarlyChunk, EarlyChunks
from shoal.core.allreduce.layout import Layout, early_parts, fenced, layout_of, objection
from shoal.core.allreduce.piece import Piece, Work, is_checked, missing_from, own_parts, summed, sums_for_others
from shoal.core.allreduce.waiting import NEVER, Copies, Pace, RoundTimes, Waiting
from shoal.core.messages import (
    Add,
    AddRow,
    Command,
    Committed,
    Cut,
    Do,
    Done,
    Failed,
    Gather,
    GatherChunk,
    Peer,
    ReduceChunk,
    Reduced,
    Resend,
    Round,
    RoundFailed,
    RoundWaits,
    Send,
    Settings,
    Share,
    View,
    Withdraw,
)
from shoal.core.replica_state import TEXT, ReplicaState, drop


class Current(msgspec.Struct):
    """The round under way. `live` are the blobs held for it, in the order of their arrival; dicts keep that order."""

    message: Round
    group: tuple[Peer, ...]
    joiners: tuple[Peer, ...]  # joiners of the stage, who get the sums from my row and bring nothing
    piece: Piece
    pace: Pace  # of that piece
    began: float
    waiting: Waiting
    copies: Copies
    repeat_at: float = 0.0  # when Reduced is sent again
    lost: bool = False  # a chunk came only when it was sent again
    tasks: dict[str, Work] = msgspec.field(default_factory=dict)
    live: dict[str, None] = msgspec.field(default_factory=dict)
    checks: SumChecks = msgspec.field(default_factory=SumChecks)
    reduced: Reduced | None = None


class Rounds:
    def __init__(self, name: Peer, settings: Settings, serial: Iterator[int], replica: ReplicaState) -> None:
        self._name = name
        self._settings = settings
        self._serial = serial
        self._replica = replica
        self._stage = 0  # of the round under way
        self.current: Current | None = None
        self._newest = -1  # the highest round of this step that I began or refused
        self._reason = ""  # why I am not in that round (any more)
        self._early = EarlyChunks()
        self._void: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}  # task of a past round: inputs, outputs
        self._times = RoundTimes(settings.heartbeat_s, settings.min_request_timeout_s)
        self.line_rates: dict[Peer, int] = {}  # of my stage's replicas, as the last round said
        self._free_at = NEVER  # when my line should have passed what joiners get of rounds that are over

    @property
    def cutting(self) -> int | None:
        """The step whose sum is being copied, or pieces of it still will be: nothing may be added to it."""
        current = self.current
        if current is None:
            return None
        copied = current.piece.layout.last and not any(isinstance(task, Cut) for task in current.tasks.values())
        return None if copied else current.message.step

    @property
    def active(self) -> int | None:
        return None if self.current is None else self.current.message.round

    @property
    def deadline(self) -> float | None:
        current = self.current
        if current is None:
            return None
        if current.reduced is not None:
            return current.repeat_at
        return min(current.waiting.ask_at, current.waiting.report_at(current.pace))

    def begin(self, message: Round, me: Share, now: float) -> list[Command]:
        """Take part, with `me` as what I booked, or say why not. The caller has seen to it that nothing is being added."""
        view = self._replica.view
        assert view is not None
        current = self.current
        if current is not None and current.message.round == message.round:
            if me not in [msgspec.structs.replace(one, line_rate=0) for one in message.groups[self._stage]]:
                return self.fail(message, f"the round is not of what I booked, {len(me.indices)} microbatches")
            return self._report() if current.reduced else []
        if message.round <= self._newest:
            return self._report_failed(message, self._reason or f"round {self._newest} is newer", "")
        commands = self.end(f"round {message.round} replaces it")
        self._newest, self._stage = message.round, self._replica.stage
        reason = objection(message, view, me, self._settings.microbatches)
        if reason:
            return commands + self.fail(message, reason)
        shares = message.groups[self._stage] if self._stage < len(message.groups) else ()
        if self._name not in [share.peer for share in shares]:
            self._reason = f"{self._name} is not listed"
            return commands
        self.current = current = self._joined(message, shares, now)
        return commands + self._cut(current) + self._take_early(current, now)

    def _joined(self, message: Round, shares: tuple[Share, ...], now: float) -> Current:
        """That round, in which I am listed, with its first piece."""
        group, layout, stage = tuple(share.peer for share in shares), self._layout(shares, 0), self._stage
        known, row = self._replica.known.present, layout.row_of(self._name)
        listed = message.joiners[stage] if stage < len(message.joiners) else ()
        joiners = tuple(
            peer
            for peer in dict.fromkeys(listed)
            if known.get(peer) == stage and peer not in group and layout.row_of(peer) == row
        )
        piece = Piece(layout, layout.role(self._name))
        self._times.begin(self._replica.length, shares)
        pace = self._pace(piece)
        self.line_rates = {share.peer: share.line_rate for share in shares}
        waiting, copies = Waiting(now + pace.patience_s, now), Copies(self.line_rates[self._name], self._free_at)
        return Current(message, group, joiners, piece, pace, now, waiting, copies)

    def fail(self, message: Round, reason: str, culprit: str = "") -> list[Command]:
        """That round cannot end here: tell the leader, now and whenever it asks for the same round again."""
        self._newest = max(self._newest, message.round)
        commands = self.end(reason)
        return commands + self._report_failed(message, reason, culprit)

    def end(self, reason: str, committed: bool = False) -> list[Command]:
        """Let go of the round under way. Blobs stay while a running task reads them. What waits for a line is withdrawn: once the round is
        committed all replicas have its sums."""
        current, self.current, self._reason = self.current, None, reason
        if current is None:
            return []
        if current.reduced is None:
            self._times.end(None, lost=False)
        if committed and current.joiners:
            self._free_at = current.copies.free_at
        read = {blob for task in current.tasks.values() for blob in task.reads}
        self._void |= {task.id: (task.reads, task.makes) for task in current.tasks.values()}
        of, dropped = current.message, drop(tuple(blob for blob in current.live if blob not in read))
        return [Withdraw(of.epoch, of.step, of.round, committed), *dropped]

    def turn(self, everything: bool = True) -> list[Command]:
        """What I held of the step is void, or (not everything) it is over. Then early chunks of the view's own step stay: with
        delayed updates a round may begin with the very view that commits the one before, and another replica may receive it first."""
        view = self._replica.view
        stays = (view.epoch, view.step) if view is not None and not everything else None
        early = self._early.keep_step(stays)
        commands = self.end("the step is over", committed=True)
        self._newest, self._reason = -1, ""
        return commands + early

    def on_view(self, view: View) -> list[Command]:
        """A view of the same step: a peer that left it is fenced, so an exchange with it must not be finished. Those of other stages are
        their own replicas' to end, and the leader's, who commits none of them."""
        commands = self._early.keep_senders(self._serves)
        lost = fenced(self.current.message, view, (self._stage,)) if self.current is not None else None
        return commands + (self.end(f"{lost} left in view {view.number}") if lost is not None else [])

    @property
    def shares(self) -> tuple[Share, ...]:  # of my stage, in the round under way
        return self.current.message.groups[self._stage] if self.current is not None else ()

    def holds(self, last: Committed) -> bool:
        """Whether the reduced gradient held here is the one that was committed."""
        reduced = self.current.reduced if self.current is not None else None
        return (
            reduced is not None
            and (reduced.step, reduced.round) == (last.step, last.round_of(self._stage))
            and self._stage < len(last.digests)
            and last.digests[self._stage] == reduced.digest
        )

    def summed(self, round_: int) -> tuple[SummedChunk, ...]:
        """The chunks of that round whose sums are checked against their parts; () where it is not gathered here, or they are not."""
        current = self.current
        if current is None or current.reduced is None or current.message.round != round_:
            return ()
        return tuple(current.checks.chunks)

    # ------------------------------------------------------------------------------------------------------- messages

    def on_message(
        self, peer: Peer, message: ReduceChunk | GatherChunk | Resend, blobs: tuple[str, ...], fault: str, now: float
    ) -> list[Command]:
        view = self._replica.view
        if view is None or message.epoch != view.epoch or not self._serves(peer):
            return drop(blobs)
        if message.step == view.step + 1 and not isinstance(message, Resend):
            return self._hold(peer, EarlyChunk(message, blobs, fault))
        if message.step != view.step:
            return drop(blobs)
        current = self.current
        if current is not None and message.round == current.message.round:
            if peer not in current.group:
                return drop(blobs)
            if isinstance(message, Resend):
                return self._send_again(current, peer, message, now) + drop(blobs)
            if message.chunk // current.piece.layout.stride > current.piece.number:
                return self._hold(peer, EarlyChunk(message, blobs, fault))
            return self._take(current, peer, EarlyChunk(message, blobs, fault), now)
        if isinstance(message, Resend) or message.round <= self._newest:
            return drop(blobs)
        return self._hold(peer, EarlyChunk(message, blobs, fault))

    def _serves(self, peer: Peer) -> bool:
        """A replica of my own stage; whoever is not cannot share a group with me."""
        stages = self._replica.known.present
        return peer != self._name and peer in stages and stages[peer] == stages.get(self._name)

    def _hold(self, peer: Peer, early: EarlyChunk) -> list[Command]:
        """Few per sender, parts and sums apart: of its newest round and piece."""
        replicas = list(self._replica.known.present.values()).count(self._replica.stage)
        return self._early.hold(peer, early, early_parts(replicas))

    def _take_early(self, current: Current, now: float) -> list[Command]:
        stride, newest, piece = current.piece.layout.stride, current.message.round, current.piece.number

        def due(peer: Peer, early: EarlyChunk) -> bool:
            number, chunk = early.when
            later = peer in current.group and chunk // stride > piece
            return number < newest or (number == newest and not later)

        commands: list[Command] = []
        for peer, early in self._early.take_due(due):
            if early.message.round == newest and peer in current.group and self.current is current:
                commands += self._take(current, peer, early, now)
            else:
                commands += drop(early.blobs)
        return commands

    def _take(self, current: Current, peer: Peer, early: EarlyChunk, now: float) -> list[Command]:
        message, role = early.message, current.piece.role
        if isinstance(message, ReduceChunk):
            held = current.piece.parts.get(message.chunk, {})
            adding = message.chunk in current.piece.adding.values()
            wanted = peer in role.adds.get(message.chunk, ()) and peer not in held and not adding
        else:
            from_its_sender = role.receives.get(message.chunk) == peer
            wanted = from_its_sender and message.chunk not in current.piece.sums and not current.piece.gathering
        if not wanted:
            return drop(early.blobs)
        if early.fault or len(early.blobs) != 1:
            what = f"{type(message).__name__} of chunk {message.chunk} from {peer}"
            reason = f"{what}: {early.fault or f'{len(early.blobs)} blobs, not 1'}"
            return drop(early.blobs) + self.fail(current.message, reason, peer)
        blob = early.blobs[0]
        commands = self._report_waits(current, ()) if current.waiting.on_new(now) else []
        current.live[blob], current.lost = None, current.lost or message.again
        if isinstance(message, ReduceChunk):
            current.piece.parts.setdefault(message.chunk, {})[peer] = blob
            return commands + self._go_on(current)
        commands += self._send_sum(current, message.chunk, blob, now)
        if message.chunk in role.forwards and message.chunk in current.piece.cut:  # nobody asks for it again
            commands += _forget(current, (current.piece.cut.pop(message.chunk),))
        return commands + self._go_on(current)

    def _send_again(self, current: Current, peer: Peer, message: Resend, now: float) -> list[Command]:
        """A chunk that is not ready is sent when it is; one that has been sent may be on its way, where a second copy would only make
        it longer: it is sent again when it is asked for twice or in vain, or when the connection has broken since. Of a sum that lacks a
        part the leader learns whose part that is."""
        role, piece, chunk = current.piece.role, current.piece, (peer, message.chunk, message.sum)
        if not message.sum:
            adds = {**role.sends, **role.forwards}.get(message.chunk)
            blob = piece.cut.get(message.chunk) if adds == peer else None
        else:
            blob = (piece.sums if message.chunk in role.broadcasts else piece.before).get(message.chunk)
        if blob is not None:
            sends = current.copies.again(chunk, piece.layout.values(message.chunk), message.vain, now)
            of, weighted = current.message, piece.layout.weighted
            copy = sum_of(of, message.chunk, weighted, True) if message.sum else part_of(of, message.chunk, True)
            return [Send(peer, copy, (blob,))] if sends else []
        if not message.vain or current.reduced is not None or current.waiting.reported_at is not None:
            return []
        return self._report_missing(current, now)

    def on_unreachable(self, peer: Peer) -> None:
        if self.current is not None:  # what was on its way there is lost
            self.current.copies.keep(lambda chunk: chunk[0] != peer)

    # ---------------------------------------------------------------------------------------------------------- tasks

    def on_done(self, done: Done, now: float) -> list[Command]:
        if done.id in self._void:
            inputs, outputs = self._void.pop(done.id)
            return drop(inputs + outputs)
        current = self.current
        task = current.tasks.pop(done.id, None) if current is not None else None
        if current is None or task is None:
            return []
        current.live.update(dict.fromkeys(task.makes))
        match task:
            case Cut():
                return self._on_cut(current, task, now)
            case AddRow():
                cut = dict(zip(sorted(current.piece.role.forwards), task.outs, strict=True))
                return _forget(current, task.parts) + self._send_cut(current, current.piece.role.forwards, cut, now)
            case Add():
                current.checks.on_added(self._name, done.result, current.piece.layout.rows[0], current.group)
                sends = self._send_sum(current, current.piece.adding[task.id], task.out, now)
                return sends + _forget(current, task.parts) + self._go_on(current)
            case Gather():
                current.checks.on_gathered(current.piece.layout.owners, done.result)
                current.checks.chunks += summed(current.piece.layout, current.group, done.result.digests)
                if not task.last:
                    return self._next_piece(current, now)
                self._times.end(now - current.began, current.lost)
                of, result, sums = current.message, done.result, current.checks.of(current.group)
                current.reduced = Reduced(of.epoch, of.step, of.round, result.digest, result.norm_sq, sums)
                current.repeat_at = now + 2 * self._settings.heartbeat_s
                kept = sums_for_others(current.piece)
                over = tuple(blob for chunk, blob in current.piece.sums.items() if chunk not in kept)
                return _forget(current, over) + self._report()

    def on_failed(self, failed: Failed, now: float) -> list[Command]:
        if failed.id in self._void:
            return drop(self._void.pop(failed.id)[0])
        current = self.current
        task = current.tasks.pop(failed.id, None) if current is not None else None
        if current is None or task is None:
            return []
        return self.fail(current.message, f"{type(task).__name__} failed: {failed.reason}")

    def _cut(self, current: Current) -> list[Command]:
        if self._name in current.piece.layout.listeners:
            return []
        outs = tuple(f"s/{next(self._serial)}" for _ in current.piece.role.sends)
        most = allowed(self._replica.view, self._stage, current.message, self._name, self._settings)
        return self._do(current, Cut(self._task_id(), current.message.step, current.piece.role.cuts, outs, most))

    def _layout(self, shares: tuple[Share, ...], piece: int) -> Layout:
        return layout_of(self._replica.length, shares, self._settings, piece)

    def _next_piece(self, current: Current, now: float) -> list[Command]:
        """This piece is gathered: drop it, but for the sums that others may miss, and begin the next one."""
        before = sums_for_others(current.piece)
        commands = _forget(current, tuple(blob for blob in current.live if blob not in before.values()))
        current.copies.keep(lambda chunk: chunk[1] in before and chunk[2])
        number = current.piece.number + 1
        layout = self._layout(current.message.groups[self._stage], number)
        current.piece = Piece(layout, layout.role(self._name), number, before=before)
        current.pace = self._pace(current.piece)
        withdrawn = self._report_waits(current, ()) if current.waiting.on_piece(current.pace, now) else []
        return commands + withdrawn + self._cut(current) + self._take_early(current, now)

    def _on_cut(self, current: Current, task: Cut, now: float) -> list[Command]:
        cut = dict(zip(sorted(current.piece.role.sends), task.outs, strict=True))
        if current.piece.layout.rows == ((self._name,),):  # nobody else brings anything
            ((number, blob),) = cut.items()
            return self._send_sum(current, number, blob, now) + self._go_on(current)
        return self._send_cut(current, current.piece.role.sends, cut, now)

    def _send_cut(self, current: Current, adds: dict[int, Peer], cut: dict[int, str], now: float) -> list[Command]:
        """Send what was cut to those who add it up."""
        current.piece.cut |= cut
        sends: list[Command] = []
        for number, peer in adds.items():
            if peer == self._name:
                current.piece.parts.setdefault(number, {})[peer] = cut[number]
                continue
            sends.append(Send(peer, part_of(current.message, number), (cut[number],)))
            current.copies.add((peer, number, False), current.piece.layout.values(number), now)
        return sends + self._go_on(current)

    def _send_sum(self, current: Current, number: int, blob: str, now: float) -> list[Command]:
        """The group's sum of that chunk is here: those who have it from me get it."""
        current.piece.sums[number] = blob
        if number not in current.piece.role.broadcasts:
            return []
        layout, of, sends = current.piece.layout, current.message, list[Command]()
        for peer in current.piece.role.broadcasts[number]:
            current.copies.add((peer, number, True), layout.values(number), now)
            sends.append(Send(peer, sum_of(of, number, layout.weighted), (blob,)))
        for peer in current.joiners:
            current.copies.take(layout.values(number), now)
            sends.append(Send(peer, sum_for_joiner(of, number, self._replica.hurries(peer)), (blob,)))
        return sends

    def _go_on(self, current: Current) -> list[Command]:
        """Start what has all it needs: adding up chunks, gathering the whole."""
        commands: list[Command] = []
        role, round_, adding = current.piece.role, current.message, current.piece.adding
        if len(adding) < len(role.adds):
            for number, peers in role.adds.items():
                held = current.piece.parts.get(number, {})
                if len(held) == len(peers) and number not in adding.values():
                    commands += self._add(current, number, tuple(held[peer] for peer in peers))
        if len(current.piece.sums) == len(role.receives) and not current.piece.gathering:
            current.piece.gathering = True
            sums = tuple(current.piece.sums[number] for number in role.receives)
            start, last = current.piece.layout.bounds[0], current.piece.layout.last
            own = own_parts(current.piece)
            commands += self._do(current, Gather(self._task_id(), round_.step, round_.round, sums, start, last, own))
        return commands

    def _add(self, current: Current, number: int, parts: tuple[str, ...]) -> list[Command]:
        """Of the group's sum, or of my row's, which is cut for those who add up the rows."""
        task: Add | AddRow
        if number in current.piece.role.receives:
            task = Add(self._task_id(), parts, f"s/{next(self._serial)}", is_checked(current.piece.layout))
        else:
            outs = tuple(f"s/{next(self._serial)}" for _ in current.piece.role.forwards)
            task = AddRow(self._task_id(), parts, current.piece.role.seams, outs)
        current.piece.adding[task.id] = number
        return self._do(current, task)

    # ----------------------------------------------------------------------------------------------------------- time

    def tick(self, now: float) -> list[Command]:
        current, deadline = self.current, self.deadline
        if current is None or deadline is None or now < deadline:
            return []
        if current.reduced is not None:
            current.repeat_at = now + 2 * self._settings.heartbeat_s
            return self._report()
        waiting, pace, commands = current.waiting, current.pace, list[Command]()
        if now >= waiting.report_at(pace):
            commands += self._report_missing(current, now)
        if now >= waiting.ask_at:
            waiting.on_asking(pace, now)
            of, vain = current.message, waiting.reported_at is not None
            missing = missing_from(current.piece, self._name)
            commands += [Send(peer, resend_of(of, number, sum, vain)) for peer, number, sum in missing]
        return commands

    def _report_missing(self, current: Current, now: float) -> list[Command]:
        missing = missing_from(current.piece, self._name)
        current.waiting.on_report(now)
        return self._report_waits(current, missing, current.waiting.in_vain(current.pace, now)) if missing else []

    def _pace(self, piece: Piece) -> Pace:
        return self._times.pace(piece.layout.bounds[-1] - piece.layout.bounds[0])

    # ---------------------------------------------------------------------------------------------------------- sends

    def _report(self) -> list[Command]:
        reduced, leader = self.current.reduced if self.current is not None else None, self._replica.leader
        return [Send(leader, reduced)] if reduced is not None and leader is not None else []

    def _report_waits(
        self, current: Current, missing: Sequence[tuple[Peer, int, bool]], vain: bool = True
    ) -> list[Command]:
        """Whom I wait for; nobody any more: what the leader has heard before is withdrawn."""
        parts, sums = (tuple(dict.fromkeys(one[0] for one in missing if one[2] is sum)) for sum in (False, True))
        of, leader = current.message, self._replica.leader
        waits = RoundWaits(of.epoch, of.step, of.round, parts, sums, vain, current.piece.number)
        return [Send(leader, waits)] if leader is not None else []

    def _report_failed(self, message: Round, reason: str, culprit: str) -> list[Command]:
        failed = RoundFailed(message.epoch, message.step, message.round, reason[:TEXT], culprit)
        return [Send(self._replica.leader, failed)] if self._replica.leader is not None else []

    def _do(self, current: Current, task: Work) -> list[Command]:
        current.tasks[task.id] = task
        return [Do(task)]

    def _task_id(self) -> str:
        return f"s/{next(self._serial)}"


def _forget(current: Current, blobs: tuple[str, ...]) -> list[Command]:
    for blob in blobs:
        current.live.pop(blob, None)
    return drop(blobs)

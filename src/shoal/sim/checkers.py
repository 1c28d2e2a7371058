"""Watches a simulated swarm from outside and says when an invariant is broken.

Knows nothing of how the machines decide: it sees what they send, which views they hold for agreed, which tasks they
start and how these end. Each method checks one thing and can be tested alone; a violation is a sentence, with the
peer and the virtual second.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

import msgspec

from shoal.core import messages as m
from shoal.core.consensus.phases import ended, misplaced, transition
from shoal.core.leader.undo.decision import FEW, INTERVALS, MOST
from shoal.core.names import key_of
from shoal.sim.leavers import Leavers
from shoal.sim.tasks.task_runner import UNLIKE, Reduced, World

ALL_MEET = 16  # replicas of a group, at most
MEETS = 2.5  # times the root of how many they are: others that one of a larger group exchanges its gradient with
Shares = tuple[m.Share, ...]


class Violation(msgspec.Struct, frozen=True):
    time_s: float
    peer: m.Peer
    checker: str
    text: str

    def __str__(self) -> str:
        return f"{self.time_s:.3f} s, {self.peer}: [{self.checker}] {self.text}"


class Rounds:
    """The rounds that leaders have begun: whom each peer averages with, and whom it sends chunks to."""

    def __init__(self) -> None:
        self.newest = 0  # the highest number
        self._groups: dict[tuple[int, int, int], dict[int, Shares]] = {}  # by epoch, step, round; then by stage
        self._met: dict[tuple[object, ...], set[m.Peer]] = {}

    def begin(self, message: m.Round) -> None:
        for stage, group in enumerate(message.groups):  # a stage whose exchange goes on keeps its group
            known = self._groups.setdefault((message.epoch, message.step, message.round_of(stage)), {})
            known.setdefault(stage, group)
        self.newest = max(self.newest, message.round)

    def group_of(self, peer: m.Peer, message: m.ReduceChunk | m.GatherChunk) -> tuple[m.Peer, ...]:
        """With whom that peer averages in that round, itself too."""
        groups = self._groups.get((message.epoch, message.step, message.round), {})
        listed = ([share.peer for share in group] for group in groups.values())
        return next((tuple(names) for names in listed if peer in names), ())

    def meet(self, peer: m.Peer, to: m.Peer, message: m.ReduceChunk | m.GatherChunk) -> str:
        """Gradients go to those of the own group, and in a large one to few of them: what is wrong, or ''."""
        key = message.epoch, message.step, message.round, peer
        met = self._met.setdefault(key, set())
        if to in met:
            return ""
        met.add(to)
        group = self.group_of(peer, message)
        most = len(group) - 1 if len(group) <= ALL_MEET else MEETS * len(group) ** 0.5
        if to not in group or len(met) > most:
            return f"{message} to {to}, one of {len(met)} in a group of {len(group)}"
        return ""


class Bookings:
    """Who has booked each microbatch at each stage, as the heartbeats tell."""

    def __init__(self) -> None:
        self._known: dict[m.Peer, tuple[int, int, int]] = {}  # epoch, step, how many bookings are known
        self._bookers: dict[tuple[int, int, int, int], m.Peer] = {}

    def add(self, peer: m.Peer, heartbeat: m.Heartbeat, view: m.View | None) -> Iterator[str]:
        """No microbatch is booked at two members of `view`; a fenced one's bookings are void. None: nothing is judged."""
        known = self._known.get(peer, (-1, -1, 0))
        seen = known[2] if known[:2] == (heartbeat.epoch, heartbeat.work) else 0
        for booking in heartbeat.books[seen:]:
            key = (heartbeat.epoch, heartbeat.work, heartbeat.stage, booking.index)
            other = self._bookers.get(key, peer)
            if other != peer and view is not None:
                # A peer that was removed and rejoined at another stage has no old books
                members = [(member.peer, member.stage) for member in view.members]
                if all((one, heartbeat.stage) in members for one in (peer, other)):
                    yield f"microbatch {booking.index} stage {heartbeat.stage}, also by {other}"
            self._bookers[key] = peer
        self._known[peer] = (heartbeat.epoch, heartbeat.work, max(seen, len(heartbeat.books)))


class Watch:
    """All checkers of one simulation. `newest` is the highest view that any machine holds for agreed."""

    def __init__(self, settings: m.Settings, world: World, now: Callable[[], float]) -> None:
        self.settings = settings
        self.world = world
        self.violations: list[Violation] = []
        self.newest: m.View | None = None
        self.trusting = True  # nobody lies
        self.rounds = Rounds()
        self._now = now
        self._bookings = Bookings()
        self._views: dict[int, m.View] = {}
        self._leaders: dict[int, m.Peer] = {}
        self._sent: dict[tuple[object, ...], m.Peer] = {}
        self._digests: dict[tuple[int, int, int], str] = {}  # (epoch, version, stage) -> parameters
        self.commits = Commits(self, settings.first_step)
        self.durability = Durability(self)
        self.leavers = Leavers(now, self.report)

    def report(self, peer: m.Peer, checker: str, text: str) -> None:
        self.violations.append(Violation(self._now(), peer, checker, text))

    def resumes(self, step: int, digests: Sequence[str]) -> None:
        """The run begins with these parameters, one digest per stage: those of its newest checkpoint."""
        for stage, digest in enumerate(digests):
            self._digests[(0, step, stage)] = digest

    # ---------------------------------------------------------------------------------------------------- sending

    def sent(self, peer: m.Peer, to: m.Peer, message: m.Message) -> None:
        """No request twice to different peers; one leader per term; no more connections than a round needs."""
        if isinstance(message, m.Forward | m.Backward):
            kind = type(message).__name__
            key = (peer, message.epoch, message.step, message.index, message.stage, message.attempt, kind)
            other = self._sent.setdefault(key, to)
            if other != to:
                self.report(peer, "attempt", f"{message} to {to}, after the same attempt to {other}")
        elif type(message) is m.Heartbeat:
            judged = self.newest if self.trusting else None
            for text in self._bookings.add(peer, message, judged):
                self.report(peer, "booked twice", text)
        elif type(message) is m.Round:
            self.rounds.begin(message)
        elif type(message) is m.ReduceChunk or (type(message) is m.GatherChunk and not message.to_joiner):
            fault = self.rounds.meet(peer, to, message)
            if fault:
                self.report(peer, "connections", fault)
        elif type(message) is m.Lead or (type(message) is m.Propose and message.proof is None):
            other = self._leaders.setdefault(message.term, peer)
            if other != peer:
                self.report(peer, "leader", f"leads term {message.term} beside {other}")

    # ------------------------------------------------------------------------------------------------------- views

    def agreed(self, peer: m.Peer, view: m.View) -> None:
        """Called for every view that a machine newly holds for agreed."""
        known = self._views.get(view.number)
        if known is not None:
            if known is not view and known != view:
                self.report(peer, "agreement", f"view {view.number} is {view}, elsewhere {known}")
            return
        self._views[view.number] = view
        self._whole(peer, view)
        before = self._views.get(view.number - 1)
        if before is not None:
            self._follows(peer, before, view)
        elif self.newest is not None and view.epoch > self.newest.epoch and not view.kept:
            self.commits.begun_with = view.step  # an operator's word: its number is far ahead
        if self.newest is None or view.number > self.newest.number:
            self.leavers.agreed(self.newest, view)
            self.newest = view
        self.commits.undone.agreed(peer, before, view)
        if view.last is not None and (before is None or before.last != view.last):
            self.commits.add(peer, self._now(), view, view.last)
            if before is not None:
                self._unfenced(peer, before, view.last)

    def views(self) -> list[m.View]:
        """All that were agreed, in order."""
        return [self._views[number] for number in sorted(self._views)]

    def _whole(self, peer: m.Peer, view: m.View) -> None:
        names = [member.peer for member in view.members]
        if len(set(names)) != len(names):
            self.report(peer, "view", f"view {view.number} names a member twice: {names}")
        if not names:
            self.report(peer, "view", f"view {view.number} has no members")
        if any(owner >= len(names) for owner in view.owners):
            self.report(peer, "view", f"view {view.number} has owners {view.owners} of {len(names)} members")
        wrong = misplaced(view, self.settings)
        if wrong:
            self.report(peer, "view", f"view {view.number} is {wrong}")
        if view.started and not ended(view, self.settings) and len(view.owners) != self.settings.count(view.work):
            self.report(peer, "view", f"view {view.number} has {len(view.owners)} owners")

    def _follows(self, peer: m.Peer, before: m.View, view: m.View) -> None:
        if transition(before, view) is None:
            text = f"{before.phase.value} at step {before.step} to {view.phase.value} at step {view.step}"
            self.report(peer, "view", f"view {view.number} goes from {text}")
        if view.epoch == before.epoch:
            if view.work == before.work and view.started and before.started:
                entered = {(one.peer, one.stage) for one in view.members if one not in before.members}
                again = entered & {(one.peer, one.stage) for one in before.fenced + view.fenced}
                if again:
                    self.report(peer, "view", f"view {view.number} takes {sorted(again)} back in the middle of a step")
            if before.started:
                self._staffed(peer, before, view)
        elif view.epoch < before.epoch:
            self.report(peer, "view", f"view {view.number} goes back to epoch {view.epoch}")
        elif not view.kept:
            self.commits.begun_with = view.step
            self.durability.goes_back(view.step)

    def _measured_at_the_end(self, view: m.View) -> None:
        """The last parameters are measured, unless the run stopped because of what was measured before."""
        expected, heldout = heldout_loss(self.settings, self.world, view.step), view.heldout
        due = expected is not None and view.step >= self.settings.steps
        if due and (heldout is None or (heldout.step, heldout.loss) != (view.step, expected)):
            self.report("", "held out", f"finished at step {view.step} with {heldout}, not {expected}")

    def _staffed(self, peer: m.Peer, before: m.View, view: m.View) -> None:
        """A move never empties a stage: only the removal of its last replica does."""
        left = {one.peer for one in view.members}
        for stage in range(self.settings.stages):
            if any(one.stage == stage for one in view.members):
                continue
            moved = [one.peer for one in before.members if one.stage == stage and one.peer in left]
            if moved:
                self.report(peer, "staffed", f"view {view.number} moves {moved} away from stage {stage}, now empty")

    # ------------------------------------------------------------------------------------------------------ commits

    def _unfenced(self, peer: m.Peer, before: m.View, last: m.Committed) -> None:
        """Only peers of the view that ends with the step may have been averaged."""
        present = {one.peer for one in before.members + before.joining}
        fenced = [share.peer for group in last.groups for share in group if share.peer not in present]
        if fenced:
            self.report(peer, "fenced", f"step {last.step} averages {fenced}, not of view {before.number}")

    def applying(self, peer: m.Peer, view: m.View | None, task: m.Apply) -> None:
        """A gradient is applied only if the agreed view says that its round was committed."""
        last = self.commits.known.get((view.epoch, task.step)) if view is not None else None
        scale = self.settings.scale(last.counted) if last is not None else 0.0
        there = view.members + view.joining if view is not None else ()
        stage = next((one.stage for one in there if one.peer == peer), 0)
        if last is None or (last.round_of(stage), last.norm, scale) != (task.round, task.norm, task.scale):
            self.report(peer, "apply", f"{task} although step {task.step} was committed as {last}")

    def holds(self, peer: m.Peer, epoch: int, stage: int, version: int, digest: str) -> None:
        """Replicas of a stage have the same parameters at the same version, but for those of a peer that is unlike the others."""
        if digest.startswith(UNLIKE):
            return
        known = self._digests.setdefault((epoch, version, stage), digest)
        if known != digest:
            self.report(
                peer, "replicas", f"stage {stage} version {version} epoch {epoch} is {digest}, elsewhere {known}"
            )

    def published(self, peer: m.Peer, step: int, digests: Sequence[str]) -> None:
        """A checkpoint holds the parameters of one epoch's commit of that step, at every stage."""
        epochs = {epoch for epoch, version, _ in self._digests if version == step}
        stages = range(len(digests))
        wanted = [tuple(self._digests.get((epoch, step, stage), "") for stage in stages) for epoch in sorted(epochs)]
        if not any(
            all(not a or a == b or b.startswith(UNLIKE) for a, b in zip(known, digests, strict=True))
            for known in wanted
        ):
            self.report(peer, "checkpoint", f"step {step} is published as {tuple(digests)}; known: {wanted}")

    # -------------------------------------------------------------------------------------------------------- the end

    def end(self, finished: Sequence[m.Peer], alive: Sequence[m.Peer]) -> None:
        """Called when the run is over: every step is committed once, the account adds up, all living peers know."""
        view = self.newest
        assert view is not None
        if not view.finished:
            self.report("", "progress", f"the run is not finished: {progress(view)}")
            return
        self._measured_at_the_end(view)
        if not ended(view, self.settings):
            self.report("", "account", f"finished at step {view.step} of {self.settings.steps}")
        account = view.account
        if account.counted_twice:
            self.report("", "account", f"counted twice: {account}")
        steps = view.step - self.settings.first_step
        if account.committed != steps * self.settings.microbatches:
            self.report("", "account", f"{account} after {steps} x {self.settings.microbatches}")
        skipped = sum(last.skipped > 0 for last in self.commits.known.values())
        if account.skipped != self.settings.microbatches * skipped:
            self.report("", "account", f"{account}, but {skipped} steps were skipped")
        if account.issued != account.committed:
            self.report("", "account", f"nothing waits, is in flight or booked, yet {account}")
        members = {one.peer for one in view.members}
        missing = sorted(members.intersection(alive).difference(finished))
        if missing:
            self.report(missing[0], "progress", f"members that never finished: {missing}")


class Commits:
    """Every step is committed once and alike everywhere, and made of each of its microbatches once, in the order that the commit
    lists, with parameters of the right age. `begun_with`: the version that the run began with, or went back to."""

    def __init__(self, watch: Watch, begun_with: int) -> None:
        self.watch, self.begun_with = watch, begun_with
        self.undone = Undone(watch)
        self.known: dict[tuple[int, int], m.Committed] = {}  # (epoch, step)
        self.times_s: list[float] = []

    def add(self, peer: m.Peer, now: float, view: m.View, last: m.Committed) -> None:
        """`view` says that the step of `last` is committed."""
        epoch, settings, world = view.epoch, self.watch.settings, self.watch.world
        known = self.known.setdefault((epoch, last.step), last)
        if known != last:
            self.watch.report(
                peer, "commit", f"step {last.step} of epoch {epoch} is committed as {last}, elsewhere {known}"
            )
            return
        self.times_s.append(now)
        if view.step != last.step + 1:
            self.watch.report(peer, "commit", f"step {last.step} is committed and the next is {view.step}")
        if len(last.digests) != settings.stages and not last.skipped:
            self.watch.report(peer, "commit", f"step {last.step} is committed with {len(last.digests)} digests")
        if last.skipped and not any(step == last.step for step, _, _ in world.nonfinite):
            self.watch.report(peer, "skipped", f"step {last.step} is skipped, and its results are finite")
        counted = 0 if last.skipped else sum(world.counted(last.step, at) for at in range(settings.microbatches))
        if last.counted != counted:
            self.watch.report(peer, "counted", f"step {last.step} has {counted} counted tokens, not {last.counted}")
        self._measured(peer, last)
        below = ""
        for stage, digest in enumerate(last.digests):
            reduced = world.reduced.get(digest)
            if reduced is None:
                self.watch.report(peer, "commit", f"step {last.step}, stage {stage}: nobody has reduced {digest!r}")
                return
            text, below = contents(reduced, last.step, settings.microbatches, below)
            if text:
                self.watch.report(peer, "exactly once", f"step {last.step} of epoch {epoch}, stage {stage}: {text}")
            else:
                self._aged(peer, last.step, stage, below)
                self._in_order(peer, last, stage, reduced)

    def _measured(self, peer: m.Peer, last: m.Committed) -> None:
        """Each held-out microbatch is in the mean once, with the parameters of that step: the value of one process alone."""
        expected = None if last.skipped else heldout_loss(self.watch.settings, self.watch.world, last.step)
        if last.heldout != expected:
            text = f"step {last.step} has the held-out loss {last.heldout}, not {expected}"
            self.watch.report(peer, "held out", text)

    def _in_order(self, peer: m.Peer, last: m.Committed, stage: int, reduced: Reduced) -> None:
        """What was added is what the commit lists, in its order: all that one process needs to get the same bits."""
        listed = [index for share in last.groups[stage] for index in share.indices]
        for number, chunk in enumerate(reduced.chunks):
            if [one[1] for one in chunk] != listed:
                text = (
                    f"step {last.step}, stage {stage}: chunk {number} is of {[one[1] for one in chunk]}, not {listed}"
                )
                self.watch.report(peer, "order", text)
                return

    def _aged(self, peer: m.Peer, step: int, stage: int, parameters: str) -> None:
        """A step's gradient is made with parameters that hold all gradients but those of the last `staleness` steps before it; the
        first step after a beginning has no other parameters than those it begins with."""
        wanted = max(step - self.watch.settings.staleness, self.begun_with)
        version = self.watch.world.versions.get((stage, parameters))
        if version != wanted:
            text = f"step {step}, stage {stage} was computed with version {version}, not {wanted}"
            self.watch.report(peer, "staleness", text)


class Undone:
    """Whoever is evicted for false values has contributed to no step that is left when the run has gone back for it, but for steps before
    the one from which on no check has passed, as the view before says. How often, and by how many steps, is bounded."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._steps: dict[str, set[int]] = {}  # by key, of the history that the parameters hold
        self.times = 0  # gone back

    def agreed(self, peer: m.Peer, before: m.View | None, view: m.View) -> None:
        if before is not None and view.epoch > before.epoch:
            self._steps = {key: {one for one in steps if one < view.step} for key, steps in self._steps.items()}
            if _times(view) > _times(before):
                self.times += 1
                self._went_back(peer, before, view)
        if view.last is not None and view.last.step < view.step:
            for share in (share for group in view.last.groups for share in group if share.indices):
                self._steps.setdefault(key_of(share.peer), set()).add(view.last.step)

    def _went_back(self, peer: m.Peer, before: m.View, view: m.View) -> None:
        left = {one.peer for one in view.members + view.joining}
        convicted = [one.peer for one in before.members if one.peer not in left and f"what {one.peer} " in view.reason]
        unchecked = {one.key: one.since for one in before.undoing.unchecked} if before.undoing is not None else {}
        for one in convicted:
            since = unchecked.get(key_of(one), 0)
            if kept := {step for step in self._steps.get(key_of(one), ()) if step >= since}:
                text = (
                    f"view {view.number} goes back to step {view.step} for {one}, which contributed to {sorted(kept)}"
                )
                self.watch.report(peer, "undone", text)
        settings, new = self.watch.settings, view.undoing or m.Undoing()
        trained = before.step - settings.first_step + new.steps
        if new.steps > max(FEW, INTERVALS * settings.save_every, MOST * trained):
            self.watch.report(peer, "undone", f"{new.steps} steps of {trained} are undone for evictions")


def _times(view: m.View) -> int:
    return view.undoing.times if view.undoing is not None else 0


class Durability:
    """A checkpoint that is reported saved can be read in full from the machines alive, as long as fewer of them have died since than it has
    copies. (A machine that dies takes its storage with it.)"""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        # By step: who said so, copies, machines that died since
        self._reported: dict[int, tuple[m.Peer, int, int]] = {}

    def reported(self, peer: m.Peer, text: str) -> None:
        match = re.fullmatch(r"step (\d+) saved at .*?(?: in (\d+) copies)?", text)
        if match is not None:
            self._reported[int(match[1])] = peer, int(match[2] or 1), 0
            self._check()

    def goes_back(self, step: int) -> None:
        """What is later than that is void, and is written again."""
        self._reported = {saved: known for saved, known in self._reported.items() if saved <= step}

    def machine_lost(self) -> None:
        self._reported = {step: (peer, copies, died + 1) for step, (peer, copies, died) in self._reported.items()}
        self._check()

    def _check(self) -> None:
        world = self.watch.world
        readable = world.readable()
        for step, (peer, copies, died) in list(self._reported.items()):
            have = world.copies(step, readable[step]) if step in readable else 0
            if (
                died < copies
                and have < copies - died
                and not any(step in one.damaged for one in world.storages.values())
            ):
                text = f"step {step} was reported saved in {copies} copies, {died} machines have died since, and {have} are left"
                self.watch.report(peer, "durability", text)
                del self._reported[step]


def heldout_loss(settings: m.Settings, world: World, step: int) -> float | None:
    """Of the parameters of that version, as one process would add it; None: it is not measured."""
    results = [world.measured(step, index) for index in range(settings.microbatches, settings.count(step))]
    counted = sum(result.counted for result in results)
    return sum((result.loss or 0.0) * result.counted for result in results) / counted if counted else None


def contents(reduced: Reduced, step: int, microbatches: int, below: str) -> tuple[str, str]:
    """What is wrong with a stage's reduced gradient ('' if nothing), and the parameters of that stage that made it.

    Every index once, of this step, each computed with the same parameters, from the outputs of the stage `below`."""
    own = ""
    for number, chunk in enumerate(reduced.chunks):
        if reduced.bounds[number] == reduced.bounds[number + 1]:
            continue
        indices = sorted(one[1] for one in chunk)
        if indices != list(range(microbatches)):
            return f"chunk {number} holds indices {indices}", own
        origins = {(one[0], one[2], one[3], one[4]) for one in chunk}
        # An unlike peer computes until it is noticed.
        origins = {one for one in origins if not one[2].startswith(UNLIKE)} or {min(origins)}
        if len(origins) != 1:
            return f"chunk {number} was made with different parameters: {sorted(origins)}", own
        of, under, own, _ = origins.pop()
        if of != step:
            return f"chunk {number} is of step {of}", own
        if under != below:
            return f"chunk {number} was made from outputs of {under!r}, the stage below is {below!r}", own
    return "", own


def progress(view: m.View) -> str:
    members = ", ".join(f"{one.peer}:{one.stage}" for one in view.members)
    joining = ", ".join(f"{one.peer}:{one.stage}" for one in view.joining)
    return (
        f"view {view.number} epoch {view.epoch} step {view.step} {view.phase.value} members [{members}] "
        f"joining [{joining}] account {view.account}, because {view.reason!r}"
    )

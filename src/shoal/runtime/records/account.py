"""Where every sample went, measured from what the members agreed on: the groups listed in each step's commit.

Nothing is taken on trust: a sample counts as committed when, at every stage, exactly one replica of the committed round lists it.
Fed with the agreed views that any number of peers report, in any order, twice or not at all; for the launcher's
summary and exit code.

A run that lost a stage goes back to a checkpoint under a new epoch. What older epochs committed from there on is void: it is counted
as undone and appears nowhere else, so that every step stands in the account once, as the history that survives has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from shoal.core.consensus.override import times_gone_back
from shoal.core.messages import Account, Committed, View


class Step(msgspec.Struct, frozen=True):
    """A committed step as it was first heard of."""

    epoch: int
    commit: Committed
    heard_s: float
    account: Account = Account()  # of the whole run, by the members' count, as of this commit
    recovered: int = 0  # how often the whole run had gone back to a checkpoint
    stages: int = 0  # of the session that committed it, which a later one may cut otherwise; 0: not written down then
    microbatches: int = 0  # of this step; likewise
    saved: int = 0  # the step of the newest checkpoint, as of this commit


class Base(msgspec.Struct, frozen=True):
    """What a resumed run begins with: the account of all sessions before, as of the last commit that they told of. Every count but
    `issued` and `committed`, which follow from the step, only ever grows."""

    account: Account = Account()
    recovered: int = 0
    taken_over: int = (
        0  # first steps, which another run committed: they are in the checkpoint, and their commits are not here
    )


class Totals(msgspec.Struct, frozen=True):
    """In microbatches. `balanced`: each one issued was committed once, at every stage of every step that stands."""

    steps: int
    issued: int
    committed: int
    redone: int
    lost: int
    counted_twice: int
    undone: int  # committed, then given up by going back to a checkpoint or by a restart; issued and committed again
    recovered: int  # times gone back
    taken_over: int  # first steps, committed by another run whose checkpoint this one took over
    balanced: bool
    reason: str  # what does not balance, in words; '' when all does


class Books:
    """The commits of a run. A resumed run starts at `first_step` with `before`, the commits that its checkpoint holds, and with `base`;
    the members count from there on, and their epochs begin at 0 again."""

    def __init__(
        self,
        stages: int,
        microbatches: int,
        first_step: int = 0,
        before: tuple[Step, ...] = (),
        base: Base | None = None,
    ) -> None:
        self.stages, self.microbatches = stages, microbatches
        self.first_step = first_step
        self.base = base if base is not None else base_of(before)
        self.view: View | None = None  # the newest
        self.conflicts: set[int] = set()  # steps that were committed in two ways
        self.ahead: set[int] = set()  # steps that were averaged while the next one was computed
        self.changes = 0  # grows whenever `steps` is another
        self._begins: dict[int, int] = {}  # epoch -> the first step that it trained, as far as heard
        self._steps: dict[int, Step] = {step.commit.step: step for step in before}
        sizes = {step.commit.step: step.microbatches or microbatches for step in before}
        self._before = sum(sizes.get(number, microbatches) for number in range(first_step))  # of all earlier sessions

    def agree(self, view: View, now: float) -> Step | None:
        """Take note of an agreed view; its commit, when it was not known yet and stands."""
        self._go_back(view)
        if view.ahead and not self._void(view.epoch, view.step):
            self.ahead.add(view.step)
        if self.view is None or view.number > self.view.number:
            self.view = view
        if view.last is None or view.last.step < self.first_step or self._void(view.epoch, view.last.step):
            return None
        known = self._steps.get(view.last.step)
        if known is not None and known.epoch >= view.epoch:
            if known.epoch == view.epoch and known.commit != view.last:
                self.conflicts.add(view.last.step)
            return None
        step = Step(
            epoch=view.epoch,
            commit=view.last,
            heard_s=now,
            account=self._whole(view.account),
            recovered=self.base.recovered + times_gone_back(view.epoch),
            stages=self.stages,
            microbatches=self.microbatches,
            saved=view.saved,
        )
        self._steps[view.last.step] = step
        self.changes += 1
        return step

    def _go_back(self, view: View) -> None:
        """An epoch trains anew whatever it begins with; views come in any order, so the earliest step heard of counts.

        The view that begins an epoch names no commit; every later one names a commit of that epoch."""
        if view.epoch == 0:
            return
        begins = view.step if view.last is None else view.last.step
        if begins >= self._begins.get(view.epoch, begins + 1):
            return
        self._begins[view.epoch] = begins
        self.ahead = {step for step in self.ahead if step < begins}
        for number in [n for n, step in self._steps.items() if self._void(step.epoch, n)]:
            del self._steps[number]
            self.changes += 1

    def _void(self, epoch: int, step: int) -> bool:
        """Was that step of that epoch trained again by a later one?"""
        return any(begins <= step for later, begins in self._begins.items() if later > epoch)

    @property
    def steps(self) -> tuple[Step, ...]:
        """In order."""
        return tuple(self._steps[number] for number in sorted(self._steps))

    @property
    def account(self) -> Account:
        """The members' own count, of the whole run."""
        return self._whole(self.view.account if self.view is not None else Account())

    @property
    def recovered(self) -> int:
        """How often the whole run has gone back to a checkpoint by itself."""
        return self.base.recovered + (times_gone_back(self.view.epoch) if self.view is not None else 0)

    def _whole(self, account: Account) -> Account:
        return Account(
            issued=self._before + account.issued,
            committed=self._before + account.committed,
            redone=self.base.account.redone + account.redone,
            counted_twice=self.base.account.counted_twice + account.counted_twice,
            killed=self.base.account.killed + account.killed,
            joined=self.base.account.joined + account.joined,
            undone=self.base.account.undone + account.undone,
        )

    def totals(self) -> Totals:
        account = self.account
        steps = self.view.step if self.view is not None else self.first_step
        issued = account.issued
        committed = lost = twice = 0
        reasons: list[str] = []
        for number in range(steps):
            step = self._steps.get(number)
            if step is None and number < self.base.taken_over:
                committed += self.microbatches
                continue
            if step is None:
                lost += self.microbatches
                reasons.append(f"nobody reported how step {number} was committed")
                continue
            once, missing, doubled = self._count(step)
            if missing or doubled:
                reasons.append(f"step {number}: {missing} microbatches missing, {doubled} counted twice")
            committed, lost, twice = committed + once, lost + missing, twice + doubled
        for number in sorted(self.conflicts):
            reasons.append(f"step {number} was committed in two ways")
            twice += self.microbatches
        twice = max(twice, account.counted_twice)
        if committed != issued:
            reasons.append(f"issued {issued}, committed {committed}")
        if account.committed != committed:
            reasons.append(f"the members count {account.committed} committed, their rounds hold {committed}")
        return Totals(
            steps=steps,
            issued=issued,
            committed=committed,
            redone=account.redone,
            lost=lost,
            counted_twice=twice,
            undone=account.undone,
            recovered=self.recovered,
            taken_over=self.base.taken_over,
            balanced=not reasons and twice == 0,
            reason="; ".join(reasons[:5]),
        )

    def _count(self, step: Step) -> tuple[int, int, int]:
        """Microbatches of the step held once at every stage, missing at some stage, held twice at some stage: the stages and microbatches
        of the session that committed it."""
        commit, count = step.commit, step.microbatches or self.microbatches
        earlier = commit.step < self.first_step
        stages = step.stages or (len(commit.groups) if earlier else self.stages)
        missing: set[int] = set()
        doubled: set[int] = set()
        groups = commit.groups + ((),) * (stages - len(commit.groups))
        for group in groups:
            held = Counter(index for share in group for index in share.indices)
            missing.update(index for index in range(count) if index not in held)
            doubled.update(index for index, times in held.items() if times > 1 or index >= count)
        once = sum(index not in missing and index not in doubled for index in range(count))
        return once, len(missing), len(doubled)


def base_of(steps: tuple[Step, ...]) -> Base:
    """Of a history that stands, in order."""
    return Base(steps[-1].account, steps[-1].recovered) if steps else Base()


def restarted(standing: tuple[Step, ...], first_step: int, microbatches: int, before: Base = Base()) -> Base:
    """What a run begins with that goes on at `first_step`, with all later commits of its history undone.

    `before`: what the session before began with. Asked again before anything more was committed, the answer is the same: a count
    is the larger of what its commits say and of what is known already."""
    found = base_of(standing)
    void = sum(step.microbatches or microbatches for step in standing if step.commit.step >= first_step)
    account = msgspec.structs.replace(found.account, undone=found.account.undone + void)
    fields = account.__struct_fields__
    larger = {field: max(getattr(account, field), getattr(before.account, field)) for field in fields}
    return Base(Account(**larger), max(found.recovered, before.recovered), min(before.taken_over, first_step))


def surviving(steps: Iterable[Step]) -> tuple[Step, ...]:
    """The history that stands, in order, from commits as they were written down: a later epoch trained anew whatever it
    began with."""
    kept: dict[int, Step] = {}
    highest = -1
    for step in steps:
        number = step.commit.step
        if number <= highest:
            kept = {n: old for n, old in kept.items() if n < number or old.epoch >= step.epoch}
        kept[number] = step
        highest = max(kept) if number <= highest else number
    return tuple(kept[number] for number in sorted(kept))

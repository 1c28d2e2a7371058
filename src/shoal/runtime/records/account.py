"""The account of every sample, measured from the agreed views: the groups listed in each step's commit.

No counter of a peer is trusted: a sample is committed when, at every stage, exactly one replica of the committed round lists it.
Input are the agreed views that peers report, in any order, repeated or missing; output are the launcher's summary and exit code.

A run that lost a stage goes back to a checkpoint under a new epoch. Later commits of older epochs are void: they count as
undone only, so that the account holds every step once.

A run may last for months: of commits older than the newest `WHOLE`, only what the account needs is kept.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable

import msgspec

from shoal.core.consensus.override import times_gone_back
from shoal.core.messages import Account, Committed, View
from shoal.core.names import invite_of, key_of

WHOLE = 256  # newest commits that are kept with their groups: the books of a step are some KB
BLOCK = 64  # older ones, the last of which says who contributed what to all of them
LONGEST_S = 3600.0  # between two commits, that counts as time in which their peers took part: clocks of sessions differ


class Credit(msgspec.Struct, frozen=True, array_like=True):
    """What one key contributed at one stage. `who`: key id, a dot, and the id of the invite that it came by."""

    who: str
    stage: int
    microbatches: int  # whose gradients it added to the step's sums
    steps: int = 1  # that it was averaged in
    seconds: float = 0.0  # that these took


class Tally(msgspec.Struct, frozen=True):
    """What the groups and digests of a commit came to, once they are dropped: numbers of microbatches booked once at every stage,
    missing at a stage, booked twice at a stage."""

    once: int
    missing: int
    doubled: int
    digest: str  # of the whole commit, so that another one of the same step is still known as such
    credits: tuple[Credit, ...] = ()  # of this step, or of so many that end with it:
    credited: int = 0


class CommittedStep(msgspec.Struct, frozen=True):
    """A committed step as first reported."""

    epoch: int
    commit: Committed
    heard_s: float
    account: Account = Account()  # of the whole run, by the members' count, at this commit
    recovered: int = 0  # times the whole run had gone back to a checkpoint
    stages: int = 0  # of the session that committed it; a later one may cut otherwise; 0: unknown
    microbatches: int = 0  # of this step; 0: unknown
    saved: int = 0  # the step of the newest checkpoint at this commit
    # So many steps before it were committed while no peer of this machine took part: the members count them
    away: int = 0
    tally: Tally | None = None  # of an old one, whose commit has no groups, digests and joiners any more

    def commits(self, other: Committed) -> bool:
        """Is it that commit?"""
        return self.commit == other if self.tally is None else self.tally.digest == _digest(other)


class Base(msgspec.Struct, frozen=True):
    """The account that a resumed run starts with: of all sessions before, at their last reported commit. Every count never
    decreases, but `issued` and `committed`, which follow from the step."""

    account: Account = Account()
    recovered: int = 0
    adopted_steps: int = 0  # first steps, committed by another run: in the checkpoint, without commits here
    away: tuple[int, ...] = ()  # steps that were committed while no peer of this machine took part
    first_step: int = 0  # that the session begins with


class Totals(msgspec.Struct, frozen=True):
    """Counts of microbatches. `balanced`: each issued one was committed once at every stage of every valid step."""

    steps: int
    issued: int
    committed: int
    redone: int
    lost: int
    counted_twice: int
    undone: int  # committed, then lost by going back to a checkpoint or a restart; issued and committed again
    recovered: int  # times the run went back to a checkpoint
    skipped: int  # of those committed, the ones of steps that changed nothing
    adopted_steps: int  # first steps, committed by another run whose checkpoint this one adopted
    away: int  # of the steps, those committed while no peer of this machine took part, by the members' count
    balanced: bool
    reason: str  # what does not balance; '': nothing
    begun: int = 0  # of a step that had begun when nothing more was heard, if nothing else is amiss


class CommitHistory:
    """The commits of a run. A resumed run starts at `first_step` with `before`, the commits that its checkpoint holds, and with `base`;
    the members count from there on, and their epochs begin at 0 again."""

    def __init__(
        self,
        stages: int,
        microbatches: int,
        first_step: int = 0,
        before: tuple[CommittedStep, ...] = (),
        base: Base | None = None,
        returns: bool = False,
    ) -> None:
        """`returns`: this machine comes back to a session that others have gone on with."""
        self.stages, self.microbatches = stages, microbatches
        self.first_step = first_step
        self.base = base if base is not None else base_of(before)
        self.view: View | None = None  # the newest
        self.conflicts: set[int] = set()  # steps with two different commits
        self.overlapped: set[int] = set()  # steps averaged while the next one was computed
        self.changes = 0  # increased with every change of `steps`
        self._returns = returns
        self._first_step_of_epoch: dict[int, int] = {}  # epoch -> the first step that it trained, as far as reported
        self._steps: dict[int, CommittedStep] = {step.commit.step: step for step in before}
        # At that number of changes: several views a second ask
        self._ordered: tuple[int, tuple[CommittedStep, ...]] = -1, ()
        self._missing: dict[int, int] = {}  # microbatches that a stage lacks, by step of this session
        self._short = 0  # all earlier steps are short
        self._shorten(max(self._steps, default=-1))
        sizes = {step.commit.step: step.microbatches or microbatches for step in before}
        # Microbatches of all earlier sessions
        self._before = sum(sizes.get(number, microbatches) for number in range(first_step))

    def agree(self, view: View, now: float) -> CommittedStep | None:
        """Add an agreed view. Returns its commit when it is new and valid."""
        self._go_back(view)
        if view.ahead and not self._void(view.epoch, view.step):
            self.overlapped.add(view.step)
        if self.view is None or view.number > self.view.number:
            self.view = view
        if view.last is None or view.last.step < self.first_step or self._void(view.epoch, view.last.step):
            return None
        away = self._missed(view.last.step)
        known = self._steps.get(view.last.step)
        if known is not None and known.epoch >= view.epoch:
            if known.epoch == view.epoch and not known.commits(view.last):
                self.conflicts.add(view.last.step)
            return None
        step = CommittedStep(
            epoch=view.epoch,
            commit=view.last,
            heard_s=now,
            account=self._whole(view.account),
            recovered=self.base.recovered + times_gone_back(view.epoch),
            stages=self.stages,
            microbatches=self.microbatches,
            saved=view.saved,
            away=away,
        )
        self._steps[view.last.step] = step
        if missing := self._count(step)[1]:
            self._missing[view.last.step] = missing
        self.changes += 1
        self._shorten(view.last.step)
        return step

    def _missed(self, step: int) -> int:
        """How many steps just before it have no commit here. A machine that has returned hears of every one once it is a member."""
        if not self._returns:
            return 0
        known = [number for number in self._steps if number < step]
        return step - 1 - max(known, default=self.first_step - 1)

    def _away(self) -> set[int]:
        """Steps of which only the members' count says how they were committed."""
        away = {*self.base.away, *(number for step in self._steps.values() for number in _away(step))}
        return away - self._steps.keys()

    def _shorten(self, newest: int) -> None:
        for number in range(self._short, newest - WHOLE + 1):
            step = self._steps.get(number)
            if step is not None and step.tally is None:
                self._steps[number] = _short(step, self._count(step), self._steps.get(number - 1))
            if number % BLOCK == BLOCK - 1:
                self._join_credits(number)
        self._short = max(self._short, newest - WHOLE + 1)

    def _join_credits(self, last: int) -> None:
        """Of the block of steps that ends with `last`: only that one still says who contributed what."""
        block = [step for number in range(last - BLOCK + 1, last + 1) if (step := self._steps.get(number)) is not None]
        if last not in self._steps or any(step.tally is None for step in block):
            return
        credits, credited = credits_of(block)
        for step in block:
            mine = (tuple(credits), credited) if step.commit.step == last else ((), 0)
            assert step.tally is not None
            tally = msgspec.structs.replace(step.tally, credits=mine[0], credited=mine[1])
            self._steps[step.commit.step] = msgspec.structs.replace(step, tally=tally)

    def _go_back(self, view: View) -> None:
        """Drop commits that the view's epoch trains again. Views arrive in any order, so the earliest reported step counts.

        The first view of an epoch names no commit; every later one names a commit of that epoch."""
        if view.epoch == 0:
            return
        begins = view.step if view.last is None else view.last.step
        if begins >= self._first_step_of_epoch.get(view.epoch, begins + 1):
            return
        self._first_step_of_epoch[view.epoch] = begins
        self._short = min(self._short, begins)
        self.overlapped = {step for step in self.overlapped if step < begins}
        for number in [n for n, step in self._steps.items() if self._void(step.epoch, n)]:
            del self._steps[number]
            self._missing.pop(number, None)
            self.changes += 1

    def _void(self, epoch: int, step: int) -> bool:
        """Whether a later epoch trained that step again."""
        return any(begins <= step for later, begins in self._first_step_of_epoch.items() if later > epoch)

    @property
    def steps(self) -> tuple[CommittedStep, ...]:
        """All valid commits in order."""
        if self._ordered[0] != self.changes:
            self._ordered = self.changes, tuple(self._steps[number] for number in sorted(self._steps))
        return self._ordered[1]

    @property
    def account(self) -> Account:
        """The members' own count, of the whole run."""
        return self._whole(self.view.account if self.view is not None else Account())

    @property
    def lost(self) -> int:
        """Microbatches that a stage of a committed step of this session lacks."""
        return sum(self._missing.values())

    @property
    def recovered(self) -> int:
        """Times the whole run has gone back to a checkpoint by itself."""
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
            skipped=self.base.account.skipped + account.skipped,
        )

    def _begun(self) -> int:
        """Microbatches of the steps that are being computed."""
        view = self.view
        return self.microbatches * (1 + view.begun) if view is not None and view.started and not view.finished else 0

    def totals(self) -> Totals:
        account = self.account
        steps = self.view.step if self.view is not None else self.first_step
        issued = account.issued
        away = self._away()
        unheard = {*range(self.base.adopted_steps), *away} - self._steps.keys()
        committed = lost = twice = 0
        reasons: list[str] = []
        for number in range(steps):
            step = self._steps.get(number)
            if number in unheard:
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
        begun = self._begun() if issued - committed == self._begun() and not reasons else 0
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
            skipped=account.skipped,
            recovered=self.recovered,
            adopted_steps=self.base.adopted_steps,
            away=sum(number < steps for number in away),
            balanced=not reasons and twice == 0,
            reason="; ".join(reasons[:5]),
            begun=begun if len(reasons) == 1 else 0,
        )

    def _count(self, step: CommittedStep) -> tuple[int, int, int]:
        """Numbers of microbatches booked once at every stage, missing at a stage, booked twice at a stage; for the stages and
        microbatches of the session that committed the step."""
        tally = step.tally
        return self._counted(step) if tally is None else (tally.once, tally.missing, tally.doubled)

    def _counted(self, step: CommittedStep) -> tuple[int, int, int]:
        commit, count = step.commit, step.microbatches or self.microbatches
        if commit.skipped:
            return count, 0, 0
        earlier = commit.step < self.first_step
        stages = step.stages or (len(commit.groups) if earlier else self.stages)
        missing: set[int] = set()
        doubled: set[int] = set()
        groups = commit.groups + ((),) * (stages - len(commit.groups))
        for group in groups:
            replicas_of = Counter(index for share in group for index in share.indices)
            missing.update(index for index in range(count) if index not in replicas_of)
            doubled.update(index for index, times in replicas_of.items() if times > 1 or index >= count)
        once = sum(index not in missing and index not in doubled for index in range(count))
        return once, len(missing), len(doubled)


def _away(step: CommittedStep) -> range:
    """Steps just before it that were committed while no peer of this machine took part."""
    return range(step.commit.step - step.away, step.commit.step)


def _digest(commit: Committed) -> str:
    return hashlib.blake2b(msgspec.msgpack.encode(commit), digest_size=8).hexdigest()


def _short(step: CommittedStep, counts: tuple[int, int, int], before: CommittedStep | None) -> CommittedStep:
    commit = msgspec.structs.replace(step.commit, groups=(), digests=(), joiners=())
    tally = Tally(*counts, _digest(step.commit), _credits(step, before), credited=1)
    return msgspec.structs.replace(step, commit=commit, tally=tally)


def _credits(step: CommittedStep, before: CommittedStep | None) -> tuple[Credit, ...]:
    """Of one commit with its groups, to whoever was averaged."""
    seconds = step.heard_s - before.heard_s if before is not None else 0.0
    seconds = seconds if 0.0 < seconds < LONGEST_S else 0.0
    return tuple(
        Credit(f"{key_of(share.peer)}.{invite_of(share.peer)}", stage, len(share.indices), 1, seconds)
        for stage, group in enumerate(step.commit.groups)
        for share in group
    )


def signed_only(steps: Iterable[CommittedStep], proven: Iterable[Committed]) -> list[CommittedStep]:
    """Those of these steps whose commits are `proven`, with the groups of these: nothing of what a launcher wrote down is believed but
    which commits stand."""
    by_digest = {_digest(commit): commit for commit in proven}
    signed = []
    for step in steps:
        commit = by_digest.get(step.tally.digest if step.tally is not None else _digest(step.commit))
        if commit is not None:
            signed.append(msgspec.structs.replace(step, commit=commit, tally=None, heard_s=0.0))
    return signed


class Credits:
    """Who contributed what to the steps that were added, in their order: one credit for each key and stage; and to how many of them that
    is known. Steps that were undone are in no history, and credited to nobody."""

    def __init__(self) -> None:
        self.credited = 0
        self._totals: dict[tuple[str, int], list[float]] = {}
        self._before: CommittedStep | None = None

    def add(self, step: CommittedStep) -> None:
        tally, credits = step.tally, _credits(step, self._before)
        self.credited += tally.credited if tally is not None else 1
        self._before = step
        for one in credits if tally is None else tally.credits:
            sums = self._totals.setdefault((one.who, one.stage), [0, 0, 0.0])
            for at, value in enumerate((one.microbatches, one.steps, one.seconds)):
                sums[at] += value

    @property
    def listed(self) -> list[Credit]:
        return [
            Credit(who, stage, int(n), int(count), s) for (who, stage), (n, count, s) in sorted(self._totals.items())
        ]


def credits_of(steps: Iterable[CommittedStep]) -> tuple[list[Credit], int]:
    """Of all these steps, and of how many of them it is known."""
    credits = Credits()
    for step in steps:
        credits.add(step)
    return credits.listed, credits.credited


def gone_back_s(steps: Iterable[CommittedStep], began_s: float) -> float:
    """Seconds that going back to checkpoints has cost: from a step's commit until the next one was committed for good, after an epoch in
    between had been given up. `began_s`: when the first step was committed, which counts where that was given up, too."""
    lost_s, before = 0.0, None
    for step in steps:
        if step.epoch > (before.epoch if before is not None else 0):
            lost_s += max(0.0, step.heard_s - (before.heard_s if before is not None else began_s))
        before = step
    return lost_s


def base_of(steps: tuple[CommittedStep, ...]) -> Base:
    """The base of a run that continues a valid history, in order."""
    return Base(steps[-1].account, steps[-1].recovered) if steps else Base()


def restarted(standing: tuple[CommittedStep, ...], first_step: int, microbatches: int, before: Base = Base()) -> Base:
    """The base of a run that resumes at `first_step` and undoes all later commits of its history.

    `before`: the base of the session before. Idempotent until the next commit: each count is the larger of `before` and the
    commits."""
    base = base_of(standing)
    void = sum(step.microbatches or microbatches for step in standing if step.commit.step >= first_step)
    account = msgspec.structs.replace(base.account, undone=base.account.undone + void)
    fields = account.__struct_fields__
    larger = {field: max(getattr(account, field), getattr(before.account, field)) for field in fields}
    away = {*before.away, *(number for step in standing for number in _away(step))}
    return Base(
        account=Account(**larger),
        recovered=max(base.recovered, before.recovered),
        adopted_steps=min(before.adopted_steps, first_step),
        away=tuple(sorted(number for number in away if number < first_step)),
        first_step=first_step,
    )


def surviving(steps: Iterable[CommittedStep]) -> tuple[CommittedStep, ...]:
    """The valid history in order, from commits in the order in which they were written: a later epoch replaces the steps from its
    first one on."""
    history: dict[int, CommittedStep] = {}
    highest = -1
    for step in steps:
        number = step.commit.step
        if number <= highest:
            history = {n: old for n, old in history.items() if n < number or old.epoch >= step.epoch}
        history[number] = step
        highest = max(history) if number <= highest else number
    return tuple(history[number] for number in sorted(history))

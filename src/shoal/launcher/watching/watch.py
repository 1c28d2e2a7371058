"""What the peers' reports add up to: the live view's Snapshot, the end's Summary. For `shoal run` and `shoal join`.

Fed with the lines that peer processes write (runtime/records/report.py); every figure of the training itself comes from agreed views.
"""

from __future__ import annotations

import re
from collections import Counter, deque

import msgspec

from shoal import units
from shoal.config import Config, microbatches, tokens_per_step
from shoal.core.consensus.certificates import can_agree, casting_voter
from shoal.core.messages import Peer, Phase, Undoing, View
from shoal.dashboard import plot
from shoal.dashboard.account import HeldOut, PeerTraffic, Summary
from shoal.dashboard.terminal import Happening, Snapshot
from shoal.escaping import escaped, escaped_lines
from shoal.launcher.watching.members import Members
from shoal.launcher.watching.presence import Presence, natural
from shoal.runtime.records.account import Base, CommitHistory, CommittedStep, gone_back_s
from shoal.runtime.records.report import Agreed, AnyLine, Ended, Listening, Located, Notice, PeerProgress
from shoal.traffic import Traffic

HAPPENINGS = 60  # kept for the view
COMMITS = 20  # of these at most are commits, which every other event is rarer than
RECENT_STEPS = 20  # that the live tokens per second are measured over
_SAVED = re.compile(r"step (\d{1,15}) saved at (.*?)(?: in \d+ copies)?", re.DOTALL)
_NAME = re.compile(r"\b([a-z2-7]{6})[a-z2-7]{26}\.[0-9a-z]+(?:\.[a-z2-7]{12}\.[0-9]+)?\b")


class Resumed(msgspec.Struct, frozen=True):
    """Where a run goes on: a checkpoint's step, the commits before it, and the account of the sessions before."""

    first_step: int = 0
    steps: tuple[CommittedStep, ...] = ()
    base: Base = Base()
    checkpoint: str = ""  # its path; '' when there was none yet, and the run begins anew
    living: tuple[str, ...] = ()  # addresses of the others, who train the run already: this machine returns to it


class RunMonitor:
    """Everything known of one run. Times are of one monotonic clock; `started_s` is when the command was given."""

    def __init__(self, config: Config, started_s: float, resumed: Resumed) -> None:
        self.config, self.started_s, self.resumed = config, started_s, resumed
        self.books = CommitHistory(
            config.run.stages,
            microbatches(config.train),
            resumed.first_step,
            resumed.steps,
            resumed.base,
            returns=bool(resumed.living),
        )
        self.everyone = Members()
        self.presence = Presence()
        self.standing: dict[str, PeerProgress] = {}  # by label, of the peers that live
        self.carried: dict[Peer, PeerProgress] = {}  # the last that each peer told, those that are gone too
        self.happenings: deque[Happening] = deque(maxlen=HAPPENINGS)
        self.checkpoint = resumed.checkpoint
        self.saved = resumed.first_step  # the step of the newest checkpoint, as the members agree
        self._unable = ""  # why a checkpoint could not be saved, until one is
        self.killed = 0
        self.first_step_s: float | None = None  # from the command to the first step of this session
        self._losses: tuple[int, tuple[float, ...]] = (-1, ())

    def hear(self, label: str, line: AnyLine, now: float) -> CommittedStep | None:
        """Take in what peer `label` reports; a commit that is new."""
        match line:
            case Listening():
                self.labels[line.peer] = label
                self.presence.listening(label, now)
            case Located():
                self.everyone.machines[line.peer] = escaped(line.host)
                self.everyone.addresses[line.peer] = line.addresses
                self.everyone.regions[line.peer] = escaped(line.region)
            case PeerProgress():
                self.standing[label] = line
                self.carried[line.peer] = line
                self.presence.reported(label, line, now)
                self.everyone.update(self.standing, now)
            case Notice():
                if line.kind == "checkpoint" and (match := _SAVED.fullmatch(line.text)):
                    self.saved, self.checkpoint = max(self.saved, int(match[1])), escaped(match[2])
                    self._unable = ""
                elif line.kind == "unsaved":
                    self._unable = line.text
                self.tell(line.kind, line.text, now, label)
            case Agreed():
                return self._agreed(line.view, now)
            case Ended() if not line.ok and not line.user_error:  # that one is the command's own last line
                self.tell("trouble", line.reason, now, label)
        return None

    def _agreed(self, view: View, now: float) -> CommittedStep | None:
        before = self.books.view
        epoch = before.epoch if before is not None else 0
        step = self.books.agree(view, now)
        if self.books.view is view:
            self.everyone.evicted(before, view)
            for words in self.everyone.leavers(before, view):
                self.tell("left", words, now)
            self._unable = "" if view.saved > self.saved else self._unable
            back = view.epoch != epoch
            self.saved = view.saved if back else max(self.saved, view.saved)
        if step is not None and not step.commit.skipped and (spike := plot.spike(self.losses())):
            self.tell("spike", f"step {step.commit.step}: {spike}", now)
        if step is not None and self.first_step_s is None:
            self.first_step_s = now - self.started_s
        return step

    def tell(self, kind: str, text: str, now: float, label: str = "") -> None:
        serial = self.happenings[-1].serial + 1 if self.happenings else 1
        text = escaped(self._named(text))
        self.happenings.append(Happening(serial, now - self.started_s, escaped(kind), text, label))
        commits = [event for event in self.happenings if event.kind == "commit"]
        if len(commits) > COMMITS:
            self.happenings.remove(commits[0])

    def _named(self, text: str) -> str:
        """With peers' labels, or the beginnings of their names, instead of the whole."""
        for peer, known in self.labels.items():
            if peer in text:
                text = text.replace(peer, known)
        return _NAME.sub(r"\1", text)

    def remove(self, label: str, now: float, *, well: bool) -> None:
        """The peer's process has ended. `well`: as it said, in good order."""
        self.presence.ended(label, self.standing.pop(label, None), now, well=well)

    @property
    def labels(self) -> dict[Peer, str]:
        """Of this machine's peers."""
        return self.everyone.labels

    @property
    def entries(self) -> tuple[str, ...]:
        """Where joiners find the run through members on other machines."""
        return self.everyone.entries(self.books.view)

    @property
    def started(self) -> bool:
        return self.books.view is not None and self.books.view.started

    @property
    def began(self) -> bool:
        """A step has begun in this session, if only to go back to a checkpoint since."""
        return self.started or (self.books.view is not None and self.books.view.epoch > 0)

    @property
    def finished(self) -> bool:
        if self.books.view is None:  # there may be nothing left to do
            return self.resumed.first_step >= self.config.run.steps
        return self.books.view.finished

    @property
    def failed(self) -> str:
        """Why the members ended the run before its last step; '' while they did not."""
        return self._named(self.books.view.failed) if self.books.view is not None else ""

    def members(self) -> set[str]:
        """Labels of those in the newest view, whom the leader tells when the run is finished."""
        view = self.books.view
        return {self.labels.get(m.peer, "") for m in view.members + view.joining} if view is not None else set()

    def seats(self) -> list[tuple[str, int, str]]:
        """The members of the newest view: label ('' of another machine's peer), stage, and the name of its seat in the run's
        plan, or else its label, or else the beginning of its peer's name."""
        view, names = self.books.view, list(self.config.run.placement)
        seats = []
        for member in view.members if view is not None else ():
            label = self.labels.get(member.peer, "")
            name = names[member.seat] if 0 <= member.seat < len(names) else label or member.peer[:8]
            seats.append((label, member.stage, name))
        return seats

    def voters(self) -> list[str]:
        """Labels of those whose quorum decides."""
        view = self.books.view
        return [self.labels.get(peer, "") for peer in view.voters] if view is not None else []

    def hopeless(self, living: set[str]) -> bool:
        """So many voters have ended, as far as known here, that those left are no quorum and can agree on nothing more."""
        view = self.books.view if self.started and not self.finished else None
        if view is None:
            return False
        return not can_agree(view, [peer for peer in view.voters if self.labels.get(peer, "") in living | {""}])

    def casting_voter(self) -> str:
        """Label of the peer here whose vote decides between two equal halves; '' if there is none."""
        view = self.books.view
        return self.labels.get(casting_voter(view.voters, view.founder), "") if view is not None else ""

    def elsewhere(self) -> bool:
        """Has the newest view members on other machines?"""
        view = self.books.view
        return view is not None and any(member.peer not in self.labels for member in view.members)

    def expendable(self) -> list[str]:
        """Members without whom their stage still has a member that holds its state, and the others a majority."""
        view = self.books.view
        if view is None:
            return []
        living = {self.labels.get(member.peer, ""): member.stage for member in view.members}
        living = {label: stage for label, stage in living.items() if label in self.standing}
        if 2 * (len(living) - 1) <= len(view.voters):  # those who died a moment ago still have their votes
            return []
        stages = Counter(living.values())
        return sorted(label for label, stage in living.items() if stages[stage] > 1)

    def _undoing(self) -> Undoing:
        """What evictions have undone in this session."""
        view = self.books.view
        return (view.undoing if view is not None else None) or Undoing()

    def _gone_back_s(self) -> float:
        if not self.books.recovered or self.first_step_s is None:
            return 0.0
        steps = (step for step in self.books.steps if step.commit.step >= self.resumed.first_step)
        return gone_back_s(steps, self.started_s + self.first_step_s)

    def losses(self) -> tuple[float, ...]:
        if self._losses[0] != self.books.changes:
            self._losses = (
                self.books.changes,
                tuple(step.commit.loss for step in self.books.steps if not step.commit.skipped),
            )
        return self._losses[1]

    def rewards(self) -> dict[str, float]:
        """Of the newest step's preference pairs, by the names of Summary."""
        newest = self.books.steps[-1].commit.rewards if self.books.steps else None
        return {} if newest is None else {"reward_accuracy": newest.accuracy, "reward_margin": newest.margin}

    def tokens_per_s(self, recent: int | None = None) -> float:
        """Over the steps of this session but the first, whose time holds the start of the processes; or the recent ones."""
        step_s = self.step_s(recent)
        return tokens_per_step(self.config) / step_s if step_s else 0.0

    def step_s(self, recent: int | None = None) -> float:
        """Between two commits of this session, over the same steps; 0.0 while there are fewer than two."""
        steps = [step for step in self.books.steps if step.commit.step >= self.resumed.first_step]
        if recent is not None:
            steps = steps[-recent:]
        return (steps[-1].heard_s - steps[0].heard_s) / (len(steps) - 1) if len(steps) > 1 else 0.0

    @property
    def unable(self) -> str:
        """Why the last checkpoint could not be saved; '' when it was."""
        return self._unable

    def unsaved(self, ended: bool = False) -> str:
        """What should have been saved in this session and was not, since when and why; '' when all was, or still may be. `ended`: nothing
        will be saved any more."""
        due = [step.commit.step + 1 for step in self.books.steps if step.commit.save]
        missed = [step for step in due if step > max(self.saved, self.resumed.first_step)]
        if not missed or (len(missed) < 2 and not self._unable and not ended):
            return ""
        since = f"NOTHING SAVED SINCE STEP {self.saved}" if self.saved else "NOTHING SAVED YET"
        why = self._unable or "the checkpoint was not finished; see the log of the peer that led"
        return escaped(f"{since}: a checkpoint was due at step {missed[-1]}: {self._named(why)}")

    def snapshot(self, now: float) -> Snapshot:
        view, account = self.books.view, self.books.account
        return Snapshot(
            name=self.config.run.name,
            elapsed_s=now - self.started_s,
            step=view.step if view is not None else self.resumed.first_step,
            steps=0 if self.config.run.serve else self.config.run.steps,
            stages=self.config.run.stages,
            state=self._state(),
            first_step=self.resumed.first_step,
            losses=self.losses(),
            heldout=HeldOut.of(view.heldout) if view is not None else None,
            reward_accuracy=self.rewards().get("reward_accuracy"),
            tokens_per_s=self.tokens_per_s(RECENT_STEPS),
            step_s=self.step_s(RECENT_STEPS),
            issued=account.issued,
            committed=account.committed,
            redone=account.redone,
            counted_twice=account.counted_twice,
            lost=self.books.lost,
            undone=account.undone,
            skipped=account.skipped,
            joined=account.joined,
            recovered=self.books.recovered,
            evictions_undone=self._undoing().times,
            gone_back_s=self._gone_back_s(),
            staleness=self.config.train.staleness,
            stopped=self._stopped(),
            advice=self.advice(),
            survives=self.everyone.survives(view),
            peers=(
                *self.presence.lines(self.standing, now),
                *self.everyone.lines(view, self.standing),
            ),
            ended=tuple(self.presence.ended_lately(now)),
            sent=self._sent(),
            unsaved=self.unsaved(),
            happenings=tuple(self.happenings),
        )

    def summary(self, now: float, early: str = "") -> Summary:
        """`early`: why the run ended before its last step."""
        totals = self.books.totals()
        losses = self.losses()
        early = escaped_lines(early)
        reasons = [
            escaped_lines(reason) for reason in (early, "" if early and totals.begun else totals.reason) if reason
        ]
        return Summary(
            name=self.config.run.name,
            steps=totals.steps,
            losses=losses,
            final_loss=losses[-1] if losses else None,
            **self.rewards(),
            heldout=HeldOut.of(self.books.view.heldout) if self.books.view is not None else None,
            issued=totals.issued,
            committed=totals.committed,
            redone=totals.redone,
            lost=totals.lost,
            begun=totals.begun,
            counted_twice=totals.counted_twice,
            undone=totals.undone,
            skipped=totals.skipped,
            recovered=totals.recovered,
            evictions_undone=self._undoing().times,
            evictions_undone_steps=self._undoing().steps,
            gone_back_s=self._gone_back_s(),
            adopted_steps=totals.adopted_steps,
            away=totals.away,
            first_step=self.resumed.first_step,
            killed=self.killed + self.books.base.account.killed,
            removed=self.books.account.killed,
            joined=self.books.account.joined,
            tokens_per_s=self.tokens_per_s(),
            first_step_s=self.first_step_s,
            seconds=now - self.started_s,
            checkpoint=self.checkpoint,
            balanced=totals.balanced and not early,
            sent=self._sent(),
            traffic={
                self.labels.get(peer, peer): PeerTraffic(line.sent, line.received, line.kept_most)
                for peer, line in sorted(self.carried.items(), key=lambda item: natural(self.labels.get(item[0], "")))
            },
            staleness=self.config.train.staleness,
            overlapped_steps=len(self.books.overlapped),
            reason="; ".join(reasons),
            early=early,
            saved=self.saved,
            unsaved=self.unsaved(ended=True),
        )

    def _sent(self) -> Traffic:
        return sum((line.sent for line in self.carried.values()), start=Traffic())

    def stopped_by(self) -> list[Peer]:
        """The silent members for whose sake nothing is agreed; [] while there is a quorum, as far as known here."""
        view = self.books.view
        if view is None or view.finished or self.everyone.stopped_at is None:
            return []
        silent = self.everyone.silent(view, self.standing)
        return [] if can_agree(view, set(view.voters) - set(silent)) else silent

    def advice(self) -> str:
        """What to do while nothing can be agreed, or while a stage that was lost has no peer; '' while the run goes on."""
        silent, view = self.stopped_by(), self.books.view
        if view is None:
            return ""
        return self.everyone.advice(view, silent) if silent else self.everyone.unserved(view, self.config.run.stages)

    def _stopped(self) -> str:
        silent = self.stopped_by()
        if not silent or self.everyone.stopped_at is None:
            return ""
        names = ", ".join(map(self.everyone.name, silent))
        return f"STOPPED at {units.duration(self.everyone.stopped_at - self.started_s)}: no majority without {names}"

    def _state(self) -> str:
        view = self.books.view
        if view is None:
            return "looking for the run's leader" if self.labels else "starting"
        if view.finished:
            return "ended" if view.failed else "finished"
        if not view.started:
            ready = sum(standing.ready for standing in self.standing.values())
            if view.epoch:  # with whoever is left
                return f"back at step {view.step}, a stage was lost: {ready} of {len(self.standing)} peers ready"
            missing = self.config.run.peers - len(view.members + view.joining)
            if missing > 0:
                return f"waiting for {missing} of {self.config.run.peers} peers to join"
            ready += sum(member.peer not in self.labels for member in view.members)
            return f"{ready} of {self.config.run.peers} peers ready"
        if view.phase is not Phase.SAVING:
            return ""
        return "measuring held-out samples" if view.owners else "writing the last checkpoint"


class MajorityWatch:
    """How long the run has had no majority, as far as its launcher knows."""

    def __init__(self, monitor: RunMonitor) -> None:
        self._monitor = monitor
        self._lost: tuple[int, float] | None = None  # in which view, since when
        self._advice = ""  # as last returned

    def new_advice(self) -> str:
        """What to do while nothing can be agreed, once."""
        before, self._advice = self._advice, self._monitor.advice()
        return self._advice if self._advice != before else ""

    def lost_s(self, living: set[str], now: float) -> float | None:
        """Seconds without a majority in the newest view; 0.0 once, when it was just lost; None: there is one. `living`: labels."""
        view = self._monitor.books.view
        if view is None or not self._monitor.hopeless(living):
            self._lost = None
            return None
        if self._lost is None or self._lost[0] != view.number:
            self._lost = view.number, now
        return now - self._lost[1]

"""A run's directory as a launcher would write it, from peers that only report: for the page's tests and benchmarks/page.py.

The lines of the peers pass through the launcher's own RunMonitor and RunDirectory. Time passes as `tick` says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from random import Random

from shoal import config as configuration
from shoal.config import Config, microbatches
from shoal.core.messages import Account, Committed, Member, Phase, Share, View
from shoal.dashboard.steplog import StepLog
from shoal.launcher.files import rundir
from shoal.launcher.files.run_directory import RunDirectory
from shoal.launcher.watching.watch import Resumed, RunMonitor
from shoal.runtime.records.report import Agreed, AnyLine, Listening, Located, Notice, PeerProgress, replace
from shoal.traffic import StoredBytes, Traffic

LETTERS = "abcdefghijklmnopqrstuvwxyz234567"
LOADING_S = 8.0  # after which a joiner is ready


class RecordedRun(contextlib.ExitStack):
    """`peers` in `stages`; `step_s` between two commits. `remote`: so many of the peers are on other machines."""

    def __init__(
        self,
        directory: Path,
        peers: int = 6,
        stages: int = 3,
        *,
        step_s: float = 2.0,
        remote: int = 0,
        settings: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.config = _config(directory, peers, stages, settings)
        claim = self.enter_context(rundir.claimed(directory))
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "logs").mkdir(exist_ok=True)
        replace(directory / "config.toml", configuration.text(self.config).encode())
        self.monitor = RunMonitor(self.config, 0.0, Resumed())
        log = StepLog(self.config, directory, lambda text: None)
        self.output = RunDirectory(directory, claim, lambda text: None, log)
        self.callback(self.output.close)
        self.now = 0.0
        self.step_s, self.random = step_s, Random(0)
        self.members: dict[str, Member] = {}
        self.joining: dict[str, float] = {}  # by label, since when
        self.remote: dict[str, Member] = {}
        self.view = View(1, 0, (), phase=Phase.TRAINING)
        for number in range(peers):
            self.join(f"p{number + 1}", number % stages, remote=number >= peers - remote)
            self.joining.clear()
        self._agree(None, "all stages are served")

    def hear(self, label: str, line: AnyLine) -> None:
        step = self.monitor.hear(label, line, self.now)
        if step is not None:
            self.output.commit(step)

    def join(self, label: str, stage: int, *, remote: bool = False, name: str = "", region: str = "") -> None:
        peer = name or "".join(self.random.choices(LETTERS, k=32)) + ".0.aaaaaaaaaaaa.1800000000"
        if remote:
            self.remote[label] = Member(peer, stage)
            self.hear("p1", Located(peer, f"192.0.2.{len(self.remote)}", region=region))
        else:
            self.members[label] = Member(peer, stage)
            self.joining[label] = self.now
            self.hear(label, Listening(peer, ()))

    def kill(self, label: str) -> None:
        """The process dies; the others notice."""
        self.monitor.remove(label, self.now, well=False)
        del self.members[label]
        self.notice("removed", f"{label} silent for 4.2 s")
        self._agree(None, f"{label} silent for 4.2 s")

    def notice(self, kind: str, text: str, label: str = "p1") -> None:
        self.hear(label, Notice(self.now, self.members[label].peer, kind, text))

    def tick(self, seconds: float = 1.0) -> None:
        """Peers report, steps are committed, the launcher writes."""
        before, self.now = self.now, self.now + seconds
        for _ in range(int(self.now / self.step_s) - int(before / self.step_s)):
            self._commit()
        leader = next(iter(self.members))
        for label, member in self.members.items():
            self._report(label, member, leader)
        self.output.write_status(self.monitor.snapshot(self.now), self.now)

    def end(self) -> None:
        """All steps are committed, and the launcher ends."""
        while self.view.step < self.config.run.steps:
            self.tick(self.step_s)
        for label in list(self.monitor.standing):
            self.monitor.remove(label, self.now, well=True)
        self.output.write_status(self.monitor.snapshot(self.now), float("inf"))
        rundir.conclude(self.output.path, self.monitor.summary(self.now), self.config.run.name)
        self.close()

    def _report(self, label: str, member: Member, leader: str) -> None:
        ready = self.now - self.joining.get(label, -LOADING_S) >= LOADING_S
        speed = 0.6 + 0.8 * Random(label).random()
        sent = int(3e6 * self.now * speed)
        progress = PeerProgress(
            member.peer,
            step=self.view.step,
            stage=member.stage,
            ready=ready,
            leading=label == leader,
            leader=self.members[leader].peer,
            heard=tuple(other.peer for other in list(self.remote.values())),
            rate=speed * (4.0 if member.stage != 1 else 3.0),
            queue_s=self.random.random(),
            sent=Traffic(sent, sent, sent // 2, 0 if ready else sent, sent // 50),
            received=Traffic(sent, sent, sent // 2, sent // 9, sent // 50),
            kept=StoredBytes(int(4e7 * speed), int(9e7 * speed)),
        )
        self.hear(label, progress)

    def _commit(self) -> None:
        step, count = self.view.step, microbatches(self.config.train)
        everybody = [*self.members.values(), *self.remote.values()]
        stages = [[one for one in everybody if one.stage == stage] for stage in range(self.config.run.stages)]
        groups = tuple(
            tuple(Share(one.peer, tuple(range(place, count, len(group)))) for place, one in enumerate(group))
            for group in stages
        )
        loss = 2.1 + 3.4 * 0.985**step + 0.06 * self.random.gauss(0, 1)
        norm = 0.8 + 2.0 * 0.97**step
        last = Committed(step, 0, norm, loss, ("",) * len(stages), groups)
        self._agree(last, f"step {step} is committed")
        self.notice("commit", f"step {step} committed: loss {loss:.2f}, norm {norm:.1f}, round 0")

    def _agree(self, last: Committed | None, reason: str) -> None:
        step = self.view.step + (last is not None)
        done = step * microbatches(self.config.train)
        account = Account(issued=done, committed=done, redone=step // 7, joined=len(self.joining))
        phase = Phase.FINISHED if step >= self.config.run.steps else Phase.TRAINING
        members = (*self.members.values(), *self.remote.values())
        self.view = View(
            self.view.number + 1,
            step,
            members,
            phase=phase,
            last=last or self.view.last,
            account=account,
            reason=reason,
        )
        self.hear(next(iter(self.members)), Agreed(self.now, self.view))


def _config(directory: Path, peers: int, stages: int, settings: Sequence[str]) -> Config:
    words = [f"run.name={directory.name}", f"run.dir={directory.parent}", f"run.peers={peers}", f"run.stages={stages}"]
    words += [f"model.layers={max(stages, 4)}", "run.steps=400", "train.batch=512", "train.microbatch=4", *settings]
    return configuration.load(None, words)

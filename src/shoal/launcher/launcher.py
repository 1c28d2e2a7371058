"""The launcher of a run: starts peers as processes, kills some when asked to, reads their reports, shows them, and writes runs/NAME/.

For `shoal run` and `shoal join`. The launcher takes no part in the training. Its exit code is 0 only when all steps are committed, the
account balances and the newest checkpoint that was due is saved.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from pathlib import Path
from random import Random

import msgspec

from shoal import config as configuration
from shoal.config import Config
from shoal.core.leader.rules.removal import LEAVE_S
from shoal.dashboard import account
from shoal.dashboard.account import Summary
from shoal.dashboard.steplog import StepLog
from shoal.dashboard.terminal import Terminal
from shoal.escaping import escaped_lines
from shoal.exit_codes import ExitCode
from shoal.launcher import reach
from shoal.launcher.files import rundir
from shoal.launcher.files.run_directory import RunDirectory
from shoal.launcher.files.standing import evictions
from shoal.launcher.launch import News, PeerProcess, PeerProcesses
from shoal.launcher.local_peers import RunPasses, Starter, peers_file
from shoal.launcher.planning import plan_settings
from shoal.launcher.session import Outcome, RunRequest
from shoal.launcher.watching import page
from shoal.launcher.watching.members import LAST_REPLICA_S
from shoal.launcher.watching.samples import Samples
from shoal.launcher.watching.watch import MajorityWatch, RunMonitor
from shoal.planner.strategy import plan as plans
from shoal.runtime.records.report import AnyLine, Proven, replace
from shoal.transport.emulated.faulty import FAULTS
from shoal.transport.identity.invite import Authority

SHOW_S = 0.25
STATUS_S = 1.0
FAREWELL_S = 30.0  # for the peers to leave by themselves once the run is finished
LISTEN_S = 300.0  # for a process to start on a very busy machine: 120 s were too few at a load of 13 on two cores
HOPELESS_S = 30.0  # without a majority, and no other view heard of: ended processes do not come back
RECOVER_S = 900.0  # the same, when members on other machines could go on: an operator has time for `shoal recover`
NO_MAJORITY = "a majority of the members has ended, so the others can agree on nothing more"
SPARES = 3  # peers that end by themselves are replaced this many times
SAVE_S = 600.0  # for the checkpoint of a run that is ended by Ctrl-C: a large one on a slow disk


class Launcher:
    """One session. With `job.invite` it is a guest in somebody else's run."""

    def __init__(self, job: RunRequest) -> None:
        self.job = job
        self.watch = RunMonitor(job.config, job.started_s, job.resumed)
        self.watch.everyone.evictions = list(evictions(job.directory))
        self.crew = PeerProcesses(job.directory, self._hear, self._ended, self._warn, job.ahead)
        self.authority = None if job.invite else Authority.load(job.directory / "authority.key")
        self.over = asyncio.Event()
        self.early = ""  # why the run ended before its last step
        self.user_error = ""
        self.interrupted = self.timed_out = False
        self.ending: asyncio.Task[None] | None = None  # a last checkpoint is being written
        self.spares = SPARES
        replace(job.directory / "config.toml", configuration.text(job.config).encode())
        (job.directory / FAULTS).unlink(missing_ok=True)  # of an earlier session
        log = StepLog(job.config, job.directory, self._warn, job.resumed.steps)
        self._output = RunDirectory(job.directory, job.claim, self._warn, log)
        if job.plan is not None:
            plans.save(job.plan, plan_settings.plan_file(job.directory))
        living = job.resumed.living
        self._passes = RunPasses(job.config, job.directory, self.authority, job.invite, self._warn, living)
        self._starter = Starter(
            self._config_of, job.directory, self.crew, self._passes, 0 if living else job.resumed.first_step, job.here
        )
        self._majority = MajorityWatch(self.watch)
        self.watch.everyone.recover = f"shoal recover {job.directory}" if self.authority is not None else ""

    @property
    def config(self) -> Config:
        return self.job.config

    @property
    def directory(self) -> Path:
        return self.job.directory

    def _config_of(self, number: int) -> Config:
        """Of the local peer with that number, from 0."""
        plan, guest = self.job.plan, self.authority is None
        config = self.config if plan is None else plan_settings.of_seat(self.config, plan, number, self.job.cluster)
        config = config if guest or plan is not None else reach.private(config, self.job.here)
        return config if guest else reach.founding(config, self.directory, number, self._warn)

    def _warn(self, text: str) -> None:
        self.watch.tell("trouble", text, time.monotonic())

    async def run(self) -> Outcome:
        """Until the run has ended, with nothing left behind. ValueError: what a peer found wrong with the configuration. In another
        thread than the main one, which alone hears signals, somebody calls `interrupt`."""
        if self.watch.finished:  # by an earlier session
            return self._end()
        if threading.current_thread() is threading.main_thread():
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGHUP):
                loop.add_signal_handler(number, self.interrupt)
            loop.add_signal_handler(signal.SIGTERM, self._terminate)
        samples = Samples(self.config, self.directory, self.watch)
        with self.job.view as terminal:
            try:
                async with asyncio.TaskGroup() as group:
                    works = [
                        self._show(terminal),
                        self._start_all(),
                        self._welcome(terminal),
                        self._kill(),
                        self._keep(),
                    ]
                    works += [
                        self._limit(),
                        samples.keep(),
                        *([page.serve(self.directory, terminal.say)] if self.job.page else []),
                    ]
                    tasks = [group.create_task(work) for work in works]
                    await self.over.wait()
                    for task in tasks:
                        task.cancel()
                await self._part(terminal)
                await samples.finish(lambda: self.interrupted)
            finally:
                self.crew.kill()
            terminal.show(self.watch.snapshot(time.monotonic()))
        return self._end()

    def _end(self) -> Outcome:
        self._keep_directory()
        if self._output.lost:
            self._output.close()
            summary = self.watch.summary(time.monotonic(), self.early)
            return Outcome(ExitCode.FAILED, summary, escaped_lines(account.text(summary)))
        self._output.write_status(self.watch.snapshot(time.monotonic()), float("inf"))
        self._output.close()
        if self.user_error:
            self._gather_traces()
            raise ValueError(self.user_error)
        outcome = self._conclude()
        if trouble := self._gather_traces():  # after the account, whose room it may take
            return msgspec.structs.replace(outcome, text=f"{outcome.text}\n{escaped_lines(trouble)}")
        return outcome

    def _gather_traces(self) -> str:
        """What went wrong; ''."""
        try:
            rundir.gather_traces(self.directory)
        except (OSError, ValueError) as error:  # no room for both; or a line that is none
            return f"the traces stay in {self.directory / 'traces'}, they could not be put together: {error}"
        return ""

    async def _part(self, terminal: Terminal) -> None:
        """Members end by themselves when the run is finished; where others can go on, these leave in good order; everything else is
        ended: a run that has nobody left is resumed from its checkpoint."""
        if self.watch.finished and not self.interrupted:
            members = self.watch.members()
            await self.crew.wait([child for child in self.crew.living if child.label in members], FAREWELL_S)
        elif self._can_leave():
            view = self.watch.books.view
            terminal.say("\n".join(self.watch.everyone.leaving(view, self.watch.saved)))
            self.over.clear()
            self.crew.signal(signal.SIGTERM)
            ways = [asyncio.ensure_future(way) for way in (self._left(), self.over.wait())]
            shown = [asyncio.ensure_future(each) for each in (self._show(terminal), self._say_saved(terminal))]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for task in (*ways, *shown):
                task.cancel()
            self.over.set()  # whoever ends now was told to
        await self._starter.close()
        await self.crew.stop(0.0 if self.interrupted else None)

    def _can_leave(self) -> bool:
        """In good order: there are others, and a majority that agrees to it."""
        others = self.authority is None or self.watch.elsewhere()
        return bool(others and self.crew.living and not self.user_error and not self.watch.stopped_by())

    async def _left(self) -> None:
        """Until these peers have left. Where a newer view shows that nobody can take over what they serve, as when other machines leave
        at the same time, until the step of that view is saved, if the others can still agree on that."""
        until_s, step = time.monotonic() + LAST_REPLICA_S, -1
        while self.crew.living and time.monotonic() < until_s and not 0 <= step <= self.watch.saved:
            view = self.watch.books.view
            if not self.watch.everyone.irreplaceable(view):
                step = -1
            elif step < 0 and view is not None:
                step, until_s = view.step, min(until_s, time.monotonic() + LEAVE_S)
            await asyncio.sleep(SHOW_S)

    async def _say_saved(self, terminal: Terminal) -> None:
        """While this machine's peers leave: a second Ctrl-C costs less once more is saved."""
        saved = self.watch.saved
        while self.watch.saved == saved:
            await asyncio.sleep(SHOW_S)
        terminal.say(f"step {self.watch.saved:,} is saved: going at once loses nothing before it")

    def _conclude(self) -> Outcome:
        if self.config.run.serve and self.authority is not None:
            summary = self.watch.summary(time.monotonic(), self.early)
            return Outcome(self._exit_code(summary, False), summary, escaped_lines(f"serving ended: {self.early}"))
        finished = self.watch.finished and not self.watch.failed
        summary = self.watch.summary(time.monotonic(), "" if finished else self.early or "it was not finished")
        if self.authority is None:
            return self._conclude_guest(summary, finished)
        lines = [rundir.conclude(self.directory, summary, self.config.run.name)[0]]
        if self.watch.failed and self.watch.books.view is not None:
            rundir.pass_over(self.directory, self.watch.books.view.step)
        if self.job.plan is not None and (text := plan_settings.against(self.job.plan, self.watch.books.steps)):
            lines.append(text)
        lines.append(f"all of it is in {self.directory}; the bytes of each peer: shoal status {self.directory} --peers")
        lines += self._next(summary, finished)
        return Outcome(self._exit_code(summary, finished), summary, "\n".join(lines))

    def _next(self, summary: Summary, finished: bool) -> list[str]:
        """What the user may do now."""
        speaks = self.config.device.executor != "emulated" and not self.config.model.factory
        if finished and summary.saved and speaks:
            talks = self.config.data.format == "chat"
            return [
                f"next: shoal chat {self.directory}"
                if talks
                else f'next: shoal generate {self.directory} "a few words"'
            ]
        if not finished and summary.steps and not self.watch.failed:  # its reason says what --resume does
            return [escaped_lines(self._goes_on(summary))]
        return []

    def _exit_code(self, summary: Summary, finished: bool) -> int:
        if self.interrupted:
            return ExitCode.INTERRUPTED
        if self.timed_out and not finished and summary.saved and not summary.unsaved:
            return ExitCode.OUT_OF_TIME
        done = summary.balanced and (finished or summary.steps == self.config.run.steps)
        return 0 if done and not summary.unsaved else ExitCode.FAILED

    def _conclude_guest(self, summary: Summary, finished: bool) -> Outcome:
        lines = [f"this peer's part is over: {'the run is finished' if finished else self.early}"]
        if not finished:
            saved = f"step {self.watch.saved:,} is saved" if self.watch.saved else "nothing is saved yet"
            lines.append(f"{saved}; the run keeps what it has committed. To take part again: {self.job.command}")
        if unsaved := self.watch.unsaved(ended=True):
            lines.append(f"{unsaved}. What was trained since is lost.")
        code = ExitCode.INTERRUPTED if self.interrupted else 0 if finished and not unsaved else ExitCode.FAILED
        return Outcome(code, summary, escaped_lines("\n".join(lines)))

    def _goes_on(self, summary: Summary) -> str:
        """What is saved of a run that ends before its last step, and the command that goes on."""
        if self.watch.elsewhere() and not self.watch.everyone.irreplaceable(self.watch.books.view):
            saved = f"step {summary.saved:,} is saved" if summary.saved else "nothing is saved yet"
            again = f"shoal join @{self.directory / reach.INVITE}"
            words = f"The run is in the others' hands; {saved}. To take part again while they train: {again}"
            return f"{words}; once they have ended: {self.job.command}"
        if not summary.saved:
            return "No checkpoint was saved: all of it is lost."
        lost = f"; the {summary.steps - summary.saved:,} after it are lost" if summary.steps > summary.saved else ""
        at = f" at {summary.checkpoint}" if summary.checkpoint else ""
        return f"Step {summary.saved:,} is saved{at}{lost}. To go on from there: {self.job.command}"

    # ----------------------------------------------------------------------------------------------------- peers

    async def _start_all(self) -> None:
        """Start all processes; introduce the founder first, and the others when it listens."""
        founds = self.authority is not None and not self.job.resumed.living
        children = [await self._starter.start(first=founds and n == 0) for n in range(self.job.here)]
        self._starter.introduce(children[0])
        try:
            async with asyncio.timeout(LISTEN_S):
                await children[0].listening.wait()
        except TimeoutError:
            self._give_up(f"{children[0].label} does not listen after {LISTEN_S:.0f} s; see {children[0].log}")
        for child in children[1:]:
            self._starter.introduce(child)

    async def _welcome(self, terminal: Terminal) -> None:
        """Where peers of other machines are expected, print how they join; on a guest's machine, where it is reached."""
        while not self.crew.addresses:
            await asyncio.sleep(SHOW_S)
        await self._invite_guests(terminal, self.config.run.peers - self.job.here)
        while not self.watch.started:
            await asyncio.sleep(SHOW_S)
        if self.config.run.serve:
            terminal.say(reach.serving(self.directory))

    async def _invite_guests(self, terminal: Terminal, missing: int) -> None:
        if self.authority is None:
            where = reach.reached(self.crew.addresses)
            self.watch.tell("network", f"this machine is reached at {where}", time.monotonic())
        if self.authority is None or missing <= 0:
            return
        self._write_lists()
        self.watch.tell("network", "the command for the other machines is being made", time.monotonic())  # seconds
        terminal.say(await reach.welcome(self.directory, self.crew.addresses, missing))
        if (invite := self.directory / reach.INVITE).exists():
            self.watch.everyone.join = f"shoal join @{invite}"

    async def _keep(self) -> None:
        """While `shoal chaos` runs, it states how many peers there should be, and signals those that should end."""
        while True:
            await asyncio.sleep(SHOW_S)
            wanted = rundir.wanted(self.directory) if self.watch.started and self.authority is not None else None
            if wanted is not None and self.crew.living and len(self.crew.living) < wanted.peers:
                await self._starter.join()
            self._tend_passes()
            self._check_majority(time.monotonic())

    def _tend_passes(self) -> None:
        """Renew the passes of those who take part; send renewals and revocations, made here or by a command, to the peers."""
        passes = self._passes.tend(self.watch.books.view)
        for child in self.crew.living:
            if passes and child.introduced:
                child.write(News(passes=passes))

    def _check_majority(self, now: float) -> None:
        """Peers without a majority wait for ever, as they must: the user has to be told."""
        if advice := self._majority.new_advice():
            self.watch.tell("stopped", advice, now)
        lost_s = self._majority.lost_s({child.label for child in self.crew.living}, now)
        if lost_s == 0.0:
            self.watch.tell("trouble", f"{NO_MAJORITY}; see `shoal recover {self.directory}`", now)
        elif lost_s is not None and lost_s >= (RECOVER_S if self.watch.elsewhere() else HOPELESS_S):
            self._give_up(f"{NO_MAJORITY}; `--resume` goes on from the newest checkpoint")

    async def _kill(self) -> None:
        if self.job.kill_every_s is None:
            return
        rng = Random(f"{self.config.run.seed}/kill")
        while not self.watch.started:
            await asyncio.sleep(SHOW_S)
        while True:
            await asyncio.sleep(self.job.kill_every_s)
            while not (victims := self._victims()):
                await asyncio.sleep(SHOW_S)
            child = rng.choice(victims)
            self.watch.killed += 1
            self.watch.tell(
                "killed", f"{child.label} by SIGKILL, as --kill-every asks; another joins", time.monotonic()
            )
            child.kill()
            await self._starter.join()

    def _victims(self) -> list[PeerProcess]:
        expendable = set(self.watch.expendable())
        return [child for child in self.crew.living if child.label in expendable and not child.killed]

    # -------------------------------------------------------------------------------------------------- reports

    def _hear(self, child: PeerProcess, line: AnyLine) -> None:
        if isinstance(line, Proven):
            return self._output.prove(line)
        step = self.watch.hear(child.label, line, time.monotonic())
        if step is not None:
            self._output.commit(step)
            self.job.hear(step)
        if self.watch.failed:
            self._give_up(self.watch.failed)
        elif self.watch.finished:
            self.over.set()

    def _ended(self, child: PeerProcess) -> None:
        self.watch.remove(child.label, time.monotonic(), well=child.ended is not None and child.ended.ok)
        self._thin_traces()
        if child.ended is not None and child.ended.ok:
            self.watch.tell("left", child.ended.reason, time.monotonic(), child.label)
            if not self.crew.living:
                self._give_up(child.ended.reason)
        elif child.ended is not None and child.ended.user_error and not self.watch.started:
            self.user_error = child.ended.reason
            self.over.set()
        elif not child.killed and not self.over.is_set() and not self._by_chaos(child):
            self._lost(child)

    def _thin_traces(self) -> None:
        """A month of churn leaves many traces: those of the dead get as much room as those of the living."""
        ended = [child.label for child in self.crew.children if not child.alive]
        with contextlib.suppress(OSError):  # no directory any more: said elsewhere
            removed = rundir.thin_traces(self.directory, ended, self.config.run.trace_bytes * self.job.here)
            if removed:
                words = f"the traces of {', '.join(removed)}, which have ended, are removed: run.trace_bytes"
                self.watch.tell("trace", words, time.monotonic())

    def _by_chaos(self, child: PeerProcess) -> bool:
        """A peer was killed from outside while `shoal chaos` was at work, which says itself whether another is to come."""
        by_chaos = child.process.returncode == -signal.SIGKILL and rundir.wanted(self.directory) is not None
        if by_chaos and self.crew.living:
            self.watch.killed += 1
            self.watch.tell("killed", f"{child.label} by SIGKILL, while `shoal chaos` is at work", time.monotonic())
        return by_chaos and bool(self.crew.living)

    def _lost(self, child: PeerProcess) -> None:
        """A peer has ended by itself."""
        why = child.ended.reason if child.ended is not None else f"its process ended with {child.process.returncode}"
        self.watch.tell("trouble", f"{child.label} is gone: {why}", time.monotonic())
        if self.authority is not None and not self.watch.began:  # what ended it would end the next one
            self._give_up(f"{child.label} ended before training began: {why}\n{child.last_words()}")
        elif self.spares and self.authority is not None and self.crew.living:
            self.spares -= 1
            self._starter.join_soon()
        elif not self.crew.living:
            self._give_up(f"no peer is left here; {child.label}: {why}\n{child.last_words()}")

    def _give_up(self, why: str) -> None:
        self.early = self.early or why
        self.over.set()

    def end(self, why: str) -> None:
        """Save what was trained since the last checkpoint, then end the run."""
        self.ending = self.ending or asyncio.get_running_loop().create_task(self._save_and_end(why))

    def interrupt(self) -> None:
        """The first time what was trained since the last checkpoint is saved; the second time the run ends at once."""
        self.interrupted = True
        if self.ending is None and self._unsaved_step():
            self.end("interrupted")
        else:
            self._give_up("interrupted")

    def _terminate(self) -> None:
        """Slurm sends SIGTERM to every process of a job, and so does the peer's keeper: a second one is not somebody's impatience."""
        if not self.interrupted:
            self.interrupt()

    async def _limit(self) -> None:
        if self.job.time_s is None:
            return
        await asyncio.sleep(self.job.time_s - (time.monotonic() - self.job.started_s))
        self.timed_out = True
        self.end("its time is over")

    def _unsaved_step(self) -> int:
        """The step whose parameters are nowhere but here; 0 where there is none, or where others go on and save it."""
        view, watch = self.watch.books.view, self.watch
        if view is None or self.authority is None or not watch.started or watch.finished or watch.elsewhere():
            return 0
        return view.step if view.step > self.watch.saved else 0

    async def _save_and_end(self, why: str) -> None:
        step, asked = self._unsaved_step(), self.watch.books.view
        if step and asked is not None:
            words = f"{why}: step {step} is saved before the run ends; Ctrl-C (again) ends it at once, back at step {self.watch.saved}"
            self.watch.tell("checkpoint", words, time.monotonic())
            for child in self.crew.living:
                if child.introduced:
                    child.write(News(save=True))
            until_s, failed, before = time.monotonic() + SAVE_S, self.watch.unable, self.watch.saved
            while self.watch.unable == failed and time.monotonic() < until_s:
                before = min(before, self.watch.saved)  # of those to go back to a damaged one is passed over
                if self.watch.saved >= step or self._went_back(asked.epoch, before):
                    break
                await asyncio.sleep(SHOW_S)
        self._give_up(why)

    def _went_back(self, epoch: int, saved: int) -> bool:
        """Since that epoch, in which `saved` was the newest checkpoint, a stage was lost. What was trained then cannot be saved any more;
        what has been trained since is, or there is nothing."""
        view = self.watch.books.view
        return view is not None and view.epoch != epoch and (self.watch.saved > saved or not self._unsaved_step())

    # -------------------------------------------------------------------------------------------------- showing

    async def _show(self, terminal: Terminal) -> None:
        written_s = 0.0
        while True:
            now = time.monotonic()
            snapshot = self.watch.snapshot(now)
            terminal.show(snapshot)
            if now - written_s >= STATUS_S:
                written_s = now
                self._keep_directory()
                if self._output.lost:
                    return
                self._output.write_status(snapshot, now)
                with contextlib.suppress(OSError):  # a full disk, or no directory any more: the user was told
                    self.crew.trim_logs()
            self._write_lists()
            await asyncio.sleep(SHOW_S)

    def _write_lists(self) -> None:
        names = {label: peer for peer, label in self.watch.labels.items()}
        entries = self.crew.addresses[:24] + self.watch.entries[:8]
        peers = peers_file(self.watch, self.crew.living, names)
        self._output.write_lists(entries, peers, names, tuple(self.watch.everyone.evictions))

    def _keep_directory(self) -> None:
        self._output.keep(self.watch.books.steps)
        if self._output.lost:
            self._give_up(self._output.lost)

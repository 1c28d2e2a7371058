"""`shoal run`: train with local peers, each a process of its own, watch them, and account for every sample at the end.

It starts peers, kills some when asked to (--kill-every), hears what they agree on, shows it and writes runs/NAME/. It takes no part in
the training. What it writes there:

    summary.json   the account and the losses           trace.jsonl  what every peer was told and said (`shoal replay`)
    commits.jsonl  each committed step with its round    status.json  the newest snapshot (`shoal status`)
    loss.png       checkpoints/step-N/                   logs/        each peer's words for people
    config.toml    the whole configuration               authority.key, bootstrap.json   for `shoal invite`

Exit code 0 only when all steps are committed and the account balances.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import msgspec

from shoal import config as configuration
from shoal import trace
from shoal.cli.launch import Child, Crew, Spec, Start
from shoal.cli.watch import Resumed, Watch
from shoal.config import Config
from shoal.dashboard import account, plot
from shoal.dashboard.terminal import Terminal
from shoal.runtime.account import Step
from shoal.runtime.report import AnyLine, replace
from shoal.transport.invite import Authority

SHOW_S = 0.25
STATUS_S = 1.0
FAREWELL_S = 30.0  # for the peers to leave by themselves once the run is finished
LISTEN_S = 120.0  # for a process to start on a very busy machine
INVITE_S = 30 * 86400.0  # local peers' passes: longer than any run on one machine
SPARES = 3  # peers that end by themselves are replaced this many times

INTERRUPTED = 130
FAILED = 1


class Job(msgspec.Struct, frozen=True):
    """What was asked for."""

    config: Config
    directory: Path
    resumed: Resumed
    here: int  # peers to start
    kill_every_s: float | None
    started_s: float


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="a TOML file")
    parser.add_argument("settings", nargs="*", metavar="a.b=c", help="settings that replace those of the file")
    parser.add_argument(
        "--kill-every", type=float, metavar="S", help="SIGKILL a random peer every S seconds; another joins"
    )
    parser.add_argument(
        "--here", type=int, metavar="N", help="start N peers here; the others of run.peers join by invite"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the newest complete checkpoint of runs/NAME")


def main(args: argparse.Namespace) -> int:
    started_s = time.monotonic()
    config = configuration.load(args.config, args.settings)
    if args.kill_every is not None and not args.kill_every > 0:
        raise ValueError(f"--kill-every {args.kill_every}: seconds between kills must be above 0; try 20")
    here = config.run.peers if args.here is None else args.here
    if not 1 <= here <= config.run.peers:
        raise ValueError(
            f"--here {here}: training starts with run.peers = {config.run.peers}; try 1 to {config.run.peers}"
        )
    directory = Path(config.run.dir) / config.run.name
    with _claimed(directory):
        if args.resume:
            resumed = _resume(config, directory)
        else:
            _set_aside(directory)
            resumed = Resumed()
        replace(directory / "config.toml", configuration.text(config).encode())
        job = Job(config, directory, resumed, here, args.kill_every, started_s)
        return asyncio.run(Run(job).run())


class Run:
    """One call of the command."""

    def __init__(self, job: Job) -> None:
        self.job, self.config, self.directory = job, job.config, job.directory
        self.watch = Watch(job.config, job.started_s, job.resumed)
        self.crew = Crew(job.directory, self._hear, self._ended)
        self.authority = Authority.load(job.directory / "authority.key")
        self.commits = open(job.directory / "commits.jsonl", "ab")
        self.rng = Random(f"{job.config.run.seed}/kill")
        self.over = asyncio.Event()
        self.early = ""  # why the run ended before its last step
        self.user_error = ""
        self.interrupted = False
        self.founder: Child | None = None
        self.spares = SPARES
        self._number = 0
        self._starting: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._interrupt)
        with Terminal() as terminal:
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(work) for work in (self._show(terminal), self._kill(), self._start_all())
                    ]
                    await self.over.wait()
                    for task in tasks:
                        task.cancel()
                finished = self.watch.finished and not self.interrupted
                if finished:
                    await self.crew.wait([c for c in self.crew.living if c.label in self.watch.members()], FAREWELL_S)
                await self.crew.stop()
            finally:
                self.crew.kill()
            terminal.show(self.watch.snapshot(time.monotonic()))
        if self.user_error:
            raise ValueError(self.user_error)
        return self._conclude()

    def _conclude(self) -> int:
        self.commits.close()
        summary = self.watch.summary(
            time.monotonic(), "" if self.watch.finished else self.early or "it was not finished"
        )
        replace(self.directory / "summary.json", account.encode(summary))
        self._write_status()
        traces = sorted((self.directory / "traces").glob("*.jsonl"))
        trace.merge(traces, self.directory / "trace.jsonl")
        for path in traces:
            path.unlink()
        if summary.losses:
            plot.save(summary.losses, self.directory / "loss.png", self.config.run.name)
            print(plot.curve(summary.losses))
        print(account.text(summary))
        print(f"all of it is in {self.directory}")
        if self.interrupted:
            return INTERRUPTED
        return 0 if summary.balanced and summary.steps == self.config.run.steps else FAILED

    # ----------------------------------------------------------------------------------------------------- peers

    async def _start_all(self) -> None:
        """The founder, and as soon as it listens all others; their processes get ready meanwhile."""
        children = [await self._spawn(found=number == 0) for number in range(self.job.here)]
        self.founder = children[0]
        self._introduce(children[0], ())
        await self._heard_of(children[0])
        for child in children[1:]:
            self._introduce(child, self._addresses())

    async def _join(self) -> None:
        """One more peer, in the place of one that is gone."""
        child = await self._spawn(found=False)
        self._introduce(child, self._addresses())

    async def _spawn(self, found: bool) -> Child:
        self._number += 1
        return await self.crew.start(
            Spec(
                config=configuration.to_tree(self.config),
                directory=str(self.directory),
                label=f"p{self._number}",
                found=found,
                first_step=self.job.resumed.first_step,
            )
        )

    def _introduce(self, child: Child, addresses: tuple[str, ...]) -> None:
        child.write(Start(invite=self.authority.invite(addresses, time.time() + INVITE_S, self.config.run.name)))

    def _addresses(self) -> tuple[str, ...]:
        """Where newcomers find the run: the addresses of all that listen, in turn until the invite is full."""
        return tuple(address for child in self.crew.living for address in child.addresses)[:32]

    async def _heard_of(self, child: Child) -> None:
        try:
            async with asyncio.timeout(LISTEN_S):
                await child.listening.wait()
        except TimeoutError:
            self._give_up(f"{child.label} does not listen after {LISTEN_S:.0f} s; see {child.log}")

    async def _kill(self) -> None:
        if self.job.kill_every_s is None:
            return
        while not self.watch.started:
            await asyncio.sleep(SHOW_S)
        while not self.watch.finished:
            await asyncio.sleep(self.job.kill_every_s)
            while not (choice := self._victims()):
                await asyncio.sleep(SHOW_S)
            if self.watch.finished:
                return
            child = self.rng.choice(choice)
            self.watch.killed += 1
            self.watch.tell(
                "killed", f"{child.label} by SIGKILL, as --kill-every asks; another joins", time.monotonic()
            )
            child.kill()
            await self._join()

    def _victims(self) -> list[Child]:
        expendable = set(self.watch.expendable())
        return [child for child in self.crew.living if child.label in expendable and not child.killed]

    # -------------------------------------------------------------------------------------------------- hearing

    def _hear(self, child: Child, line: AnyLine) -> None:
        step = self.watch.hear(child.label, line, time.monotonic())
        if step is not None:
            self.commits.write(msgspec.json.encode(step) + b"\n")
            self.commits.flush()
        if self.watch.finished:
            self.over.set()

    def _ended(self, child: Child) -> None:
        self.watch.gone(child.label)
        ended = child.ended
        if ended is not None and ended.user_error:
            self.user_error = ended.reason
            self.over.set()
        elif not child.killed and not self.over.is_set():
            self._lost(child)

    def _lost(self, child: Child) -> None:
        """A peer has ended and nobody asked it to."""
        why = child.ended.reason if child.ended is not None else f"its process ended with {child.process.returncode}"
        self.watch.tell("trouble", f"{child.label} is gone: {why}", time.monotonic())
        if child is self.founder and not self.watch.started:
            self._give_up(f"the first peer is gone before training began: {why}\n{child.last_words()}")
        elif not self.crew.living:
            self._give_up(f"no peer is left; the last words of {child.label}:\n{child.last_words()}")
        elif self.spares:
            self.spares -= 1
            task = asyncio.get_running_loop().create_task(self._join())
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    def _give_up(self, why: str) -> None:
        self.early = why
        self.over.set()

    def _interrupt(self) -> None:
        self.interrupted = True
        self._give_up("interrupted")

    # -------------------------------------------------------------------------------------------------- showing

    async def _show(self, terminal: Terminal) -> None:
        written_s = 0.0
        known: tuple[str, ...] = ()
        while True:
            now = time.monotonic()
            terminal.show(self.watch.snapshot(now))
            if now - written_s >= STATUS_S:
                written_s = now
                self._write_status()
            if (addresses := self._addresses()) != known:
                known = addresses
                replace(self.directory / "bootstrap.json", msgspec.json.encode(addresses))
            await asyncio.sleep(SHOW_S)

    def _write_status(self) -> None:
        replace(self.directory / "status.json", msgspec.json.encode(self.watch.snapshot(time.monotonic())))


# --------------------------------------------------------------------------------------------------- the directory


@contextlib.contextmanager
def _claimed(directory: Path) -> Iterator[None]:
    """One launcher at a time writes a run's directory. The claim lies beside it, so that it can be set aside."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with open(directory.parent / f".{directory.name}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{directory}: this run is being trained now; try another run.name=...") from None
        yield


def _set_aside(directory: Path) -> None:
    """A new run begins with an empty directory; what an earlier one of that name left is kept under another."""
    if directory.exists() and any(directory.iterdir()):
        number = 1
        while (old := directory.with_name(f"{directory.name}.{number}")).exists():
            number += 1
        os.rename(directory, old)
        print(f"what was in {directory} is now in {old}")
    directory.mkdir(parents=True, exist_ok=True)


def _resume(config: Config, directory: Path) -> Resumed:
    """The newest complete checkpoint, and the commits of the steps that it holds."""
    from shoal.build import checkpoint_url
    from shoal.runtime.checkpoint import Store

    store = Store(checkpoint_url(config))
    training, refused = store.newest()
    for why in refused:
        print(f"passed over {why}")
    if training is None:
        raise ValueError(f"--resume: there is no complete checkpoint in {store.url}; run without --resume to begin")
    newest = training.step
    if newest >= config.run.steps:
        raise ValueError(f"--resume: all {newest} steps are trained; try run.steps={2 * newest}")
    path = directory / "commits.jsonl"
    steps: dict[int, Step] = {}
    for text in path.read_bytes().splitlines() if path.exists() else ():
        try:
            step = msgspec.json.decode(text, type=Step)
        except msgspec.DecodeError:
            continue  # half a line: the launcher was killed; if a step is missing for it, the account will say so
        steps[step.commit.step] = step
    _set_trace_aside(directory, newest)
    kept = tuple(steps[number] for number in sorted(steps) if number < newest)
    replace(path, b"".join(msgspec.json.encode(step) + b"\n" for step in kept))
    return Resumed(first_step=newest, steps=kept)


def _set_trace_aside(directory: Path, step: int) -> None:
    """Keep the earlier session's trace under the step at which this one begins; its pieces, if its launcher was killed."""
    earlier = directory / f"trace-before-{step}.jsonl"
    pieces = sorted((directory / "traces").glob("*.jsonl"))
    if pieces:
        trace.merge(pieces, earlier)
        for piece in pieces:
            piece.unlink()
    elif (directory / "trace.jsonl").exists():
        os.replace(directory / "trace.jsonl", earlier)

"""eval.prompts while a run trains: at each measurement, and at the end, a process beside the launcher has them continued (api/prompts.py).

What comes back is told as an event and kept in samples.jsonl. Training never waits for it: while one request is on its way, later
measurements send none; a process that has died is started again at the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from shoal.config import Config
from shoal.escaping import UNDECODABLE, escaped
from shoal.launcher.process import spawn
from shoal.launcher.watching.watch import RunMonitor
from shoal.runtime.records.report import replace

LOOK_S = 0.5
KEPT = 1_000  # samples in samples.jsonl, the newest
LINE_BYTES = 1 << 20  # of one sample
SHOWN_CHARS = 60  # of a prompt's end and of its text, in an event
LAST_S = 300.0  # for the samples of the last checkpoint
FILE = "samples.jsonl"


class Request(msgspec.Struct, frozen=True):
    """Continue every prompt. `step`: the newest commit. `checkpoint`: with that model on this machine; '': through the peers."""

    step: int
    checkpoint: str = ""


class Sample(msgspec.Struct, frozen=True):
    """A line of samples.jsonl. `step`: when it was asked for; `steps`: the oldest and the newest parameters that made the text;
    `problem`: why there is no text. `done`, with nothing else: all prompts of the request are through."""

    step: int
    steps: tuple[int, ...] = ()
    prompt: str = ""
    text: str = ""
    seconds: float = 0.0
    problem: str = ""
    done: bool = False


class Samples:
    """`watch` tells when a measurement is due, and is told what the user should see."""

    def __init__(self, config: Config, directory: Path, watch: RunMonitor) -> None:
        self._config, self._directory, self._watch = config, directory, watch
        self._asked = -1  # the newest step whose samples were asked for
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._kept: deque[bytes] = deque(_lines(directory / FILE), maxlen=KEPT)

    async def keep(self) -> None:
        """While the run trains, until cancelled."""
        while self._config.eval.prompts:
            await asyncio.sleep(LOOK_S)
            view = self._watch.books.view
            if view is None or not view.started or not self._idle.is_set():
                continue
            due = view.step - view.step % self._config.eval.every
            if due > self._asked and not view.finished:
                self._asked = due
                await self._ask(Request(view.step))

    async def finish(self, ended: Callable[[], bool]) -> None:
        """Of the run's last checkpoint, where that lies on this machine. `ended`: nobody waits for it any longer."""
        if not self._config.eval.prompts:
            return
        checkpoint = Path(self._watch.checkpoint)
        if self._watch.finished and not self._watch.failed and (checkpoint / "config.json").is_file() and not ended():
            if not self._idle.is_set():  # what is on its way waits for peers that have ended
                await self.close()
            self._tell(f"{checkpoint.name} continues eval.prompts; Ctrl-C leaves them out")
            await self._ask(Request(self._watch.saved, str(checkpoint)))
            until_s = time.monotonic() + LAST_S
            while not self._idle.is_set() and not ended() and time.monotonic() < until_s:
                await asyncio.sleep(0.05)
        await self.close()

    async def close(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        if self._reading is not None:
            await self._reading

    async def _ask(self, request: Request) -> None:
        if self._process is None or self._process.returncode is not None:
            await self._start()
        assert self._process is not None and self._process.stdin is not None
        self._idle.clear()
        with contextlib.suppress(OSError):  # it has died: `_read` says so
            self._process.stdin.write(msgspec.json.encode(request) + b"\n")

    async def _start(self) -> None:
        command = [sys.executable, "-m", "shoal.api.prompts", str(self._directory), str(os.getpid())]
        with open(self._directory / "logs" / "prompts.log", "wb") as log:
            self._process = await spawn(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                process_group=0,  # Ctrl-C is the launcher's
                limit=LINE_BYTES,
            )
        self._reading = asyncio.create_task(self._read(self._process))

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                self._take(line)
        except ValueError:  # a line beyond the limit
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        code = await process.wait()
        if not self._idle.is_set() and code != -9:
            log = self._directory / "logs" / "prompts.log"
            self._tell(
                f"what continues eval.prompts has ended with {code}; see {log}. It is started again at the next measurement"
            )
        self._idle.set()

    def _take(self, line: bytes) -> None:
        try:
            sample = msgspec.json.decode(line, type=Sample)
        except UNDECODABLE:
            return
        if sample.done:
            self._idle.set()
        elif sample.problem:
            self._tell(f"eval.prompts at step {sample.step}: {sample.problem}")
        else:
            self._kept.append(line)
            with contextlib.suppress(OSError):  # a full disk, or no directory any more: the user was told
                replace(self._directory / FILE, b"".join(self._kept))
            self._tell(words(sample))

    def _tell(self, text: str) -> None:
        self._watch.tell("sample", text, time.monotonic())


def words(sample: Sample) -> str:
    """One line: where the prompt ends, and what follows."""
    prompt = sample.prompt if len(sample.prompt) <= SHOWN_CHARS else f"…{sample.prompt[1 - SHOWN_CHARS :]}"
    text = sample.text if len(sample.text) <= SHOWN_CHARS else f"{sample.text[: SHOWN_CHARS - 1]}…"
    step = sample.steps[-1] if sample.steps else sample.step
    return escaped(f'step {step}: "{prompt}" → "{text}"'.replace("\n", "↵"))


def _lines(path: Path) -> list[bytes]:
    """Of an earlier session, whole ones."""
    try:
        return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    except OSError:
        return []

"""`shoal train`: the whole model on this machine alone, without any network, also a model larger than its device.

    shoal train model=DIR device.memory="8 GiB" data.source=text data.path=texts run.name=mine

It writes what `shoal run` writes (runs/NAME/: commits, summary, loss curve, checkpoints), and `--resume` goes on from the newest
checkpoint of either. Two words are short for more: `model=DIR` is model.path=DIR, and `device.memory=SIZE` is
device.memory_bytes=SIZE with device.executor=swapping, which keeps all layers on the device if they fit. Nobody else is meant to compute
here, so PyTorch takes as many threads as it thinks right, unless device.threads is set.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

from shoal import config as configuration
from shoal.config import Config
from shoal.dashboard import plot
from shoal.dashboard.steplog import StepLog
from shoal.dashboard.terminal import Terminal
from shoal.escaping import escaped_json
from shoal.exit_codes import ExitCode
from shoal.launcher import devices, preflight
from shoal.launcher.files import checkpoints, rundir
from shoal.launcher.files.output_files import OutputFiles
from shoal.launcher.watching.watch import Resumed, RunMonitor
from shoal.model import remote
from shoal.runtime.records.report import Agreed, replace

if TYPE_CHECKING:
    from shoal.runtime.alone import Alone

SHOW_S = 1.0  # between two looks at how far a step is
ALONE = ("run.stages=1", "run.peers=1")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words", nargs="*", metavar="CONFIG | a.b=c", help="a TOML file, and settings that replace its own"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue from the newest whole checkpoint; begin at step 0 only where none was ever saved",
    )
    parser.add_argument("--adopt", action="store_true", help=checkpoints.ADOPT)


def main(args: argparse.Namespace) -> int:
    started_s = time.monotonic()
    config = configured(args.words)
    preflight.refuse(preflight.machine(config))
    directory = config.run.directory
    with rundir.claimed(directory):
        resumed = rundir.resume(config, directory, adopt=args.adopt) if args.resume else Resumed()
        if not args.resume:
            checkpoints.begin(config, directory, adopt=args.adopt)
        from shoal.build import trainer_alone  # imports torch

        print("reading the model and the data", flush=True)
        run = checkpoints.authority(directory) if args.resume else None
        # Before what an earlier run left is set aside: it may refuse
        alone = trainer_alone(config, resumed.first_step, run)
        if not args.resume:
            rundir.set_aside(directory)
        alone.belong_to(checkpoints.authority(directory))
        return LocalTraining(config, directory, RunMonitor(config, started_s, resumed), alone).run()


def configured(words: list[str]) -> Config:
    """ValueError: not one machine's to train."""
    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise ValueError(f"{files[1]!r} is a second file; settings are written section.field=value")
    settings = [_long(word) for word in words if "=" in word]
    if any(word.startswith("device.memory=") for word in words) and not any(
        "device.executor" in word for word in words
    ):
        settings.append("device.executor=swapping")
    config = remote.local(configuration.load(files[0] if files else None, [*settings, *ALONE]))
    os.environ.update(devices.allocator(os.environ))
    if config.device.executor == "emulated":
        raise ValueError("device.executor = 'emulated' trains nothing; try device.executor=resident")
    if config.train.local_steps > 1:
        raise ValueError(
            f"train.local_steps = {config.train.local_steps} lies between two averagings, and here is nobody to average with;"
            " try train.local_steps=1"
        )
    if config.eval.prompts:
        raise ValueError(
            "eval.prompts are continued by a run's peers, and here are none; leave them out: `shoal generate` continues a text with"
            " the checkpoints"
        )
    return config


def _long(word: str) -> str:
    name, _, value = word.partition("=")
    return {"model": "model.path", "device.memory": "device.memory_bytes"}.get(name, name) + f"={value}"


class LocalTraining:
    """One call of the command."""

    def __init__(self, config: Config, directory: Path, watch: RunMonitor, alone: Alone) -> None:
        self.config, self.directory, self.watch, self.alone = config, directory, watch, alone
        self.stopped = False
        self._output = OutputFiles(directory, self._warn)
        self._log = StepLog(config, directory, self._warn, tuple(watch.resumed.steps))
        self._shown_s = self._written_s = float("-inf")

    def run(self) -> int:
        from shoal.runtime.alone import Broken

        replace(self.directory / "config.toml", configuration.text(self.config).encode())
        early = ""
        closing = contextlib.closing
        with Terminal() as terminal, _asked_to_stop(self), closing(self._output), closing(self._log):
            try:
                while not self.alone.ended and not self.stopped:
                    self._step(terminal)
                if self.stopped and not self.alone.ended:
                    self._save(terminal)
                    early = f"it was asked to stop; {self._left()}"
            except (Broken, ValueError, OSError) as error:
                early = f"{' '.join(str(error).split()).rstrip('.')}; {self._left()}"  # CUDA's are of several lines
            self._written_s = float("-inf")
            self._show(terminal)
        return self._conclude(early)

    def _step(self, terminal: Terminal) -> None:
        def show_progress(done: int, count: int) -> None:
            now = time.monotonic()
            if now - self._shown_s >= SHOW_S:
                self._shown_s = now
                state = f"step {self.alone.done + 1}: {done} of {count} microbatches"
                self._show(terminal, state)

        view = self.alone.step(show_progress)
        step = self.watch.hear("local", Agreed(time.monotonic(), view), time.monotonic())
        assert step is not None
        self._output.commit(step)
        self._log.add(step)
        if self.config.train.staleness and self.alone.done < self.config.run.steps:
            self.watch.books.overlapped.add(step.commit.step)  # it is applied while the next one is computed
        self._show(terminal)
        if self.alone.due():
            self._save(terminal)

    def _show(self, terminal: Terminal, state: str = "") -> None:
        """On the terminal, and for `shoal status`. Without stages: there are no peers to serve them."""
        now = time.monotonic()
        snapshot = self.watch.snapshot(now)
        snapshot = msgspec.structs.replace(snapshot, state=state or snapshot.state, stages=0)
        terminal.show(snapshot)
        if now - self._written_s >= SHOW_S:
            self._written_s = now
            self._log.flush(snapshot)
            snapshot = msgspec.structs.replace(snapshot, losses=plot.thinned(snapshot.losses))
            self._output.put("status.json", escaped_json(msgspec.json.encode(snapshot)))

    def _save(self, terminal: Terminal) -> None:
        if self.alone.saved == self.alone.done:
            return
        begun_s = time.monotonic()
        self._show(terminal, "writing a checkpoint")
        self.watch.checkpoint = self.alone.save()
        self.watch.saved = self.alone.done
        now = time.monotonic()
        self.watch.tell(
            "checkpoint", f"step {self.alone.done} saved at {self.watch.checkpoint} in {now - begun_s:.1f} s", now
        )

    def _warn(self, text: str) -> None:
        self.watch.tell("trouble", text, time.monotonic())

    def _left(self) -> str:
        if self.alone.saved is None:
            return "no checkpoint was written yet"
        return f"the checkpoint of step {self.alone.saved} is whole, and --resume goes on from it"

    def _conclude(self, early: str) -> int:
        summary = self.watch.summary(time.monotonic(), early)
        text, written = rundir.conclude(self.directory, summary, self.config.run.name)
        print(text)
        print(f"all of it is in {self.directory}")
        if not early and written:
            return ExitCode.OK
        return ExitCode.INTERRUPTED if self.stopped else ExitCode.FAILED


@contextmanager
def _asked_to_stop(training: LocalTraining) -> Iterator[None]:
    """The first signal ends training after the step under way, with a checkpoint; the second one at once."""

    def stop(number: int, frame: FrameType | None) -> None:
        if training.stopped:
            raise KeyboardInterrupt
        training.stopped = True
        print("ending after this step, with a checkpoint; once more to end at once", flush=True)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

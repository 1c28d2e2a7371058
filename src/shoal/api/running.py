"""`shoal.run`: train with a swarm of local peers from a script or a notebook, by the launcher that `shoal run` uses.

The launcher's loop runs in a thread of its own, since a notebook's main thread has a loop already; the caller's thread waits and calls
the callbacks, and hears Ctrl-C.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

import msgspec
from rich.console import Console

from shoal import importing
from shoal.api.results import Run, Step, step_of
from shoal.core.consensus.validity import measured
from shoal.core.messages import HeldOut as Agreed
from shoal.dashboard.account import HeldOut, Summary
from shoal.dashboard.terminal import Terminal
from shoal.exit_codes import ExitCode
from shoal.launcher import session
from shoal.launcher.launcher import Launcher
from shoal.launcher.session import Outcome, RunOptions, RunRequest, Source
from shoal.runtime.records.account import CommittedStep

OnStep = Callable[[Step], object]
OnEval = Callable[[HeldOut], object]
OnCommit = Callable[[CommittedStep], object]


class RunFailed(RuntimeError):
    """The run ended before its last step, or its account does not balance. `run` has what was committed."""

    def __init__(self, run: Run, reason: str) -> None:
        super().__init__(reason)
        self.run = run


def run(
    config: Source = None,
    *settings: str,
    model: str | Callable[[], Any] | None = None,
    data: str | Callable[[], Any] | None = None,
    on_step: OnStep | None = None,
    on_commit: OnCommit | None = None,
    on_eval: OnEval | None = None,
    resume: bool = False,
    quiet: bool = False,
) -> Run:
    """Train with local peers, each a process of its own, until run.steps are committed.

    config: a `Config`, a dictionary of sections, or a TOML file; None is all default values.
    settings: "section.field=value", as on the command line.
    model: model.factory: a function of a module (or its name "module:function") that returns an `nn.Sequential`, (`nn.Sequential`, loss)
        or a Hugging Face model. The peers import it by name; weights are drawn from run.seed.
    data: data.factory: a function of a module that returns a map-style dataset of data.sequence + 1 token ids per sample.
    on_step: called with a `Step`, the metrics of each committed step; on_commit: with its `CommittedStep`, as the peers agreed on it.
        on_eval: with a `HeldOut`, each measurement of the held-out loss (eval.path) and the best so far, the one at the end included.
        All in the caller's thread, in the order of the commits; the peers train on meanwhile.
    resume: continue from the newest checkpoint.
    quiet: show no progress.

    Ctrl-C saves a checkpoint and ends the run; a second one ends it at once; then KeyboardInterrupt is raised. A callback's exception
    ends the run with a checkpoint and is raised. No process is left behind in either case.
    Raises ValueError for what can be mended before or at the start (configuration, files, modules); RunFailed when the run ended early."""
    if getattr(sys.modules["__main__"].__spec__, "name", "") == "shoal.launcher.peer":
        raise ValueError(
            "shoal.run was called while a peer imports this module; put the call below `if __name__ == '__main__':`"
        )
    words = list(settings)
    if model is not None:
        words.append(f"model.factory={importing.reference_to(model, 'model')}")
    if data is not None:
        words += ["data.source=dataset", f"data.factory={importing.reference_to(data, 'data')}"]
    options = RunOptions(resume=resume, command="shoal.run(..., resume=True)")
    prepared = session.prepare(config, words, options)
    with session.begin(prepared, options) as job:
        if isinstance(job, Summary):
            return Run(prepared.config.run.directory)
        measurements = _Measured(on_eval)
        outcome = _Session(job, quiet, on_step, on_commit, measurements).run()
    measurements.end(outcome.summary.heldout)
    trained = Run(prepared.config.run.directory)
    if not quiet:
        print(outcome.text)
    if outcome.code == ExitCode.FAILED:
        raise RunFailed(trained, outcome.summary.reason or outcome.summary.unsaved or outcome.text)
    return trained


class _Measured:
    """Calls on_eval with what was measured, each version once."""

    def __init__(self, on_eval: OnEval | None) -> None:
        self._on_eval = on_eval
        self._newest: Agreed | None = None

    def add(self, step: int, loss: float) -> None:
        self._newest = measured(self._newest, step, loss)
        self._tell(HeldOut.of(self._newest))

    def end(self, newest: HeldOut | None) -> None:
        """With what the run's summary has; None: nothing is held out."""
        if newest is not None and (self._newest is None or newest.step > self._newest.step):
            self._tell(newest)

    def _tell(self, newest: HeldOut | None) -> None:
        if newest is not None and self._on_eval is not None:
            self._on_eval(newest)


class _Session:
    """The launcher in a thread, and the callbacks in the caller's."""

    def __init__(
        self, job: RunRequest, quiet: bool, on_step: OnStep | None, on_commit: OnCommit | None, measured: _Measured
    ) -> None:
        self._on_step, self._on_commit, self._measured = on_step, on_commit, measured
        view = Terminal(Console(quiet=True)) if quiet else job.view
        self._job = msgspec.structs.replace(job, view=view, hear=lambda step: self._steps.put(step))
        self._steps: queue.SimpleQueue[CommittedStep | None] = queue.SimpleQueue()  # None: the session has ended
        self._loop: asyncio.AbstractEventLoop | None = None
        self._launcher: Launcher | None = None
        self._outcome: Outcome | Exception | None = None

    def run(self) -> Outcome:
        """The outcome. Raises what a callback raised, KeyboardInterrupt, or what the launcher raised."""
        thread = threading.Thread(target=self._work, name="shoal-launcher", daemon=True)
        thread.start()
        failure: BaseException | None = None
        first_s: float | None = None
        ended = False
        while not ended:
            try:
                committed = self._steps.get()
                ended = committed is None
                if committed is not None and failure is None:
                    first_s = committed.heard_s if first_s is None else first_s
                    self._call(committed, first_s)
            except KeyboardInterrupt as error:
                failure = failure or error
                self._tell(lambda launcher: launcher.interrupt())
            except BaseException as error:  # noqa: BLE001 - a callback's: raised again once the run has ended
                failure = failure or error
                self._tell(lambda launcher: launcher.end("a callback failed"))
        thread.join()
        if failure is not None:
            raise failure
        if isinstance(self._outcome, Outcome):
            return self._outcome
        raise self._outcome or RuntimeError("the launcher's thread ended without a result")

    def _call(self, committed: CommittedStep, first_s: float) -> None:
        if self._on_step is not None:
            self._on_step(step_of(committed, self._job.config, first_s))
        if self._on_commit is not None:
            self._on_commit(committed)
        if committed.commit.heldout is not None:
            self._measured.add(committed.commit.step, committed.commit.heldout)

    def _tell(self, what: Callable[[Launcher], None]) -> None:
        loop, launcher = self._loop, self._launcher
        if loop is not None and launcher is not None and not loop.is_closed():
            loop.call_soon_threadsafe(what, launcher)

    def _work(self) -> None:
        async def work() -> Outcome:
            self._launcher = Launcher(self._job)
            self._loop = asyncio.get_running_loop()
            return await self._launcher.run()

        try:
            self._outcome = asyncio.run(work())
        except Exception as error:  # noqa: BLE001 - raised in the caller's thread
            self._outcome = error
        finally:
            self._steps.put(None)

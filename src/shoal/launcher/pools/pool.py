"""Keeping N peers in a run, wherever they are started: which ones are missing, when each is started again, how all of them are drained.

For `shoal launch`. A Pool is a place that runs peers: this machine, hosts by SSH, Slurm, Ray. It remembers which peers it runs, so a
launcher that dies costs nothing: the run and its peers continue, and the same command takes over where it was.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from shoal.exit_codes import ExitCode

SOON_S = 60.0  # a peer that ends within this time after its start is started again with a pause, which doubles
MOST_PAUSE_S = 60.0
FAREWELL_S = 30.0  # for peers to end by themselves once the run is finished
DRAIN_S = 180.0  # the last replica of a stage waits 120 s at most for a successor, and 20 s for a checkpoint
TICK_S = 0.2  # between two looks at the signals

States = Mapping[int, int | None]  # by a peer's number: None while it runs or waits for a machine, else its exit code


class Peers(msgspec.Struct, frozen=True, kw_only=True):
    """What all peers of a launch have in common."""

    run: str  # the beginning of the run's id, which has only letters and digits
    invite: str
    shoal: tuple[str, ...]  # the command that is `shoal` on the machines
    words: tuple[str, ...] = ()  # of `shoal join`, after the invite
    base: str = "runs"  # run.dir on the machines
    notice: str = ""  # the cloud whose notices are heeded

    @property
    def title(self) -> str:
        """Of files, jobs and actors: two launches of one run are the same launch."""
        return f"shoal-{self.run}"

    def directory(self, number: int) -> str:
        """Of one peer: two on one machine, or on one file system, must not share it."""
        return f"{self.base}/{self.title}/{number}"

    def local(self, invite: str, number: int) -> tuple[str, ...]:
        """The command that keeps one peer in the run on the machine where it is called."""
        notice = ("--notice", self.notice) if self.notice else ()
        words = ("launch", "local", invite, "--first", str(number), *notice, f"run.dir={self.base}", *self.words)
        return (*self.shoal, *words)


class Pool(Protocol):
    poll_s: float  # between two calls of `states`

    def states(self) -> States:
        """Of every peer that was started, by an earlier launcher too."""

    def start(self, number: int) -> None:
        """ValueError: there is no machine for it now."""

    def drain(self, number: int) -> None:
        """Ask it to leave at the end of the step (SIGTERM); whatever restarts peers there must not restart it. ValueError: why not."""

    def stop(self, number: int) -> None:
        """End it at once. ValueError: why not."""

    def log(self, number: int) -> str:
        """Where its output is, in words."""


class Keeper:
    """Keeps the peers with these numbers running until the run is finished, everything is refused, or somebody asks it to stop."""

    def __init__(self, pool: Pool, numbers: Sequence[int], say: Callable[[str], None]) -> None:
        self.pool, self.numbers, self._say = pool, numbers, say
        self._pauses = Pauses()
        self._asked = 0  # signals

    def run(self, notice: Callable[[], bool] = lambda: False, look: Callable[[], None] = lambda: None) -> int:
        """Exit code. `notice`: this machine is going to be taken away. `look` is called with every look at the peers."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)
        while not self._asked:
            states = self.pool.states()
            look()
            codes = [states.get(number) for number in self.numbers]
            if ExitCode.OK in codes:
                self._say("the run is finished")
                self._wait(FAREWELL_S)
                self._each(self.pool.stop)
                return ExitCode.OK
            if all(code == ExitCode.USER_ERROR for code in codes):
                self._say(f"every peer was refused; {self.pool.log(self.numbers[0])} says why")
                return ExitCode.USER_ERROR
            if notice():
                self._say("this machine is going to be taken away: its peers leave")
                break
            self._replace(states, time.monotonic())
            self._sleep(self.pool.poll_s)
        self.drain()
        return ExitCode.INTERRUPTED

    def drain(self) -> None:
        """All of them, and wait for it; a second signal ends them at once."""
        running = self._each(self.pool.drain)
        self._say(f"{running} peers leave at the end of the step; a second Ctrl-C ends them at once")
        self._asked = min(self._asked, 1)
        self._wait(DRAIN_S)
        self._each(self.pool.stop)

    def _ask(self, *_: object) -> None:
        self._asked += 1

    def _each(self, call: Callable[[int], None]) -> int:
        running = [number for number, code in self.pool.states().items() if code is None]
        for number in running:
            try:
                call(number)
            except ValueError as error:
                self._say(f"peer {number} cannot be ended: {error}")
        return len(running)

    def _wait(self, wait_s: float) -> None:
        """Until no peer runs, the time is over, or a second signal arrives."""
        until_s = time.monotonic() + wait_s
        while None in self.pool.states().values() and time.monotonic() < until_s and self._asked < 2:
            time.sleep(self.pool.poll_s)

    def _sleep(self, wait_s: float) -> None:
        until_s = time.monotonic() + wait_s
        while not self._asked and time.monotonic() < until_s:
            time.sleep(TICK_S)

    def _replace(self, states: States, now: float) -> None:
        for number in self._pauses.due(self.numbers, states, now):
            code = states.get(number)
            why = f"peer {number} ended with {code} ({self.pool.log(number)}): " if code is not None else ""
            try:
                self.pool.start(number)
            except ValueError as error:
                self._say(f"{why}peer {number} is not started: {error}")
            else:
                self._say(f"{why}peer {number} is started")


class Pauses:
    """When each peer is started again: at once if it has run for a while, else after 1, 2, 4 ... seconds."""

    def __init__(self) -> None:
        self._started_s: dict[int, float] = {}
        self._ended_s: dict[int, float] = {}
        self._pause_s: dict[int, float] = {}

    def due(self, numbers: Iterable[int], states: States, now: float) -> list[int]:
        """Those to be started now, which is taken for done."""
        due = []
        for number in numbers:
            if number in states and states[number] is None:
                self._ended_s.pop(number, None)
                continue
            ended_s = self._ended_s.setdefault(number, now)
            if now - ended_s < self._pause_s.get(number, 0.0):
                continue
            soon = number in self._started_s and ended_s - self._started_s[number] < SOON_S
            self._pause_s[number] = min(MOST_PAUSE_S, 2 * self._pause_s[number]) if soon else 1.0
            self._started_s[number] = now
            del self._ended_s[number]
            due.append(number)
        return due

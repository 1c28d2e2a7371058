"""What `shoal launch` must do in every pool, on real processes: peers that die are replaced, a notice drains, the launcher dies without the
run, and every sample is counted once. The pool's own tests bring the pool."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.e2e.test_run import NO_MODEL, SOURCE, Start, alive, end, steps_done, summary, wait_for

from shoal.launcher.files import rundir

# `shoal` on a machine that knows neither this checkout nor its Python.
SHOAL = f"env PYTHONPATH={SOURCE} OMP_NUM_THREADS=1 {sys.executable} -m shoal.cli.main"
PEERS = 3  # beside the founder's: one stage has two


class Launched:
    """A run of tiny.toml in a pool, which `launch` begins and takes over."""

    def __init__(self, start: Start, tmp_path: Path, *words: str) -> None:
        self._start, self._path = start, tmp_path
        settings = (f"run.dir={tmp_path / 'runs'}", f"data.path={tmp_path / 'a.txt'}", *NO_MODEL)
        self._words = (*words, *settings, "device.emulated_s=0.05", "checkpoint.every=5")
        self.launcher = self.launch("run.steps=100000")

    def launch(self, *settings: str) -> subprocess.Popen[str]:
        self.launcher = self._start("launch", self._words[0], "tiny.toml", *self._words[1:], *settings)
        return self.launcher

    def wait(self, condition: Callable[[], object]) -> None:
        """For as long as the launcher lives."""
        wait_for(lambda: self.launcher.poll() is not None or condition())
        assert self.launcher.poll() is None, end(self.launcher, self.launcher.returncode)

    def says(self, words: str) -> None:
        """Wait until the launcher has said that."""
        assert self.launcher.stdout is not None
        said = ""
        for line in self.launcher.stdout:
            said += line
            if words in line:
                return
        raise AssertionError(said)

    def whole(self) -> bool:
        """Everybody is a member, the founder's peer too."""
        try:
            return len(rundir.locals_of(self._path / "runs/tiny").members) == PEERS + 1
        except ValueError:
            return False

    def trains(self, steps: int = 2) -> None:
        """Wait until everybody takes part in so many more steps."""
        self.wait(self.whole)
        seen = steps_done(self._path)
        self.wait(lambda: steps_done(self._path) >= seen + steps and self.whole())

    def joined(self, number: int) -> int | None:
        """The process of that peer's `shoal join`."""
        return next((pid for pid, words in processes() if re.search(rf" join - .*/shoal-\w+/{number} ", words)), None)

    def lose(self, number: int) -> None:
        """Everything that a machine ran for this peer, at once."""
        join = self.joined(number)
        assert join is not None
        for pid in (parent(join), join, *(pid for pid, _ in processes() if parent(pid) == join)):
            os.kill(pid, signal.SIGKILL)
        self.wait(lambda: self.joined(number) not in (None, join))  # there is another one

    def end(self) -> None:
        """Everything that a failed test has left: the founder is in a session of its own, and outlives its launcher as it should."""
        for pid, words in processes():
            if str(self._path) in words and "shoal.cli.main" in words:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)  # the kernel ends peers with their launcher

    def output(self) -> str:
        """Of what the peers said, all machines together."""
        return "\n".join(path.read_text() for path in sorted((self._path / "runs").glob("shoal-*/*.log")))


def processes() -> Iterator[tuple[int, str]]:
    """Process ids and command lines of all that live."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and alive(int(entry.name)):
            try:
                yield int(entry.name), (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue  # it has ended meanwhile


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def survives(run: Launched, tmp_path: Path, lose: Callable[[int], None], notice: Callable[[int], None]) -> None:
    """The demands on every pool. `lose`: a machine dies with its peer. `notice`: a machine is going to be taken away."""
    try:
        _disturb(run, tmp_path, lose, notice)
    finally:
        run.end()


def _disturb(run: Launched, tmp_path: Path, lose: Callable[[int], None], notice: Callable[[int], None]) -> None:
    run.trains()
    lose(0)
    run.trains()

    join = run.joined(1)
    notice(1)
    run.wait(lambda: run.joined(1) not in (None, join))
    assert re.search(r"left +p\d: left: its launcher asks it to", run.output()), run.output()
    run.trains()

    run.launcher.kill()
    run.launcher.wait()
    seen, peers = steps_done(tmp_path), [run.joined(number) for number in range(PEERS)]
    wait_for(lambda: steps_done(tmp_path) >= seen + 3)
    run.launch("run.steps=100000")
    run.says("takes over")
    run.trains()
    assert [run.joined(number) for number in range(PEERS)] == peers  # nobody was started beside them

    run.launcher.send_signal(signal.SIGINT)
    print(end(run.launcher, code=130))
    assert [run.joined(number) for number in range(PEERS)] == [None] * PEERS
    account = summary(tmp_path)
    assert account["early"] == "interrupted" and account["saved"], account
    assert (account["lost"], account["counted_twice"]) == (0, 0), account

    run.launch(f"run.steps={account['saved'] + 3}")
    output = end(run.launcher)
    print(output)
    assert "Every sample counted once." in output and "the run is finished" in output
    account = summary(tmp_path)
    assert account["balanced"] and (account["lost"], account["counted_twice"]) == (0, 0), account
    assert account["issued"] == account["committed"] == 4 * account["steps"]
    wait_for(lambda: [run.joined(number) for number in range(PEERS)] == [None] * PEERS)

"""The founder of a launched run: a `shoal run` with one peer on this machine, which outlives the launcher, and the invite for the others.

The founder's directory has the run's key, commits and account. A founder that has ended and is started again returns to the run that
launched peers still train (launcher/returning.py).
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import msgspec

from shoal import config as configuration
from shoal.dashboard import account
from shoal.exit_codes import ExitCode
from shoal.launcher.files import rundir
from shoal.launcher.process import send

INVITE = "launch.invite"  # in the run's directory
LOOK_S = 0.25


class Founder:
    """Of the run that CONFIG describes."""

    def __init__(self, config: str, settings: Sequence[str]) -> None:
        self._words = [config, *settings]
        self.directory = configuration.load(config, settings).run.directory
        self.log = self.directory.with_name(f"{self.directory.name}.launch.log")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def lives(self) -> bool:
        if self._process is not None:
            return self._process.poll() is None
        return rundir.running(self.directory)

    @property
    def invite(self) -> str:
        """That of an earlier launcher; ''."""
        path = self.directory / INVITE
        return path.read_text() if path.exists() else ""

    def start(self, peers: int) -> str:
        """Begin the run, or go on with it, and return an invite for that many peers; '' for a run that has ended before. ValueError: why
        it does not begin."""
        began_s = time.time()
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "wb") as log:
            self._process = subprocess.Popen(
                [*_SHOAL, "run", *self._words, "--here", "1", "--resume"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # neither Ctrl-C nor a closed terminal reaches it
            )
        while not self._listens(began_s):
            if not self.lives:
                if self._process.returncode == ExitCode.OK:
                    return ""
                raise ValueError(f"the founder has ended with {self._process.returncode}: {self.last_words()}")
            time.sleep(LOOK_S)
        return self._invited(peers)

    def _invited(self, peers: int) -> str:
        path = self.directory / INVITE
        words = ("invite", str(self.directory / "config.toml"), "--name", "launch", "--peers", str(peers))
        done = subprocess.run(  # another process: it imports torch
            [*_SHOAL, *words, "--out", str(path)], capture_output=True, text=True
        )
        if done.returncode:
            raise ValueError(done.stderr.strip().removeprefix("shoal: "))
        return path.read_text()

    @property
    def failed(self) -> bool:
        """It has ended before the run."""
        if self.lives:
            return False
        path = self.directory / "summary.json"
        return not path.exists() or bool(account.read(path).early)

    def end(self) -> None:
        """As by Ctrl-C: the run is saved."""
        if self.lives:
            send(rundir.locals_of(self.directory).launcher, signal.SIGINT)

    def outcome(self) -> int:
        """Wait for its end, and print the account. Exit code."""
        while self.lives:
            time.sleep(LOOK_S)
        path = self.directory / "summary.json"
        if not path.exists():
            print(f"the founder has left no account: {self.last_words()}")
            return ExitCode.FAILED
        summary = account.read(path)
        print(account.text(summary))
        return ExitCode.OK if summary.balanced and not summary.early and not summary.unsaved else ExitCode.FAILED

    def last_words(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-5:])

    def _listens(self, began_s: float) -> bool:
        path = self.directory / rundir.BOOTSTRAP
        try:
            fresh = path.stat().st_mtime >= began_s
            return fresh and bool(msgspec.json.decode(path.read_bytes()))
        except (FileNotFoundError, msgspec.DecodeError):
            return False


_SHOAL = (sys.executable, "-m", "shoal.cli.main")

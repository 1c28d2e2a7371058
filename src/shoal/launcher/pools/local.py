"""Peers of this machine, each a `shoal join` of its own: what `shoal launch` runs on every machine that it uses.

A `shoal join` whose launcher has ended leaves the run in good order (SIGTERM from the kernel, on Linux), so that whatever starts
another one in its place does not leave two.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from shoal.launcher.pools.pool import Peers, States
from shoal.launcher.process import die_with

LOG_BYTES = 4 << 20
KEPT_DIRECTORIES = 2  # of earlier attempts of one peer: their logs and traces


class LocalPool:
    poll_s = 0.5

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def states(self) -> States:
        for number in self._processes:
            if self._log(number).stat().st_size > LOG_BYTES:
                os.truncate(self._log(number), 0)  # it appends
        return {number: process.poll() for number, process in self._processes.items()}

    def start(self, number: int) -> None:
        directory = Path(self._peers.directory(number))
        directory.mkdir(parents=True, exist_ok=True)
        lock = open(f"{directory}.lock", "a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the new process ends, which inherits it
        except BlockingIOError:
            lock.close()
            raise ValueError("the one before it is still leaving") from None
        remove_old(directory)
        command = (*self._peers.shoal, "join", "-", f"run.dir={directory}", *self._peers.words)
        with lock, open(self._log(number), "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "shoal.launcher.pools.local", str(os.getpid()), *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(lock.fileno(),),
                process_group=0,  # a signal reaches the launcher alone, which passes it on once
            )
        self._processes[number] = process
        assert process.stdin is not None
        process.stdin.write(self._peers.invite.encode())  # shorter than a pipe holds
        process.stdin.close()

    def drain(self, number: int) -> None:
        self._processes[number].send_signal(signal.SIGTERM)

    def stop(self, number: int) -> None:
        self._processes[number].kill()

    def log(self, number: int) -> str:
        return str(self._log(number))

    def _log(self, number: int) -> Path:
        return Path(f"{self._peers.directory(number)}.log")


def remove_old(directory: Path) -> None:
    """Every `shoal join` renames what the one before has left: of a peer that is started again for months, the newest are kept."""
    earlier = [path for path in directory.glob("*.*") if path.is_dir() and path.suffix[1:].isdigit()]
    for path in sorted(earlier, key=lambda path: path.stat().st_mtime)[:-KEPT_DIRECTORIES]:
        shutil.rmtree(path)


if __name__ == "__main__":
    die_with(int(sys.argv[1]), signal.SIGTERM)
    os.execvp(sys.argv[2], sys.argv[2:])

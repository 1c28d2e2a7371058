"""The processes of a machine that share a stage out: this one leads (rank 0), followers (follower.py) do as it does with their parts.

For sharded.py. Commands go over a pipe to each follower, tensors through torch's process group. A group that has lost a process is not
repaired: that process's part of the state is gone.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shoal.executor import base
from shoal.executor.shards import commands
from shoal.executor.shards.member import connect

DEADLINE_S = 60.0  # for the slowest process to reach an exchange; between two lie a block's forward and backward
START_S = 120.0  # for a process to import torch, on a busy machine
BUILD_S = 1800.0  # to read a stage from a disk: 200 GB at 100 MB/s
COMMAND_S = 60.0  # to read a command
END_S = 5.0  # for a follower to end by itself
GONE_S = 0.2  # for one whose connections broke to have an exit status
T = TypeVar("T")


class Group:
    """One at a time in a process, whose default process group it uses. Any thread may call it, one at a time. DeviceLost, from every
    method: a process failed or hangs, and the group has ended."""

    def __init__(self, device: torch.device, count: int, deadline_s: float = DEADLINE_S) -> None:
        self.kind = device.type, count
        folder = tempfile.TemporaryDirectory(prefix="shoal-")  # of this user alone
        store = f"{folder.name}/store"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.close = weakref.finalize(self, _end, self.processes, folder)

        def run() -> None:
            for rank in range(1, count):
                self.processes.append(_follower())
                start = commands.Start(device=device.type, rank=rank, count=count, store=store, deadline_s=deadline_s)
                _send(self.processes[-1], start)
            for process in self.processes:
                _wait_ready(process, START_S)
            connect(device, 0, count, store, deadline_s)

        self._guarded("Start", run)

    def build(self, command: commands.Build) -> None:
        """In one follower after another: each has the whole stage in host memory until it is cut."""

        def run() -> None:
            for process in self.processes:
                _send(process, command)
                _wait_ready(process, BUILD_S)

        self._guarded("Build", run)

    def all(self, command: commands.Command, own: Callable[[], T]) -> T:
        """Every process carries out the command; `own` is this one's part."""

        def run() -> T:
            for process in self.processes:
                _send(process, command)
            return own()

        return self._guarded(type(command).__name__, run)

    def _guarded(self, what: str, work: Callable[[], T]) -> T:
        try:
            if not self.close.alive:
                raise RuntimeError("the group of devices has ended")
            return work()
        except base.NotFinite:
            raise
        except Exception as error:  # whatever one process fails with, the others wait for it in vain
            reason = self._reason(error)
            self.close()
            raise base.DeviceLost(f"{what} over {self.kind[1]} devices: {reason}") from error

    def _reason(self, error: Exception) -> str:
        codes = {rank: _exit_code(process) for rank, process in enumerate(self.processes, 1)}
        ended = [f"the process of device {rank} ended ({code})" for rank, code in codes.items() if code is not None]
        return "; ".join([*ended, str(error).partition("\n")[0] or type(error).__name__])


_groups: list[Group] = []  # at most one: as torch's default process group, of the process


def group_of(device: torch.device, count: int) -> Group:
    """This process's group. It outlives a stage: a peer may build several in turn."""
    if not (_groups and _groups[0].close.alive and _groups[0].kind == (device.type, count)):
        for group in _groups:
            group.close()
        _groups[:] = [Group(device, count)]
    return _groups[0]


def _send(process: subprocess.Popen[bytes], command: commands.Start | commands.Command) -> None:
    """TimeoutError: the process does not read."""
    assert process.stdin is not None
    left, until_s = memoryview(commands.encoded(command)), time.monotonic() + COMMAND_S
    while left:
        if not select.select([], [process.stdin], [], max(0.0, until_s - time.monotonic()))[1]:
            raise TimeoutError(f"a process has not read a command for {COMMAND_S:g} s")
        with contextlib.suppress(BlockingIOError):  # there is room, but not for a whole page
            left = left[os.write(process.stdin.fileno(), left) :]


def _wait_ready(process: subprocess.Popen[bytes], wait_s: float) -> None:
    """TimeoutError: it hangs. RuntimeError: it has ended."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], wait_s)[0]:
        raise TimeoutError(f"a process is not ready after {wait_s:g} s")
    if process.stdout.read(1) != b"r":
        raise RuntimeError("the log says why")


def _follower() -> subprocess.Popen[bytes]:
    """It is born with the signals blocked that ask a peer to end: the leading process is asked too, and ends it at the right time."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        command = [sys.executable, "-m", "shoal.executor.shards.follower"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)
    return process


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(GONE_S)
    except subprocess.TimeoutExpired:
        return None


def _end(processes: list[subprocess.Popen[bytes]], folder: Any) -> None:
    """Followers end when their pipe does; one that is stopped is killed."""
    for process in processes:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.close()
        except OSError:  # it ended with a command unread
            pass
        process.stdout.close()
    for process in processes:
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if dist.is_initialized():
        dist.destroy_process_group()
    folder.cleanup()

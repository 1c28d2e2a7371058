"""Which process is meant, beyond its number: numbers are used again, so a process is its number and the moment it began.

For `shoal run`, which writes down its peers' (files/rundir.py), and `shoal chaos`, which signals them from another process and must
never hit anything else. And a process that does not outlive its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import asyncio

PR_SET_PDEATHSIG = 1
ORPHANED = 3


class Process(msgspec.Struct, frozen=True):
    """`began` is when it started, in the operating system's own words: only good for comparing."""

    pid: int
    began: str


def die_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel (Linux) to send this process a signal when its parent dies; it may have died already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(ORPHANED)


def identify(pid: int) -> Process | None:
    """None: there is no such process, or it has ended and waits to be looked at by its parent."""
    began = _began_linux(pid) if sys.platform == "linux" else _began(pid)
    return Process(pid, began) if began else None


def lives(process: Process) -> bool:
    return identify(process.pid) == process


def send(process: Process, number: signal.Signals) -> bool:
    """Signal exactly that process. False: it has ended, even if another process has its number now."""
    if not hasattr(os, "pidfd_open"):
        if not lives(process):
            return False
        return _try(lambda: os.kill(process.pid, number))
    try:
        held = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:  # what is held is one process for good; if it is the right one now, it is still when the signal goes out
        return lives(process) and _try(lambda: signal.pidfd_send_signal(held, number))
    finally:
        os.close(held)


def _try(kill: Callable[[], None]) -> bool:
    try:
        kill()
    except ProcessLookupError:
        return False
    return True


def _began_linux(pid: int) -> str:
    """Clock ticks since the machine started, with the start itself: numbers begin again with it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # a name may hold spaces and brackets
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    state, ticks = fields[0], fields[19]
    return "" if state in "ZX" else f"{boot} {ticks}"


def _began(pid: int) -> str:
    """To the second, which is what other systems report without further libraries."""
    result = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    state, _, began = result.stdout.strip().partition(" ")
    return "" if not state or state.startswith("Z") else began.strip()


async def spawn(*command: str, **options: Any) -> asyncio.subprocess.Process:
    """`asyncio.create_subprocess_exec`, which waits for ever where it is cancelled in its middle (Python 3.11). Here it ends, and then the
    process that nobody wants any more is killed."""
    import asyncio  # not for commands that only look at processes

    creating = asyncio.ensure_future(asyncio.create_subprocess_exec(*command, **options))
    try:
        return await asyncio.shield(creating)
    except asyncio.CancelledError:
        process = await creating
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise

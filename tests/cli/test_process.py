"""A process is its number and the moment it began: whoever has the number later is never hit."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from shoal.launcher.process import identify, lives, send, spawn

ASLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def asleep() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(ASLEEP)
    yield process
    process.kill()
    process.wait()


def test_a_living_process_is_itself_and_can_be_signalled(asleep: subprocess.Popen[bytes]) -> None:
    known = identify(asleep.pid)
    assert known is not None and lives(known) and identify(asleep.pid) == known
    assert send(known, signal.SIGKILL)
    assert asleep.wait() == -signal.SIGKILL


def test_one_that_has_ended_is_none_before_and_after_its_parent_looked(asleep: subprocess.Popen[bytes]) -> None:
    known = identify(asleep.pid)
    assert known is not None
    asleep.kill()
    while lives(known):  # the signal is on its way
        pass
    assert not send(known, signal.SIGCONT)
    asleep.wait()
    assert identify(asleep.pid) is None and not send(known, signal.SIGCONT)


def test_another_process_of_the_same_number_is_never_hit(asleep: subprocess.Popen[bytes]) -> None:
    known = identify(asleep.pid)
    assert known is not None
    earlier = msgspec.structs.replace(known, began=known.began + "0")
    assert not lives(earlier) and not send(earlier, signal.SIGKILL)
    assert asleep.poll() is None and lives(known)


@pytest.mark.parametrize("looks", [0, 1, 2, 3, 5])
def test_a_process_whose_start_is_cancelled_is_killed_and_nothing_waits_for_ever(looks: int) -> None:
    """Found 2026-11-25: `shoal run` never ended where every peer was killed while the successor of one was being started."""

    async def cancelled() -> None:
        starting = asyncio.ensure_future(
            spawn(sys.executable, "-c", "import time; time.sleep(600)", stdout=asyncio.subprocess.PIPE)
        )
        for _ in range(looks):  # into the start
            await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(starting, 30.0)

    asyncio.run(cancelled())
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)

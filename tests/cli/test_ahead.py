"""A peer's process that `shoal join` begins before it has read everything."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from shoal.config import Device
from shoal.launcher.ahead import Ahead, begun
from shoal.launcher.devices import peer_environment
from shoal.launcher.invite_text import INVITE_VARIABLE
from shoal.launcher.process import identify

REPORT_BYTES = 1 << 20


def test_one_that_nobody_takes_ends_with_the_command() -> None:
    with begun(os.getpid(), Device()) as ahead:
        assert ahead._process is not None
        pid = ahead._process.pid
    assert identify(pid) is None


def test_it_is_taken_once_and_only_for_the_environment_that_it_has() -> None:
    async def take(ahead: Ahead) -> None:
        environment = peer_environment(Device(), (), 0, 1)
        assert await ahead.take(environment | {"OMP_NUM_THREADS": "77"}, REPORT_BYTES) is None
        taken = await ahead.take(environment, REPORT_BYTES)
        assert taken is not None
        assert await ahead.take(environment, REPORT_BYTES) is None
        taken.stdin.close()  # as when the launcher ends
        assert await taken.wait() != 0
        assert taken.returncode is not None

    with begun(os.getpid(), Device()) as ahead:
        asyncio.run(take(ahead))


def test_one_that_is_taken_and_killed_says_so() -> None:
    async def take(ahead: Ahead) -> int | None:
        taken = await ahead.take(peer_environment(Device(), (), 0, 1), REPORT_BYTES)
        assert taken is not None
        os.killpg(taken.pid, signal.SIGKILL)
        return await taken.wait()

    with begun(os.getpid(), Device()) as ahead:
        assert asyncio.run(take(ahead)) == -signal.SIGKILL


def test_it_gets_no_invite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INVITE_VARIABLE, "secret")
    with begun(os.getpid(), Device()) as ahead:
        assert ahead._process is not None
        assert b"secret" not in Path(f"/proc/{ahead._process.pid}/environ").read_bytes()

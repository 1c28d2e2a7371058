"""A peer's process begun ahead: while `shoal join` still reads what it was asked, the peer imports what needs no settings.

For cli/join.py, which begins it, and launch.py, which takes it over for the first local peer if its environment is the one that peer
needs. It is a peer's process like any other (peer.py), and ends when the command ends without having told it what to be.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.config import Device
from shoal.launcher.devices import peer_environment
from shoal.launcher.fork_server import MODULE, ForkedProcess


class Ahead:
    """At most one process, taken over at most once."""

    def __init__(self, parent: int, device: Device) -> None:
        """`device`: what a peer's settings are likely to say."""
        self._environment = peer_environment(device, (), 0, 1)
        self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
            [sys.executable, "-m", MODULE, str(parent)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._environment,
            process_group=0,
        )

    async def take(self, environment: dict[str, str], report_bytes: int) -> ForkedProcess | None:
        """None: it was taken already, or its environment is another. Its standard error is still the command's."""
        process = self._process
        if process is None or environment != self._environment:
            return None
        self._process = None
        loop = asyncio.get_running_loop()
        stdin, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.stdin)
        stdout = asyncio.StreamReader(report_bytes)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdout), process.stdout)
        taken = ForkedProcess(process.pid, stdin, stdout)

        def wait() -> None:
            returncode = process.wait()
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks any more
                loop.call_soon_threadsafe(taken.end, returncode)

        threading.Thread(target=wait, name="peer's end", daemon=True).start()
        return taken

    def close(self) -> None:
        """End it, unless it was taken."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@contextmanager
def begun(parent: int, device: Device) -> Iterator[Ahead]:
    ahead = Ahead(parent, device)
    try:
        yield ahead
    finally:
        ahead.close()

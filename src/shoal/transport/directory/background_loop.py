"""An event loop in a thread of its own, for what strangers may keep busy: a node's own loop never waits for it.

For directories. The thread ranks lower than the node's. Verifying a signature lets other threads run meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from shoal.transport.streams.engine import step_back

T = TypeVar("T")


class BackgroundLoop:
    """Started and closed from the node's loop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._owner: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._owner = asyncio.get_running_loop()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(self._loop,), name=self._name, daemon=True)
        self._thread.start()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result, and what it raises. Cancelled with whoever waits for it."""
        if self._loop is None:
            work.close()
            raise RuntimeError(f"{self._name} is not running")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def tell(self, call: Callable[[], object]) -> None:
        """In the owner's loop, before it hears of the end of what runs here now."""
        assert self._owner is not None
        try:
            self._owner.call_soon_threadsafe(call)
        except RuntimeError:  # it is closed: nobody is left to tell
            pass

    def close(self) -> None:
        """Whatever runs there is cancelled."""
        if self._loop is None or self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop = self._thread = None

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        step_back()
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()

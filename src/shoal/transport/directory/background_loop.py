"""An event loop in a thread of its own, for work that outsiders can cause: the node's own loop never waits for it.

For directories. The thread has a lower priority than the node's. Verifying a signature lets other threads run meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from shoal.transport.streams.engine import step_back

T = TypeVar("T")


class BackgroundLoop:
    """Started and closed in the owner's loop, which is the node's."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._owner: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # background thread only

    def start(self) -> None:
        self._owner = asyncio.get_running_loop()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(self._loop,), name=self._name, daemon=True)
        self._thread.start()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which runs in the background, or the exception that it raises. Cancelled with the caller."""
        if self._loop is None:
            work.close()
            raise RuntimeError(f"{self._name} is not running")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def create_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """In the background thread: a task that runs until `close`."""
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def post(self, call: Callable[[], object]) -> None:
        """From any thread: call it in the background thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(call)

    def call_in_owner(self, call: Callable[[], object]) -> None:
        """Call it in the owner's loop, before `run` returns there what runs here now."""
        assert self._owner is not None
        try:
            self._owner.call_soon_threadsafe(call)
        except RuntimeError:  # the owner's loop is closed
            pass

    def close(self) -> None:
        """Cancel everything that runs in the background."""
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
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()

"""A thread with a queue of functions. For task_runner.py."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from shoal.core.messages import Result


class Lane:
    """Runs functions in order; `begin` runs first, on the thread."""

    def __init__(self, name: str, begin: Callable[[], None]) -> None:
        self._works: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._begin = begin
        self._stopped = threading.Event()
        self.thread = threading.Thread(target=self._work, name=f"shoal-{name}", daemon=True)
        self.thread.start()

    def put(self, work: Callable[[], None]) -> None:
        self._works.put(work)

    def stop(self) -> None:
        self._stopped.set()
        self._works.put(None)

    def _work(self) -> None:
        self._begin()
        while (work := self._works.get()) is not None and not self._stopped.is_set():
            work()


class Later(Exception):
    """A task goes on with `work`, in another lane or after what waits in its own. Not an error: the way out of a task's first half."""

    def __init__(self, lane: str, work: Callable[[], Result]) -> None:
        super().__init__()
        self.lane, self.work = lane, work

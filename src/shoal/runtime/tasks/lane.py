"""A thread with a queue of functions. For task_runner.py."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


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

"""For every test: one OpenMP thread, set before torch is imported. Tests run beside one another, and threads that wait for a
busy core by spinning made those of model and executor four times slower (81 s against 23 s on 2 cores at a load of 9).

Without "gpu" in `-m` they see no card: what they compute on the CPU of a machine without one they compute there on every machine.

Those that tests/long.txt lists get the mark `long`: `make check` leaves them to `make test`.

And Ctrl-C is heeded: what a shell starts in the background ignores it, and so would every process that a test starts and interrupts."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONG = frozenset(Path(__file__).with_name("long.txt").read_text().split())  # tools/long_tests.py writes it


def pytest_configure(config: pytest.Config) -> None:
    wanted = config.option.markexpr or ""
    if "gpu" not in wanted.replace("not gpu", ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.partition("[")[0] in LONG:
            item.add_marker(pytest.mark.long)


def pytest_collection_finish() -> None:
    """What 7,000 tests import stays to the end: a full collection of garbage need not look at it each time, 0.7 s."""
    gc.collect()
    gc.freeze()

"""For every test: one OpenMP thread, set before torch is imported. Tests run beside one another, and threads that wait for a
busy core by spinning made those of model and executor four times slower (81 s against 23 s on 2 cores at a load of 9).

And Ctrl-C is heeded: what a shell starts in the background ignores it, and so would every process that a test starts and interrupts."""

from __future__ import annotations

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

"""For every test: one OpenMP thread, set before torch is imported. Tests run beside one another, and threads that wait for a
busy core by spinning made those of model and executor four times slower (81 s against 23 s on 2 cores at a load of 9)."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

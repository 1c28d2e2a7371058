"""Memory of this machine that is free now, in a container or not. Imports nothing that is slow."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def free_bytes() -> int | None:
    """Host memory available now; None: unknown."""
    limits = [value for value in (_meminfo(), _cgroup()) if value is not None]
    if limits:
        return min(limits)
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def _meminfo() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _cgroup() -> int | None:
    """Free bytes of a container with a limit. Pages of the file cache count as free."""
    try:
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        lines = (CGROUP / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):  # no cgroup of version 2, or "max"
        return None
    cached = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
    return max(0, limit - used + cached)

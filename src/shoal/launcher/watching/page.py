"""`shoal run --page`: the run's page beside its launcher, served by `shoal watch` in a process of its own. It cannot slow the run down, and
shows the same."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

from shoal.launcher.process import spawn

NEEDS = ("starlette", "uvicorn", "prometheus_client")  # the extra "page"


def require() -> None:
    """ValueError: what serves the page is not installed."""
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"the page needs {', '.join(missing)}, not installed here; try: pip install 'shoal[page]'")


async def serve(directory: Path, say: Callable[[str], None]) -> None:
    """Until cancelled, once there is a status to show. `say` is called with the words for the user."""
    while not (directory / "status.json").exists():
        await asyncio.sleep(0.5)
    command = [sys.executable, "-m", "shoal.cli.main", "watch", str(directory), "--parent", str(os.getpid())]
    with open(directory / "logs" / "page.log", "ab") as log:
        process = await spawn(*command, stdout=asyncio.subprocess.PIPE, stderr=log)
    try:
        assert process.stdout is not None
        address = (await process.stdout.readline()).decode().strip()
        say(address or f"the page could not be shown; see {log.name}")
        code = await process.wait()
        say(f"the page's server has ended with {code}; see {log.name}. `shoal watch {directory}` starts another")
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()

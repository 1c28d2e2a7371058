"""One local peer as a process of its own: `python -m shoal.launcher.peer LAUNCHER`, started by `shoal run` and by nobody else. With a
descriptor as well it is the keeper and the server that forks such processes (fork_server.py).

It reads what it is to be from standard input (launcher/launch.py says how), reports on standard output, and ends with its launcher:
the kernel kills it when process LAUNCHER dies, and where the kernel cannot, the end of standard input does.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from shoal import config as configuration
from shoal.escaping import describe, escaped, escaped_lines
from shoal.launcher.fork_server import keep
from shoal.launcher.launch import News, PeerSpec, Start
from shoal.launcher.process import ORPHANED, die_with
from shoal.runtime.records.report import Ended, encode

if TYPE_CHECKING:
    from shoal.build import Loaded
    from shoal.config import Config
    from shoal.core.messages import Finish
    from shoal.runtime.node import Node


def main(parent: int) -> int:
    die_with(parent)
    out = _own_output()
    write_log()
    lines = _lines()
    gc.disable()  # until `_load` ends: collections are a fifth of the time that imports take
    from shoal import build  # the launcher may still be reading what this peer is to be

    assert build
    threading.Thread(target=_import_torch, name="torch", daemon=True).start()
    spec = msgspec.json.decode(next(lines, b"null"), type=PeerSpec | None)
    if spec is None:
        return ORPHANED  # the command has ended before it started a peer
    _log_to(spec.log)
    try:
        ended = _take_part(spec, lines, out)
    except (ValueError, OSError) as error:
        ended = Ended(ok=False, reason=describe(error), user_error=isinstance(error, ValueError))
    out.write(encode(ended))
    out.flush()
    return 0 if ended.ok else 1


class PlainFormatter(logging.Formatter):
    """What is logged may quote another peer: a record is one line, but for a traceback, and nothing in it is obeyed by a terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return escaped(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        return escaped_lines(super().format(record))


def write_log() -> None:
    """Warnings and errors of every library, on standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(PlainFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


def _log_to(path: str) -> None:
    """Standard error and what libraries print, from now on; '': stays."""
    if path:
        with open(path, "ab") as log:
            os.dup2(log.fileno(), 2)
            os.dup2(log.fileno(), 1)


def _own_output() -> IO[bytes]:
    """The report's pipe for us alone: whatever a library prints goes to the log."""
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return out


def _lines() -> Iterator[bytes]:
    """What the launcher writes. Not through sys.stdin, whose lock would be held when the interpreter ends."""
    held = b""
    with contextlib.suppress(OSError):
        while piece := os.read(0, 1 << 16):
            *whole, held = (held + piece).split(b"\n")
            yield from whole


def _take_part(spec: PeerSpec, lines: Iterator[bytes], out: IO[bytes]) -> Ended:
    from shoal import build
    from shoal.transport.identity.invite import read_invite

    config = configuration.from_tree(spec.config)
    build.load_network(config)
    loading: Future[build.Loaded] = Future()
    threading.Thread(target=_load, args=(spec, config, loading), name="load", daemon=True).start()
    start = msgspec.json.decode(next(lines, b"null"), type=Start | None)
    if start is None:
        return Ended(ok=False, reason="the launcher has ended")
    news = _News(start.passes)
    threading.Thread(target=_watch_launcher, args=(lines, news), name="launcher", daemon=True).start()
    traces = Path(spec.directory) / "traces"
    traces.mkdir(exist_ok=True)
    role = build.PeerRole(
        first=spec.first,
        first_step=spec.first_step,
        port=config.network.port if spec.number == 0 else 0,
        trace=traces / f"{spec.label}.jsonl",
        key=Path(spec.key) if spec.key else None,
    )

    async def run() -> Ended:
        async with build.peer(config, role, read_invite(start.invite, 0.0), loading, out) as node:
            news.reach(node)
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGTERM, lambda: node.leave("its launcher asks it to"))
            finish = await _run(node, loading.result().checked)
        return Ended(ok=finish.ok, reason=finish.reason)

    return asyncio.run(run())


def _import_torch() -> None:
    """Every peer needs it. Where it cannot be imported, `_load` meets the same error and reports it."""
    with contextlib.suppress(ImportError, OSError):
        import torch

        assert torch


def _load(spec: PeerSpec, config: Config, loading: Future[Loaded]) -> None:
    """Imports, the model and the data, while this process begins to listen."""
    from shoal import build

    future: Future[Any] = loading
    try:
        loaded = build.load(config, spec.first_step, spec.run)
        loading.set_result(loaded)
        future = loaded.checked
        build.check(config)
        future.set_result(None)
    except BaseException as error:  # noqa: BLE001 - raised where it is awaited
        future.set_exception(error)
    finally:
        gc.freeze()  # modules stay: a later collection does not look at their 640,000 objects, 0.4 s
        gc.enable()


async def _run(node: Node, checked: Future[None]) -> Finish:
    """Until this peer's part is over. Raises what is wrong with the model or this machine, as soon as that is known."""
    running, loop = asyncio.ensure_future(node.run()), asyncio.get_running_loop()

    def end(check: Future[None]) -> None:
        if check.exception() is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: this peer's part is over
                loop.call_soon_threadsafe(running.cancel)

    checked.add_done_callback(end)
    try:
        return await running
    except asyncio.CancelledError:
        if checked.done():
            checked.result()
        raise


class _News:
    """Hands what the launcher sends to the node's loop: the newest pass list, and that the run is to be saved."""

    def __init__(self, passes: bytes) -> None:
        self._passes = passes
        self._tell: Callable[[], object] = lambda: None
        self._save: Callable[[], object] = lambda: None

    def reach(self, node: Node) -> None:
        """In the node's loop: from now on it receives each list at once."""
        loop, gate = asyncio.get_running_loop(), node.gate
        assert gate is not None

        def hear() -> None:
            if self._passes:
                gate.hear(self._passes)

        self._tell = lambda: loop.call_soon_threadsafe(hear)
        self._save = lambda: loop.call_soon_threadsafe(node.save)
        hear()

    def take(self, news: News) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: this peer's part is over
            if news.save:
                self._save()
            if news.passes:
                self._passes = news.passes
                self._tell()


def _watch_launcher(lines: Iterator[bytes], news: _News) -> None:
    """The end of input means that the launcher has ended."""
    for line in lines:
        news.take(msgspec.json.decode(line, type=News))
    os._exit(ORPHANED)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        keep(int(sys.argv[1]), int(sys.argv[2]), main)
    code = main(int(sys.argv[1]))
    sys.stderr.flush()
    os._exit(code)  # everything is closed; taking torch and transformers apart module by module takes seconds

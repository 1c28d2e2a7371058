"""Peers forked from one process: each as if started anew, none left behind, whoever dies."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.test_run import Start, alive, assert_balanced, children, end, start, summary, wait_for

from shoal.launcher.fork_server import MODULE, Declined, ForkedProcess, ForkServer

assert start is not None  # the fixture
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere peers are started one by one"),
]
LONG_S = 120.0
EMULATED = {"device": {"executor": "emulated"}}  # imports torch, and no model


def with_server(tmp_path: Path, check: Callable[[ForkServer], Coroutine[Any, Any, None]], **variables: str) -> None:
    async def run() -> None:
        server = ForkServer(tmp_path / "fork_server.log", 1 << 20)
        await server.start({**os.environ, **variables}, EMULATED)
        try:
            await asyncio.wait_for(check(server), LONG_S)
        finally:
            await server.close()

    asyncio.run(run())


async def forked(server: ForkServer, tmp_path: Path, label: str, **variables: str) -> ForkedProcess:
    with open(tmp_path / f"{label}.log", "ab") as errors:
        return await server.fork(f"{MODULE} {label}", {**os.environ, **variables}, errors)


def test_each_peer_has_streams_a_name_a_group_and_an_exit_code_of_its_own(tmp_path: Path) -> None:
    async def check(server: ForkServer) -> None:
        one = await forked(server, tmp_path, "p1", OMP_NUM_THREADS="1")
        two = await forked(server, tmp_path, "p2", OMP_NUM_THREADS="2")
        assert one.pid != two.pid
        for peer, label in ((one, "p1"), (two, "p2")):
            assert os.getpgid(peer.pid) == peer.pid
            wait_for(lambda peer=peer, label=label: _title(peer.pid) == f"{MODULE} {label}")
        one.stdin.write(b"no request\n")
        assert await one.wait() == 1 and two.returncode is None
        assert (
            "MalformedError" in (tmp_path / "p1.log").read_text() or "DecodeError" in (tmp_path / "p1.log").read_text()
        )
        assert not (tmp_path / "p2.log").read_bytes()
        os.killpg(two.pid, signal.SIGKILL)
        assert await two.wait() == -signal.SIGKILL

    with_server(tmp_path, check)


def test_peers_end_with_their_server_and_it_declines_from_then_on(tmp_path: Path) -> None:
    async def check(server: ForkServer) -> None:
        peer = await forked(server, tmp_path, "p1")
        assert server._process is not None
        server._process.kill()
        assert await peer.wait() == -signal.SIGKILL
        wait_for(lambda: not alive(peer.pid))
        with pytest.raises(Declined, match="has ended"):
            await forked(server, tmp_path, "p2")

    with_server(tmp_path, check)


def test_a_process_with_threads_is_not_forked(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    path = os.pathsep.join((str(tmp_path / "site"), os.environ["PYTHONPATH"]))

    async def check(server: ForkServer) -> None:
        with pytest.raises(Declined, match="2 threads"):
            await forked(server, tmp_path, "p1")

    with_server(tmp_path, check, PYTHONPATH=path)


def test_a_run_whose_server_declines_starts_each_peer_by_itself(start: Start, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(
        textwrap.dedent("""
            import sys, threading, time
            if "shoal.launcher.peer" in sys.orig_argv and len(sys.orig_argv) == 5:
                threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        """)
    )
    end(start("run", "tiny.toml", first=str(tmp_path / "site")))
    assert_balanced(summary(tmp_path), 4)
    said = (tmp_path / "runs/tiny/logs/fork_server.log").read_text()
    assert said.count("is started by itself: 2 threads run after the imports") == 3


@pytest.mark.parametrize("victim", ["launcher", "server"])
def test_the_death_of_launcher_or_server_leaves_nothing_behind(start: Start, victim: str) -> None:
    launcher = start("run", "tiny.toml", "run.steps=100000")
    wait_for(lambda: launcher.poll() is not None or len(children(launcher.pid)) == 3)
    peers = list(children(launcher.pid))
    server = int(Path(f"/proc/{peers[0]}/stat").read_text().rpartition(")")[2].split()[1])
    assert server != launcher.pid, "they were forked"
    os.kill(launcher.pid if victim == "launcher" else server, signal.SIGKILL)
    wait_for(lambda: not any(map(alive, [*peers, server])))
    if victim == "server":
        launcher.send_signal(signal.SIGINT)
        launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=LONG_S)
    assert launcher.returncode


def _title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()

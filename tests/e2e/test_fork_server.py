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


def with_server(
    tmp_path: Path,
    check: Callable[[ForkServer], Coroutine[Any, Any, None]],
    warn: Callable[[str], None] = lambda text: None,
    **variables: str,
) -> None:
    async def run() -> None:
        server = ForkServer(tmp_path / "fork_server.log", 1 << 20, warn)
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


def test_peers_outlive_their_server_which_is_said_once_and_declines_from_then_on(tmp_path: Path) -> None:
    said: list[str] = []

    async def check(server: ForkServer) -> None:
        peer = await forked(server, tmp_path, "p1")
        wait_for(lambda: _title(peer.pid) == f"{MODULE} p1")  # it has begun
        keeper = _parent(peer.pid)
        assert server._process is not None and keeper == server._process.pid, "the server is not its parent"
        os.kill(_server_of(keeper, peer.pid), signal.SIGKILL)
        for label in ("p2", "p3"):
            with pytest.raises(Declined, match="ended with -9"):
                while True:  # until the launcher has heard of it
                    await (await forked(server, tmp_path, label)).wait()
        assert peer.returncode is None and alive(peer.pid)
        os.killpg(peer.pid, signal.SIGTERM)
        assert await peer.wait() == -signal.SIGTERM, "its end is still reported"
        assert len(said) == 1 and "start by themselves" in said[0]

    with_server(tmp_path, check, said.append)


def test_a_server_that_dies_while_it_forks_declines_that_peer(tmp_path: Path) -> None:
    async def check(server: ForkServer) -> None:
        peer = await forked(server, tmp_path, "p1")
        wait_for(lambda: _title(peer.pid) == f"{MODULE} p1")  # it has begun
        assert server._process is not None
        process = _server_of(server._process.pid, peer.pid)
        os.kill(process, signal.SIGSTOP)
        asked = asyncio.create_task(forked(server, tmp_path, "p2"))
        await asyncio.sleep(0)
        os.kill(process, signal.SIGKILL)
        with pytest.raises(Declined, match="ended with -9"):
            await asked
        assert peer.returncode is None

    with_server(tmp_path, check)


def test_peers_and_server_end_with_their_keeper(tmp_path: Path) -> None:
    said: list[str] = []

    async def check(server: ForkServer) -> None:
        peer = await forked(server, tmp_path, "p1")
        assert server._process is not None
        process = _server_of(server._process.pid, peer.pid)
        server._process.kill()
        assert await peer.wait() == -signal.SIGKILL
        wait_for(lambda: not alive(peer.pid) and not alive(process))
        with pytest.raises(Declined, match="has ended"):
            await forked(server, tmp_path, "p2")
        assert len(said) == 1

    with_server(tmp_path, check, said.append)


def test_chance_and_log_positions_are_each_peers_own(tmp_path: Path) -> None:
    """What two forks draw from the system differs; what one appends to its log does not move the other's place."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(
        textwrap.dedent("""
            import sys
            if "shoal.launcher.peer" in sys.orig_argv and len(sys.orig_argv) == 5:
                import os, random, secrets
                import shoal.launcher.fork_server as fork_server
                become = fork_server._become
                def tell(request):
                    become(request)
                    words = [random.random(), secrets.token_hex(), len(os.listdir("/proc/self/task")), request.title]
                    print(*words, os.environ["OMP_NUM_THREADS"], sorted(map(int, os.listdir("/proc/self/fd")))[-2], flush=True)
                fork_server._become = tell
        """)
    )
    path = os.pathsep.join((str(tmp_path / "site"), os.environ["PYTHONPATH"]))

    async def check(server: ForkServer) -> None:
        words = []
        for label in ("p1", "p2"):
            peer = await forked(server, tmp_path, label, PYTHONPATH=path, OMP_NUM_THREADS=label[1])
            line = await asyncio.wait_for(peer.stdout.readline(), LONG_S)
            words.append(line.decode().split())
        one, two = words
        assert one[0] != two[0] and one[1] != two[1]
        assert one[2] == "1", "the other begins OpenMP's second thread"
        assert one[5:] == ["1", "2"] and two[5:] == ["2", "2"], "nothing is open but its three streams"

    with_server(tmp_path, check, PYTHONPATH=path)


# A thread from the first line of every process, and one that a module of the user's starts when the server imports it.
EARLY = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
LATE = """
import sys
if "shoal.launcher.peer" in sys.orig_argv and len(sys.orig_argv) == 5:
    import threading, time
    import shoal.build
    preload = shoal.build.preload
    def with_thread(config):
        preload(config)
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    shoal.build.preload = with_thread
"""


@pytest.mark.parametrize("site, when", [(EARLY, "before"), (LATE, "after")])
def test_a_process_with_threads_is_not_forked(tmp_path: Path, site: str, when: str) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(site)
    path = os.pathsep.join((str(tmp_path / "site"), os.environ["PYTHONPATH"]))

    async def check(server: ForkServer) -> None:
        with pytest.raises(Declined, match=f"2 threads run {when} the imports"):
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
    assert said.count("is started by itself: 2 threads run before the imports") == 3


@pytest.mark.parametrize("victim", ["launcher", "keeper"])
def test_the_death_of_launcher_or_keeper_leaves_nothing_behind(start: Start, victim: str) -> None:
    launcher, peers, keeper = _a_run(start)
    process = _server_of(keeper, *peers)
    os.kill(launcher.pid if victim == "launcher" else keeper, signal.SIGKILL)
    wait_for(lambda: not any(map(alive, [*peers, keeper, process])))
    if victim == "keeper":
        launcher.send_signal(signal.SIGINT)
        launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=LONG_S)
    assert launcher.returncode


def test_a_run_outlives_its_server_and_replaces_a_killed_peer_by_a_plain_start(start: Start, tmp_path: Path) -> None:
    launcher, peers, keeper = _a_run(start)
    os.kill(_server_of(keeper, *peers), signal.SIGKILL)
    commits = tmp_path / "runs/tiny/commits.jsonl"
    wait_for(lambda: commits.exists() and commits.stat().st_size > 0)
    assert all(map(alive, peers))
    os.kill(peers[-1], signal.SIGKILL)
    wait_for(lambda: len(set(children(launcher.pid)) - set(peers)) == 1)
    (newcomer,) = set(children(launcher.pid)) - set(peers)
    assert _parent(newcomer) == launcher.pid
    launcher.send_signal(signal.SIGINT)
    said, _ = launcher.communicate(timeout=LONG_S)
    assert "start by themselves, which takes longer" in said


def _a_run(start: Start) -> tuple[Any, list[int], int]:
    """Its launcher, its three peers, and their keeper."""
    launcher = start("run", "tiny.toml", "run.steps=100000")
    wait_for(lambda: launcher.poll() is not None or len(children(launcher.pid)) == 3)
    peers = sorted(children(launcher.pid))
    keeper = _parent(peers[0])
    assert keeper != launcher.pid, "they were forked"
    return launcher, peers, keeper


def _parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def _server_of(keeper: int, *peers: int) -> int:
    (server,) = {int(pid) for pid in Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()} - {*peers}
    return server


def _title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()

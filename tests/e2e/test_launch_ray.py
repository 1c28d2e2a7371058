"""`shoal launch ray` on a real Ray cluster: a head and six raylets of this machine, of which one is killed and one drained."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.launching import PEERS, Launched, parent, processes, survives
from tests.e2e.test_run import SOURCE, Start, end, start, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
__all__ = ["start"]  # a fixture

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'shoal[ray]'")
NODES = PEERS + 3  # one that is killed, one that is drained, one to move to
NOTICE_S = 60
STORE_BYTES = 80 << 20  # the least that Ray takes; nothing lies there


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))  # of the actors
    cluster = Cluster()
    try:
        for cpus in (0, *(1 for _ in range(NODES))):
            cluster.add_node(num_cpus=cpus, object_store_memory=STORE_BYTES, include_dashboard=False, wait=False)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        cluster.shutdown()


def raylet(run: Launched, number: int) -> int:
    """The process of the raylet that runs this peer's actor."""
    join = run.joined(number)
    return 0 if join is None else parent(parent(join))


def node_of(nodes: Any, pid: int) -> Any:
    return next(node for node in nodes.worker_nodes if node.all_processes["raylet"][0].process.pid == pid)


def timed(what: str, condition: Callable[[], object]) -> None:
    began_s = time.monotonic()
    wait_for(condition)
    print(f"{what}: {time.monotonic() - began_s:.1f} s", flush=True)


def test_ray_replaces_peers_whose_processes_and_nodes_die_or_are_drained(
    nodes: Any, start: Start, tmp_path: Path
) -> None:
    run = Launched(start, tmp_path, "ray", "--peers", str(PEERS), "--ray", nodes.address)

    def another(number: int, before: int) -> bool:
        """A child of an actor: a killed peer's own children live on for a moment, under its name."""
        join = run.joined(number)
        actors = [pid for pid, words in processes() if "PeerActor" in words]
        return join not in (None, before) and parent(join or 0) in actors

    def lose(number: int) -> None:
        join = run.joined(number)
        assert join is not None
        os.kill(join, signal.SIGKILL)
        timed("its peer killed, another started", lambda: another(number, join))
        run.trains()

        join, place = run.joined(number), raylet(run, number)
        assert join is not None
        nodes.remove_node(node_of(nodes, place), allow_graceful=False)
        timed("its raylet killed, another started", lambda: another(number, join))
        assert raylet(run, number) != place
        run.trains()

        run.launcher.kill()
        run.launcher.wait()
        join = run.joined(number)
        assert join is not None
        for pid in (parent(join), join):
            os.kill(pid, signal.SIGKILL)
        timed("its actor killed without a launcher, another started", lambda: another(number, join))
        run.launch("run.steps=100000")

    def drain(number: int) -> None:
        join, place = run.joined(number), raylet(run, number)
        assert join is not None
        node = node_of(nodes, place)
        words = ("--node-id", node.node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot")
        command = (sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", nodes.address, *words)
        subprocess.run([*command, "--deadline-remaining-seconds", str(NOTICE_S)], check=True)
        began_s = time.monotonic()
        timed("its node drained, another started", lambda: another(number, join))
        assert time.monotonic() - began_s < NOTICE_S  # Ray itself replaces it only then
        assert raylet(run, number) != place

    survives(run, tmp_path, lose, drain)
    wait_for(lambda: not [words for _, words in processes() if "PeerActor" in words])
    ray.init(nodes.address, log_to_driver=False)
    try:
        assert ray.util.list_named_actors(all_namespaces=True) == []
    finally:
        ray.shutdown()


def test_a_run_begins_only_where_a_cluster_answers(start: Start, tmp_path: Path) -> None:
    refused = end(start("launch", "ray", "tiny.toml", "--ray", "127.0.0.1:9"), code=2)
    assert "no Ray cluster answers at 127.0.0.1:9" in refused, refused
    assert not (tmp_path / "runs").exists()

"""Peers as Ray actors, one each. An actor keeps its peer running; Ray restarts an actor whose process or node has died, on any node with
room. Actors are detached, so they outlive this launcher, and Ray finds them by name in the run's namespace.

A node that Ray drains gets no new actors, and ends at a deadline with all that it runs: Ray says so to nobody. So each actor asks whether
its own node is being drained, has its peer leave, and then ends its process, for Ray to restart it elsewhere.

Only this file needs Ray (pip install 'shoal[ray]').
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

import msgspec
import ray
from ray._private.state import state as cluster  # who is being drained: Ray's own libraries read it here, too

from shoal.exit_codes import ExitCode
from shoal.launcher.pools import notice
from shoal.launcher.pools.local import LocalPool
from shoal.launcher.pools.pool import Pauses, Peers, States

ANSWER_S = 5.0  # an actor that does not answer within this time waits for a node, or is being restarted
GONE_S = 30.0  # one that was asked to leave and has not answered for so long has no process
CONNECT_S = 5.0
LOOK_S = 0.5
DRAINS_S = 2.0  # between two looks at the nodes that are being drained
KEEP_S = 600.0  # an exit code waits this long for a launcher to read it
MOST_ASKED_AT_ONCE = 4  # calls that an actor answers side by side
FINAL = (ExitCode.OK, ExitCode.USER_ERROR)


class PeerActor:
    """One peer, started again when it ends badly. Its code stays None until the run has ended, the peer was refused, or it was asked to
    leave; the actor then waits to be removed."""

    def __init__(self, peers: Peers, number: int) -> None:
        shoal = peers.shoal or (sys.executable, "-m", "shoal.cli.main")
        self._pool, self._number = LocalPool(msgspec.structs.replace(peers, shoal=shoal)), number
        self._cloud = peers.notice
        context = ray.get_runtime_context()
        self._node, self._self = context.get_node_id(), context.current_actor
        self._stopping = threading.Event()  # the launcher wants it to leave
        self._evicted = threading.Event()  # its process is going to end
        self._code: int | None = None
        self._log = f"{ray.util.get_node_ip_address()}:{os.path.abspath(self._pool.log(number))}"
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: self._evicted.set())  # `ray stop` waits for a while after it
        # The kernel signals a child when the thread that started it ends, so one thread starts and ends all of them.
        threading.Thread(target=self._keep, daemon=True).start()

    def state(self) -> tuple[int | None, str]:
        """Exit code, and where the output is."""
        return self._code, self._log

    def drain(self) -> None:
        self._stopping.set()

    def _keep(self) -> None:
        try:
            noticed = notice.reader(self._cloud)
        except ValueError as error:
            self._code, self._log = ExitCode.USER_ERROR, str(error)
            return
        drained = Drained(self._node)
        pauses = Pauses()
        while not self._ends():
            states = self._pool.states()
            if states.get(self._number) in FINAL:
                break
            if drained() or noticed():
                self._evicted.set()
                continue
            for number in pauses.due([self._number], states, time.monotonic()):
                with contextlib.suppress(ValueError):  # the one before it is still leaving: after a pause
                    self._pool.start(number)
            time.sleep(LOOK_S)
        code = self._leave()
        if code not in FINAL and not self._stopping.is_set():
            while noticed() and not drained():  # Ray knows nothing of a cloud's notice, and would restart it here
                time.sleep(LOOK_S)
            os._exit(1)  # Ray restarts it, on another node if this one is being drained
        self._code = code
        time.sleep(KEEP_S)
        ray.kill(self._self)

    def _ends(self) -> bool:
        return self._stopping.is_set() or self._evicted.is_set()

    def _leave(self) -> int:
        """Have the peer leave, if it runs, and wait for it."""
        asked = False
        while True:
            states = self._pool.states()
            if self._number not in states:
                return ExitCode.INTERRUPTED
            code = states[self._number]
            if code is not None:
                return code
            if not asked:
                self._pool.drain(self._number)
                asked = True
            time.sleep(LOOK_S)


class Drained:
    """Says whether Ray drains a node; asks the cluster at most every 2 s."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._next_s, self._drained = 0.0, False

    def __call__(self) -> bool:
        now = time.monotonic()
        if not self._drained and now >= self._next_s:
            self._next_s = now + DRAINS_S
            self._drained = self._node in cluster.get_draining_nodes()
        return self._drained


class RayPool:
    poll_s = 2.0

    def __init__(self, peers: Peers, cpus: float, gpus: float) -> None:
        """In the cluster that is connected. `cpus`, `gpus`: of each peer."""
        self._peers = peers
        self._actor = ray.remote(
            num_cpus=cpus,
            num_gpus=gpus,
            max_restarts=-1,
            max_concurrency=MOST_ASKED_AT_ONCE,
            lifetime="detached",
            namespace=peers.title,
            scheduling_strategy="SPREAD",
        )(PeerActor)
        self._codes: dict[int, int] = {}  # of peers whose actors are removed
        self._logs: dict[int, str] = {}
        self._leaving_s: dict[int, float] = {}  # when each that was asked to answered last

    def states(self) -> States:
        answers = {number: actor.state.remote() for number, actor in self._actors().items()}
        if answers:
            ray.wait(list(answers.values()), num_returns=len(answers), timeout=ANSWER_S)
        running: dict[int, None] = {}
        for number, answer in answers.items():
            code = self._read(number, answer)
            if code is None:
                running[number] = None
                self._codes.pop(number, None)
            else:
                self._codes[number] = code
                self.stop(number)
        return self._codes | running

    def start(self, number: int) -> None:
        """An actor that is still ending keeps its name: ValueError."""
        self._leaving_s.pop(number, None)
        self._actor.options(name=_name(number)).remote(self._peers, number)
        self._codes.pop(number, None)

    def drain(self, number: int) -> None:
        self._leaving_s.setdefault(number, time.monotonic())
        self._find(number).drain.remote()

    def stop(self, number: int) -> None:
        with contextlib.suppress(ValueError):  # it has ended
            ray.kill(self._find(number))

    def log(self, number: int) -> str:
        return self._logs.get(number, "its node")

    def _actors(self) -> dict[int, Any]:
        actors = {}
        for entry in ray.util.list_named_actors(all_namespaces=True):
            if entry["namespace"] == self._peers.title:
                number = int(entry["name"].removeprefix("peer-"))
                with contextlib.suppress(ValueError):  # it has ended
                    actors[number] = self._find(number)
        return actors

    def _find(self, number: int) -> Any:
        return ray.get_actor(_name(number), self._peers.title)

    def _read(self, number: int, answer: Any) -> int | None:
        """One that does not answer is being restarted, or waits for a node; if it was asked to leave, it has left. One that is dead for
        good has no name any more, so that it is missing from the next answer."""
        try:
            code, self._logs[number] = ray.get(answer, timeout=0)
        except (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError):
            since_s = self._leaving_s.get(number)
            return None if since_s is None or time.monotonic() - since_s < GONE_S else ExitCode.INTERRUPTED
        if code is None and number in self._leaving_s:
            self._leaving_s[number] = time.monotonic()
            with contextlib.suppress(ValueError):  # it has ended
                self._find(number).drain.remote()  # restarted since
        result: int | None = code
        return result


def _name(number: int) -> str:
    return f"peer-{number}"


def connect(address: str) -> None:
    """To the cluster at HOST:PORT; '': that of RAY_ADDRESS, else the one of this machine. ValueError: no cluster of Ray answers there."""
    named = address or os.environ.get("RAY_ADDRESS", "")
    host, colon, port = named.rpartition(":")
    if "://" not in named and colon:  # Ray itself tries for minutes
        try:
            socket.create_connection((host, int(port)), CONNECT_S).close()
        except (OSError, ValueError) as error:
            raise ValueError(f"no Ray cluster answers at {named} ({error}); `ray start --head` begins one") from None
    try:
        ray.init(address or "auto", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        first = str(error).splitlines()[0]
        raise ValueError(
            f"no Ray cluster at {named or 'this machine'}: {first} Call it on a machine of the cluster (`ray start --head`"
            " begins one, `ray start --address HOST:PORT` adds a machine), with --ray HOST:PORT where there are several"
        ) from None

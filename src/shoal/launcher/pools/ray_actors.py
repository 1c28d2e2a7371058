"""Peers as Ray actors, one each. Ray restarts an actor whose peer, process or node has died, on any node with room; the actors are
detached, so they outlive this launcher, and Ray finds them by name.

Only this file needs Ray (pip install shoal[ray]).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

import ray
from ray.actor import ActorHandle

from shoal.exit_codes import ExitCode
from shoal.launcher.pools import notice
from shoal.launcher.pools.local import LocalPool
from shoal.launcher.pools.pool import Peers, States

NAMESPACE = "shoal"
ANSWER_S = 10.0  # an actor that does not answer within this time waits for a node, or is being restarted
LOOK_S = 1.0


class PeerActor:
    """One peer. Its process ends when the peer does, for Ray to restart it, unless the run has ended or the peer was asked to leave."""

    def __init__(self, peers: Peers, number: int) -> None:
        self._pool, self._number = LocalPool(peers), number
        self._gone = threading.Event()  # asked to leave
        self._code: int | None = None
        # The kernel signals a child when the thread that started it ends, so one thread does both.
        threading.Thread(target=self._keep, args=(notice.reader(peers.notice),), daemon=True).start()

    def code(self) -> int | None:
        return self._code

    def drain(self) -> None:
        self._gone.set()

    def _keep(self, noticed: notice.Reader) -> None:
        self._pool.start(self._number)
        draining = False
        while (code := self._pool.states()[self._number]) is None:
            if not draining and (self._gone.is_set() or noticed()):
                draining = True
                self._pool.drain(self._number)
            time.sleep(LOOK_S)
        if code not in (ExitCode.OK, ExitCode.USER_ERROR) and not self._gone.is_set():
            os._exit(1)
        self._code = code


class RayPool:
    poll_s = 2.0

    def __init__(self, peers: Peers, cpus: float, gpus: float) -> None:
        """Of each peer. The cluster is that of RAY_ADDRESS, else the one of this machine."""
        ray.init(address="auto", namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
        self._peers = peers
        options = {"max_restarts": -1, "lifetime": "detached", "scheduling_strategy": "SPREAD", "max_concurrency": 4}
        self._actor = ray.remote(PeerActor).options(num_cpus=cpus, num_gpus=gpus, **options)

    def states(self) -> States:
        actors = {number: actor for number in self._numbers() if (actor := self._find(number)) is not None}
        answers = {number: actor.code.remote() for number, actor in actors.items()}
        if answers:
            ray.wait(list(answers.values()), num_returns=len(answers), timeout=ANSWER_S)
        return {number: self._read(answer) for number, answer in answers.items()}

    def start(self, number: int) -> None:
        if self._find(number) is not None:
            self.stop(number)
        self._actor.options(name=self._name(number), get_if_exists=True).remote(self._peers, number)

    def drain(self, number: int) -> None:
        if (actor := self._find(number)) is not None:
            actor.drain.remote()

    def stop(self, number: int) -> None:
        if (actor := self._find(number)) is not None:
            ray.kill(actor)

    def log(self, number: int) -> str:
        return f"{self._peers.directory(number)}.log on its node"

    def _numbers(self) -> list[int]:
        names = (name.rpartition("-") for name in ray.util.list_named_actors())
        return sorted(int(number) for title, _, number in names if title == self._peers.title)

    def _name(self, number: int) -> str:
        return f"{self._peers.title}-{number}"

    def _find(self, number: int) -> ActorHandle[Any] | None:
        try:
            return ray.get_actor(self._name(number), NAMESPACE)
        except ValueError:
            return None

    @staticmethod
    def _read(answer: ray.ObjectRef[Any]) -> int | None:
        try:
            code: int | None = ray.get(answer, timeout=0)
        except (ray.exceptions.GetTimeoutError, ray.exceptions.ActorUnavailableError):
            return None  # Ray starts it, or starts it again
        except ray.exceptions.RayActorError:
            return ExitCode.FAILED  # for good
        return code

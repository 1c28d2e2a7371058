"""A Kubernetes of one machine, as far as configs/launch/kubernetes uses it: a Job and a Deployment keep pods.

A pod's container is a process with its arguments, environment, volumes as directories, probes, restarts and grace period. Paths in the
container stand for directories here; each pod has an address of its own, and the rest of the file system is read-only for it.
That needs root. `tick` does everything; whoever waits calls it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from tests.e2e.network import Network

SOURCE = Path(__file__).parents[2] / "src"
MANIFESTS = Path(__file__).parents[2] / "configs/launch/kubernetes"
BACKOFF_S, MOST_BACKOFF_S = 10.0, 300.0  # of a container that ends again and again: the kubelet's own
Document = dict[str, Any]


def documents(folder: Path = MANIFESTS) -> Iterator[Document]:
    """Every object of the manifests, as `kubectl apply -k` sends them."""
    for name in kustomization(folder)["resources"]:
        yield from yaml.safe_load_all((folder / name).read_text())


def kustomization(folder: Path = MANIFESTS) -> Document:
    tree: Document = yaml.safe_load((folder / "kustomization.yaml").read_text())
    return tree


class Pod:
    """One container, started again as restartPolicy says."""

    def __init__(self, cluster: Cluster, owner: str, name: str, spec: Document, ip: str) -> None:
        self.owner, self.name, self.spec, self.ip = owner, name, spec, ip
        self.folder = cluster.folder / "pods" / name
        self.folder.mkdir(parents=True)
        self.log = cluster.folder / f"{name}.log"
        self.codes: list[int] = []  # with which its container has ended
        self.deleted_s: float | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self._cluster, self._began_s, self._pause_s, self._ended_s = cluster, 0.0, 0.0, 0.0
        (self.container,) = spec["containers"]
        self._volumes = {each["name"]: self._volume(each) for each in spec["volumes"]}
        self._mounts = {each["mountPath"]: self._volumes[each["name"]] for each in self.container["volumeMounts"]}

    @property
    def runs(self) -> bool:
        return self.process is not None

    @property
    def phase(self) -> str:
        """As the API has it."""
        if self.process is None and self.codes and self._over():
            return "Succeeded" if self.codes[-1] == 0 and self.deleted_s is None else "Failed"
        return "Running" if self.codes or self.process is not None else "Pending"

    def words(self, words: Sequence[str]) -> list[str]:
        """A command of the container, for this machine."""
        return [sys.executable, "-m", "shoal.cli.main", *(self._here(word) for word in words)]

    def call(self, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """As `kubectl exec` does; the first word is `shoal`."""
        return subprocess.run(self.words(words[1:]), cwd=self.folder, env=self._env(), capture_output=True, text=True)

    def ready(self) -> bool:
        probe = self.container["readinessProbe"]["tcpSocket"]["port"]
        port = next(each["containerPort"] for each in self.container["ports"] if each["name"] == probe)
        with contextlib.suppress(OSError), socket.create_connection((self.ip, port), timeout=1.0):
            return True
        return False

    def lives(self) -> bool:
        """What its liveness probe says."""
        return self.call(self.container["livenessProbe"]["exec"]["command"]).returncode == 0

    def tick(self) -> None:
        now = time.monotonic()
        if self.process is not None:
            if self.process.poll() is not None:
                self._ended(self.process.returncode, now)
            elif self.deleted_s is not None and now - self.deleted_s > self.spec["terminationGracePeriodSeconds"]:
                self.kill()
        elif not self._over() and now - self._ended_s >= self._pause_s and self._secrets() is not None:
            self._start()
            self._began_s = now

    def delete(self) -> None:
        """As at an eviction: SIGTERM, and SIGKILL when the grace period is over."""
        if self.deleted_s is None:
            self.deleted_s = time.monotonic()
            if self.process is not None:
                self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Everything in it at once, as when its node loses power."""
        if self.process is not None:
            self.process.kill()  # the kernel ends peers with their launcher

    # ------------------------------------------------------------------------------------------------- private

    def _over(self) -> bool:
        """Nothing is started in it any more."""
        done = bool(self.codes) and self.codes[-1] == 0 and self.spec["restartPolicy"] == "OnFailure"
        return done or self.deleted_s is not None

    def _ended(self, code: int, now: float) -> None:
        first = not self.codes
        self.codes.append(code)
        self.process, self._ended_s = None, now
        soon = now - self._began_s < 2 * MOST_BACKOFF_S
        self._pause_s = 0.0 if first or not soon else min(MOST_BACKOFF_S, max(BACKOFF_S, 2 * self._pause_s))

    def _start(self) -> None:
        words = self.words(
            [self._expanded(word) for word in (*self.container["args"], *self._cluster.more[self.owner])]
        )
        assert self.container["securityContext"]["readOnlyRootFilesystem"]
        writable = " ".join(f"mount --bind {path} {path};" for path in {self.folder, *self._mounts.values()})
        script = f'set -e; {writable} mount -o remount,bind,ro /; cd {self.folder}; exec "$@"'
        enter = self._cluster.network.words(self.ip)
        words = [*enter, "unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", *words]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                words,
                cwd=self.folder,
                env=self._env(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )

    def _volume(self, volume: Document) -> Path:
        if "persistentVolumeClaim" in volume:
            path = self._cluster.folder / "volumes" / volume["persistentVolumeClaim"]["claimName"]
        elif "configMap" in volume:
            return self._cluster.config_map(volume["configMap"]["name"])
        else:
            assert "emptyDir" in volume, volume
            path = self.folder / volume["name"]
        path.mkdir(parents=True, exist_ok=True)
        return path

    def _here(self, word: str) -> str:
        """With paths of this machine."""
        for mount, path in self._mounts.items():
            if word == mount or word.startswith(f"{mount}/"):
                return f"{path}{word[len(mount) :]}"
        return word

    def _secrets(self) -> dict[str, str] | None:
        """None while one of them is missing: the kubelet starts the container when it is there."""
        values = {}
        for each in self.container["env"]:
            if (reference := each.get("valueFrom", {}).get("secretKeyRef")) is not None:
                secret = self._cluster.secrets.get(reference["name"])
                if secret is None:
                    return None
                values[each["name"]] = secret[reference["key"]]
        return values

    def _env(self) -> dict[str, str]:
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", **(self._secrets() or {})}
        for each in self.container["env"]:
            if "value" in each:
                env[each["name"]] = self._here(each["value"])
            elif "fieldRef" in each["valueFrom"]:
                assert each["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
                env[each["name"]] = self.ip
        runs = self._mounts["/home/shoal/runs"]
        link = self.folder / "runs"  # of the working directory, /home/shoal
        if not link.exists():
            link.symlink_to(runs)
        return env

    def _expanded(self, word: str) -> str:
        for name, value in self._env().items():
            word = word.replace(f"$({name})", value)
        return word


class Cluster:
    """`more`: settings that the rehearsal adds to the command of an object's pods, by its name."""

    def __init__(self, folder: Path, more: dict[str, Sequence[str]]) -> None:
        self.folder, self.more = folder, more
        self.secrets: dict[str, dict[str, str]] = {}
        self.pods: list[Pod] = []  # that were ever started
        self.objects = {each["metadata"]["name"]: each for each in documents() if each["kind"] in ("Job", "Deployment")}
        self.replicas = {name: each["spec"].get("replicas", 1) for name, each in self.objects.items()}
        self._addresses = 0
        self.network = Network()
        self.service_ip = self.network.machine(0)  # the founder's: its pods have it one after the other

    def config_map(self, name: str) -> Path:
        path = self.folder / "config" / name
        if not path.exists():
            path.mkdir(parents=True)
            (generator,) = (each for each in kustomization()["configMapGenerator"] if each["name"] == name)
            for file in generator["files"]:
                shutil.copy(MANIFESTS / file, path)
        return path

    def of(self, owner: str) -> list[Pod]:
        """Its pods that are there."""
        return [pod for pod in self.pods if pod.owner == owner and (pod.runs or pod.deleted_s is None)]

    def tick(self) -> None:
        for name, each in self.objects.items():
            self._keep(name, each)
        for pod in self.pods:
            pod.tick()

    def wait(self, condition: Callable[[], object], wait_s: float = 300.0) -> float:
        """Seconds until it holds."""
        began_s = time.monotonic()
        while not condition():
            assert time.monotonic() - began_s < wait_s, self.output()[-6000:]
            self.tick()
            time.sleep(0.05)
        return time.monotonic() - began_s

    def output(self, owner: str = "") -> str:
        return "\n".join(
            f"--- {pod.name}\n{pod.log.read_text()}" for pod in self.pods if owner in pod.owner and pod.log.exists()
        )

    def end(self) -> None:
        for pod in self.pods:
            pod.kill()
            if pod.process is not None:
                pod.process.wait()
        self.network.end()

    def _keep(self, name: str, each: Document) -> None:
        """Start what is missing, delete what is too many."""
        pods = self.of(name)
        if each["kind"] == "Job":
            assert each["spec"]["podReplacementPolicy"] == "Failed"
            pods = [pod for pod in pods if pod.phase != "Failed"]  # also one that is being deleted, until it has ended
        else:
            pods = [pod for pod in pods if pod.deleted_s is None]
        for pod in pods[self.replicas[name] :]:
            pod.delete()
        for _ in range(self.replicas[name] - len(pods)):
            self._addresses += 1
            ip = self.network.machine(0 if each["kind"] == "Job" else self._addresses)
            self.pods.append(Pod(self, name, f"{name}-{len(self.pods)}", each["spec"]["template"]["spec"], ip))

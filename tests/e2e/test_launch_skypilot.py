"""The SkyPilot recipe as processes of this machine: each task's `run` in a home of its own, `setup` skipped.

A job's machine is taken without and with a cloud's notice and the job recovered, the founder's machine is restarted, and every
sample counts once.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.e2e.launching import processes
from tests.e2e.network import Network
from tests.e2e.test_launch_kubernetes import SETTINGS

from shoal.launcher.files import rundir

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/launch/skypilot.md"
JOBS = 3
TASKS = {
    name: yaml.safe_load((ROOT / f"configs/launch/skypilot/{name}.yaml").read_text()) for name in ("founder", "peer")
}


# What a machine of AWS asks, version 2, in that machine alone. The file that is named by the argument is the notice.
METADATA = """
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Metadata(BaseHTTPRequestHandler):
    def do_PUT(self):
        self.answer(200, b"token")

    def do_GET(self):
        if self.headers["X-aws-ec2-metadata-token"] != "token":
            return self.answer(401, b"")
        self.answer(200 if os.path.exists(sys.argv[1]) else 404, b'{"action": "terminate"}')

    def log_message(self, *_):
        pass

    def answer(self, code, body):
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

server = HTTPServer(("169.254.169.254", 80), Metadata)
print("listens", flush=True)
server.serve_forever()
"""


class Machine:
    """A home with Shoal as `setup` leaves it, and what runs the task there."""

    def __init__(self, home: Path, network: Network, number: int) -> None:
        self.home, self._network, self.ip = home, network, network.machine(number)
        self.notice = home / "notice"  # when it is there, the cloud has given one
        shoal = home / "shoal/bin/shoal"
        shoal.parent.mkdir(parents=True)
        shoal.write_text(f'#!/bin/sh\nexec {sys.executable} -m shoal.cli.main "$@"\n')
        shoal.chmod(0o755)
        (home / "sky_workdir").symlink_to(ROOT)

    def run(self, script: str, cloud: str, **environment: str) -> subprocess.Popen[bytes]:
        if cloud == "AWS":
            self._serve_metadata()
        info = json.dumps({"cluster_name": self.home.name, "cloud": cloud})
        with open(self.home / "log", "ab") as log:
            return subprocess.Popen(
                [*self._network.words(self.ip), "bash", "-c", script],
                env=self.environment(SKYPILOT_CLUSTER_INFO=info, **environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def environment(self, **more: str) -> dict[str, str]:
        return {
            "HOME": str(self.home),
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT / "src"),
            "OMP_NUM_THREADS": "1",
            **more,
        }

    def _serve_metadata(self) -> None:
        """At the address that only this machine reaches; it listens before the task begins."""
        self._network.add(self.ip, "169.254.169.254")
        words = [*self._network.words(self.ip), sys.executable, "-c", METADATA, str(self.notice)]
        server = subprocess.Popen(words, env=self.environment(), stdout=subprocess.PIPE)
        assert server.stdout is not None and server.stdout.readline() == b"listens\n"

    def take(self) -> None:
        """The cloud takes it: everything ends at once."""
        for pid, _ in processes():
            try:
                if f"HOME={self.home}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    os.kill(pid, signal.SIGKILL)
            except OSError:
                continue  # it has ended meanwhile


class Cloud:
    """The founder's cluster, and a managed job for each peer, recovered as `job_recovery` says."""

    def __init__(self, folder: Path, network: Network) -> None:
        self.folder, self.network, self.machines = folder, network, list[Machine]()
        self.jobs: list[subprocess.Popen[bytes]] = []
        self.where: list[Machine] = []  # each job's machine
        self.recovered, self.invite = 0, ""
        self.founder_machine = self.machine()
        self.runs = self.founder_machine.home / "runs/launched"
        self.found("run.steps=100000")

    def machine(self) -> Machine:
        number = len(self.machines) + 1
        self.machines.append(Machine(self.folder / f"m{number}", self.network, number))
        return self.machines[-1]

    def found(self, *settings: str) -> None:
        """`sky launch`, again too."""
        script = f"{TASKS['founder']['run'].rstrip()} {shlex.join((*SETTINGS, 'checkpoint.every=10', *settings))}"
        self.founder = self.founder_machine.run(script, "GCP")

    def submit(self) -> None:
        for number in range(len(self.jobs), JOBS):
            self.where.append(self.machine())
            self.jobs.append(self._started(number))

    def _started(self, number: int) -> subprocess.Popen[bytes]:
        cloud = "AWS" if number == 1 else "Lambda"  # one with a metadata service
        return self.where[number].run(TASKS["peer"]["run"], cloud, SHOAL_INVITE=self.invite)

    def tick(self) -> None:
        recovery = TASKS["peer"]["resources"]["job_recovery"]
        for number, job in enumerate(self.jobs):
            if job.poll() in (None, 0):
                continue
            assert job.returncode in (-signal.SIGKILL, *recovery["recover_on_exit_codes"]), self.output()
            self.where[number] = self.machine()
            self.jobs[number] = self._started(number)
            self.recovered += 1

    def wait(self, condition: Callable[[], object], *, recover: bool = True) -> float:
        """Seconds until it holds."""
        began_s = time.monotonic()
        while not condition():
            assert time.monotonic() - began_s < 300, self.output()[-6000:]
            if recover:
                self.tick()
            time.sleep(0.05)
        return time.monotonic() - began_s

    @property
    def steps(self) -> int:
        path = self.runs / "commits.jsonl"
        return len(path.read_bytes().splitlines()) if path.exists() else 0

    def members(self) -> set[str]:
        try:
            peers = rundir.locals_of(self.runs)
        except (ValueError, OSError):
            return set()
        return {seat.name for seat in peers.members} if rundir.running(self.runs) else set()

    def trains(self, *, without: set[str] = frozenset()) -> float:  # type: ignore[assignment]
        """Seconds until there are as many members as before, others than `without`, and they commit."""
        began_s = time.monotonic()
        self.wait(lambda: len(self.members()) == JOBS + 1 and self.members() != without)
        seconds, seen = time.monotonic() - began_s, self.steps
        self.wait(lambda: self.steps >= seen + 3)
        return seconds

    def output(self) -> str:
        return "\n".join(f"--- {path}\n{path.read_text()}" for path in sorted(self.folder.glob("m*/log")))

    def end(self) -> None:
        for machine in self.machines:
            machine.take()

    def summary(self) -> dict[str, Any]:
        account: dict[str, Any] = json.loads((self.runs / "summary.json").read_bytes())
        return account


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Cloud]:
    network = Network()
    cloud = Cloud(tmp_path, network)
    try:
        yield cloud
    finally:
        cloud.end()
        network.end()


def invited(cloud: Cloud) -> str:
    """The invite, by the page's command."""
    line = next(line for line in PAGE.read_text().splitlines() if "shoal invite" in line)
    command = line.partition("shoal-founder ")[2].replace("$via", f"{cloud.founder_machine.ip}:7701")
    machine = cloud.founder_machine
    subprocess.run(["sh", "-ec", command], cwd=machine.home, env=machine.environment(), check=True)
    return (machine.home / "guests.invite").read_text()


def test_jobs_are_taken_and_recovered_and_every_sample_counts_once(cloud: Cloud) -> None:
    print("load", os.getloadavg())
    cloud.wait(
        lambda: (cloud.runs / "bootstrap.json").exists() and json.loads((cloud.runs / "bootstrap.json").read_bytes())
    )
    cloud.invite = invited(cloud)
    cloud.submit()
    print(f"whole after {cloud.trains():.1f} s")

    before = cloud.members()
    cloud.where[0].take()
    print(f"the peer of a machine that is gone is replaced after {cloud.trains(without=before):.1f} s")
    before, drained = cloud.members(), cloud.where[1]
    drained.notice.touch()
    seconds = cloud.wait(lambda: cloud.recovered == 2)
    print(
        f"at a notice a peer has left after {seconds:.1f} s, and is replaced after {cloud.trains(without=before):.1f} s more"
    )
    said = (drained.home / "log").read_text()
    assert "this machine is going to be taken away" in said, said
    assert "left: its launcher asks it to" in "".join(path.read_text() for path in drained.home.glob("runs/*/*.log"))

    seen = cloud.steps
    cloud.founder_machine.take()
    began_s = time.monotonic()
    cloud.found("run.steps=100000")
    cloud.trains()
    print(f"a founder whose machine is restarted trains again after {time.monotonic() - began_s:.1f} s")
    assert cloud.steps > seen and "this machine returns to it" in (cloud.founder_machine.home / "log").read_text()
    before = cloud.members()
    cloud.where[2].take()  # another comes, by the same invite
    cloud.trains(without=before)

    for job in cloud.jobs:  # `sky jobs cancel`, then `sky cancel`
        os.killpg(job.pid, signal.SIGTERM)
    cloud.wait(lambda: None not in [job.poll() for job in cloud.jobs], recover=False)
    os.killpg(cloud.founder.pid, signal.SIGTERM)
    cloud.wait(lambda: cloud.founder.poll() is not None, recover=False)
    account = cloud.summary()
    assert account["saved"] and (account["lost"], account["counted_twice"]) == (0, 0), account
    (cloud.runs / "bootstrap.json").unlink()
    cloud.found(f"run.steps={account['saved'] + 20}")
    cloud.wait((cloud.runs / "bootstrap.json").exists, recover=False)
    cloud.invite = invited(cloud)  # it holds the run's settings
    cloud.tick()
    cloud.wait(lambda: cloud.founder.poll() is not None)
    cloud.wait(lambda: [job.poll() for job in cloud.jobs] == [0] * JOBS)
    print((cloud.founder_machine.home / "log").read_text()[-1500:])
    assert cloud.founder.returncode == 0
    account = cloud.summary()
    assert account["balanced"] and (account["lost"], account["counted_twice"]) == (0, 0), account
    assert account["issued"] == account["committed"] == 4 * account["steps"]
    assert not re.search(r"shoal1\w{50}", " ".join(words for _, words in processes()))

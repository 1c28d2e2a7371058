"""The Kubernetes recipe as processes of this machine (kubelet.py): a peer's pod is killed, one is drained, the founder's pod is killed and
drained and comes back to the same run, and every sample counts once."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.e2e.kubelet import Cluster, Pod

from shoal.launcher.files import rundir

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PAGE = Path(__file__).parents[2] / "docs/launch/kubernetes.md"
FOUNDER, PEERS = "shoal-founder", "shoal-peers"
REPLICAS = 4  # fewer than the recipe's: two cores
# No model: pods and the network are what this is about.
SETTINGS = (
    "device.executor=emulated",
    "device.emulated_s=0.05",
    "device.emulated_values=64",
    "train.batch=8",
    "train.microbatch=2",
)


class Recipe(Cluster):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, {FOUNDER: (*SETTINGS, "checkpoint.every=10", "run.steps=100000"), PEERS: ()})
        self.runs = folder / "volumes/shoal-runs/launched"
        self.replicas[PEERS] = REPLICAS

    @property
    def founder(self) -> Pod:
        (pod,) = self.of(FOUNDER)
        return pod

    @property
    def steps(self) -> int:
        path = self.runs / "commits.jsonl"
        return len(path.read_bytes().splitlines()) if path.exists() else 0

    def members(self) -> set[str]:
        """Names of the run's members, as the founder knows them; none while it is away."""
        try:
            peers = rundir.locals_of(self.runs)
        except (ValueError, OSError):
            return set()
        if not self.founder.runs or not rundir.running(self.runs):
            return set()
        return {seat.name for seat in peers.members}

    def whole(self) -> bool:
        return len(self.members()) == REPLICAS + 1

    def trains(self, steps: int = 3) -> float:
        """Until everybody is a member and so many steps more are committed; seconds until everybody was."""
        seconds = self.wait(self.whole)
        seen = self.steps
        self.wait(lambda: self.steps >= seen + steps and self.whole())
        return seconds

    def invite(self) -> None:
        """By the page's command."""
        self.wait(lambda: self.of(FOUNDER) and self.founder.ready() and rundir.running(self.runs))
        assert not any(pod.runs for pod in self.of(PEERS)), "there is no invite yet"
        invited = self.founder.call(invite_command(self.service_ip))
        assert invited.returncode == 0, invited.stderr
        self.secrets["shoal-invite"] = {"invite": invited.stdout}

    def summary(self) -> dict[str, Any]:
        account: dict[str, Any] = msgspec.json.decode((self.runs / "summary.json").read_bytes())
        return account


@pytest.fixture
def recipe(tmp_path: Path) -> Iterator[Recipe]:
    cluster = Recipe(tmp_path)
    yield cluster
    cluster.end()


def invite_command(service_ip: str) -> list[str]:
    """The words of the page that make the Secret, from `shoal` on."""
    line = next(line for line in PAGE.read_text().splitlines() if "shoal invite" in line)
    words = shlex.split(line.partition("-- ")[2].partition("|")[0].rstrip(" \\"))
    return [word.replace(FOUNDER, service_ip) for word in words]  # there is no DNS here


def test_pods_are_killed_drained_and_moved_and_every_sample_counts_once(recipe: Recipe) -> None:
    print("load", os.getloadavg())
    recipe.invite()
    print(f"whole after {recipe.trains():.1f} s")
    for pod in (recipe.founder, *recipe.of(PEERS)):
        assert pod.lives() and pod.ready(), pod.name

    peers, before = recipe.of(PEERS), recipe.members()
    peers[0].kill()  # its node loses power, or the kernel is out of memory
    seconds = recipe.wait(lambda: recipe.whole() and recipe.members() != before)
    recipe.trains()
    print(f"a killed peer is replaced after {seconds:.1f} s")
    assert peers[0].codes == [-9] and peers[0].runs, "the kubelet starts it again"

    before, began_s = recipe.members(), time.monotonic()
    peers[1].delete()
    seconds = recipe.wait(lambda: not peers[1].runs)
    recipe.wait(lambda: recipe.whole() and recipe.members() != before)
    print(f"a drained peer has left after {seconds:.1f} s, and is replaced after {time.monotonic() - began_s:.1f} s")
    recipe.trains()
    assert peers[1].codes == [130] and re.search(r"left: its launcher asks it to", peers[1].log.read_text())

    for founders in (1, 2):
        seen, pod = recipe.steps, recipe.founder
        if founders == 1:
            pod.kill()
        else:
            pod.delete()
        began_s = time.monotonic()
        recipe.wait(lambda pod=pod: not pod.runs)
        recipe.trains()
        print(
            f"a founder that is {'killed' if founders == 1 else 'drained'} trains again after {time.monotonic() - began_s:.1f} s"
        )
        assert "this machine returns to it" in recipe.output(FOUNDER)
        assert recipe.output(FOUNDER).count("this machine returns to it") == founders
        assert recipe.steps > seen
    peers[2].kill()  # by the same invite
    before = recipe.members()
    recipe.wait(lambda: recipe.whole() and recipe.members() != before)
    recipe.trains()

    # The run ends: `kubectl scale --replicas=0`, the Job is deleted, and both are applied again with fewer steps to go.
    recipe.replicas[PEERS] = 0
    recipe.wait(lambda: len(recipe.of(PEERS)) <= 1)
    for pod in recipe.of(PEERS):  # the last replica of its stage waits for another, two minutes
        pod.kill()
    founder, recipe.replicas[FOUNDER] = recipe.founder, 0
    recipe.wait(lambda: not founder.runs)
    account = recipe.summary()
    assert account["saved"] and (account["lost"], account["counted_twice"]) == (0, 0), account
    recipe.more[FOUNDER] = (*recipe.more[FOUNDER], f"run.steps={account['saved'] + 20}")
    recipe.secrets.clear()  # an invite holds the run's settings
    recipe.replicas = {FOUNDER: 1, PEERS: REPLICAS}
    recipe.invite()
    recipe.wait(lambda: recipe.of(FOUNDER) and recipe.founder.phase == "Succeeded")
    recipe.wait(lambda: all(0 in pod.codes for pod in recipe.of(PEERS)))
    print(recipe.founder.log.read_text()[-1500:])
    account = recipe.summary()
    assert account["balanced"] and (account["lost"], account["counted_twice"]) == (0, 0), account
    assert account["issued"] == account["committed"] == 4 * account["steps"]

"""Every fault that a process can show, one after the other on one run of real peers, as `shoal chaos` does them.

What must hold after each: training goes on, everybody who is to be there is a member again, and every step that stands has every sample
once at every stage. In the end: the losses are bit for bit those of one process that nobody disturbs. A death in the middle of
something is one whose trace ends with that task begun and not done.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests import reference
from tests.e2e.test_run import LONG_S, SOURCE, wait_for

from shoal import config as configuration
from shoal import trace
from shoal.core.messages import Do, Done
from shoal.launcher.chaos.injection_points import INJECTION_POINTS
from shoal.launcher.files import rundir
from shoal.runtime.data.dataset import open_dataset
from shoal.runtime.records.account import CommittedStep, surviving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PEERS, STAGES, MICROBATCHES = 7, 3, 4  # one stage has three replicas: two of it may die one after the other

# Wide blocks and short sequences: 5 million parameters a stage and little compute, alike for all stages. Averaging, the optimizer, a
# checkpoint and a download take long enough to die in the middle of them.
CONFIG = f"""
[run]
name = "big"
peers = {PEERS}
stages = {STAGES}
steps = 1000000
min_request_timeout_s = 20.0
[model]
hidden_size = 192
layers = 3
heads = 4
kv_heads = 2
intermediate_size = 8192
[data]
source = "text"
path = "a.txt"
sequence = 16
[train]
batch = 8
microbatch = 2
learning_rate = 1e-3
schedule = "constant"
warmup = 3
[network]
discovery = "gossip"
fault_injection = true
[checkpoint]
every = 4
"""


class Swarm:
    """A run and the means to disturb it."""

    def __init__(self, directory: Path, config: str = CONFIG) -> None:
        self.directory = directory
        self.run_directory = directory / "runs/big"
        (directory / "big.toml").write_text(config)
        (directory / "a.txt").write_bytes(bytes(32 + (i * i) % 90 for i in range(20000)))
        self.run = self.start("run", "big.toml")

    def start(self, *words: str) -> subprocess.Popen[str]:
        with open(self.directory / f"{words[0]}.log", "a") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "shoal.cli.main", *words],
                cwd=self.directory,
                env={**os.environ, "PYTHONPATH": str(SOURCE)},
                stdout=subprocess.PIPE if words[0] == "chaos" else log,
                stderr=subprocess.STDOUT,
                text=True,
            )

    @property
    def locals(self) -> rundir.PeersFile:
        return rundir.locals_of(self.run_directory)

    def commits(self) -> list[CommittedStep]:
        path = self.run_directory / "commits.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [msgspec.json.decode(line, type=CommittedStep) for line in lines]

    def going(self) -> bool:
        assert self.run.poll() is None, (self.directory / "run.log").read_text()[-5000:]
        return True

    def trained(self, steps: int) -> None:
        """Wait until so many more commits are heard of."""
        wanted = len(self.commits()) + steps
        wait_for(lambda: self.going() and len(self.commits()) >= wanted)

    def whole(self) -> None:
        """Wait until as many peers as the run was begun with are members and have trained together."""
        wait_for(lambda: self.going() and len([seat for seat in self.locals.members if seat.label]) == PEERS)
        self.trained(3)

    def stages(self) -> Counter[int]:
        """Replicas of each."""
        return Counter(seat.stage for seat in self.locals.members)

    def stages_with(self, replicas: int) -> list[int]:
        """Those that have so many or more: two stages with two, or one with three; peers move until it is so."""
        wanted = 2 if replicas == 2 else 1

        def serving() -> list[int]:
            return sorted(stage for stage, count in self.stages().items() if count >= replicas)

        wait_for(lambda: self.going() and len(serving()) >= wanted)
        return serving()

    def chaos(self, *acts: str, options: tuple[str, ...] = ()) -> str:
        """Do these and wait for the end of the last; what was said."""
        (self.directory / "acts.toml").write_text("".join(f"[[act]]\n{act}\n" for act in acts))
        chaos = self.start("chaos", "runs/big", "--schedule", "acts.toml", *options)
        said, _ = chaos.communicate(timeout=LONG_S)
        assert chaos.returncode == 0, said
        assert "is left out" not in said, said
        return said

    def notes(self) -> str:
        """Every event so far, as the launcher printed it."""
        return (self.directory / "run.log").read_text()

    def unfinished(self, label: str, moment: str) -> bool:
        """Does that peer's trace end in the middle of such a task?"""
        begun: set[str] = set()
        for item in trace.read(self.run_directory / f"traces/{label}.jsonl"):
            if isinstance(item, trace.TraceRecord):
                if isinstance(item.event, Done):
                    begun.discard(item.event.id)
                tasks = [command.task for command in item.commands if isinstance(command, Do)]
                begun |= {task.id for task in tasks if isinstance(task, INJECTION_POINTS[moment].task)}
        return bool(begun)

    def assert_every_sample_once(self) -> None:
        for step in surviving(self.commits()):
            assert len(step.commit.groups) == STAGES
            for group in step.commit.groups:
                held = sorted(index for share in group for index in share.indices)
                assert held == list(range(MICROBATCHES)), f"step {step.commit.step} of epoch {step.epoch}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    swarm = Swarm(tmp_path_factory.mktemp("faults"))
    try:
        yield swarm
    finally:
        if swarm.run.poll() is None:
            swarm.run.kill()
            swarm.run.wait()


@pytest.fixture
def swarm(run: Swarm) -> Iterator[Swarm]:
    """The run, whole before a test and whole after it."""
    wait_for(lambda: run.going() and (run.run_directory / "peers.json").exists() and run.locals.started)
    run.whole()
    yield run
    run.whole()
    run.assert_every_sample_once()


def killed(said: str) -> list[str]:
    return re.findall(r"  kill (p\d+)", said)


# ------------------------------------------------------------------------------------------------------ deaths at a moment


@pytest.mark.parametrize("moment", ["backward", "averaging", "optimizer", "checkpoint", "publishing"])
def test_a_peer_may_die_in_the_middle_of(swarm: Swarm, moment: str) -> None:
    for _ in range(5):  # a strike that came late is no death in the middle: then once more
        said = swarm.chaos(f'kind = "kill"\non = "{moment}"')
        (label,) = killed(said)
        assert INJECTION_POINTS[moment].words in said
        if swarm.unfinished(label, moment):
            return
        swarm.whole()
    pytest.fail(f"no peer was caught in the middle of {moment}")


def test_a_joiner_may_die_in_the_middle_of_its_download(swarm: Swarm) -> None:
    for _ in range(5):
        said = swarm.chaos('kind = "kill"', 'kind = "kill"\non = "download"')
        first, joiner = killed(said)
        assert first != joiner
        if f"{joiner} serves stage" not in swarm.notes() and f"{joiner}: holds stage" not in swarm.notes():
            return
        swarm.whole()
    pytest.fail("no joiner was caught in the middle of its download")


def test_a_peer_may_die_while_a_joiner_downloads_from_it(swarm: Swarm) -> None:
    (wide,) = swarm.stages_with(3)[:1]
    said = swarm.chaos(f'kind = "kill"\nwho = "stage {wide}"', 'kind = "kill"\non = "upload"')
    assert len(set(killed(said))) == 2


def test_the_leader_may_die_and_in_the_middle_of_averaging_too(swarm: Swarm) -> None:
    leader = next(peer.label for peer in swarm.locals.peers if peer.leads)
    assert killed(swarm.chaos('kind = "kill"\nwho = "leader"')) == [leader]
    swarm.whole()
    leader = next(peer.label for peer in swarm.locals.peers if peer.leads)
    assert killed(swarm.chaos('kind = "kill"\nwho = "leader"\non = "averaging"')) == [leader]


def test_two_replicas_of_different_stages_may_die_at_once(swarm: Swarm) -> None:
    one, other = swarm.stages_with(2)[:2]
    said = swarm.chaos(f'kind = "kill"\nwho = "stage {one}"', f'kind = "kill"\nwho = "stage {other}"')
    assert len(set(killed(said))) == 2


def test_every_replica_of_a_stage_may_die_at_once(swarm: Swarm) -> None:
    two = min(swarm.stages_with(2), key=lambda stage: swarm.stages()[stage])
    said = swarm.chaos(f'kind = "kill"\nwho = "stage {two}"\nevery = true')
    assert len(set(killed(said))) == 2


# -------------------------------------------------------------------------------------------------------- stops and links


def test_a_peer_may_stand_still_and_go_on(swarm: Swarm) -> None:
    said = swarm.chaos('kind = "stop"\nfor = "9 s"')
    (label,) = re.findall(r"  stop (p\d+)", said)
    assert f"continue {label}" in said
    wait_for(lambda: swarm.going() and re.search(rf"removed .*\b{label} (silent|cannot be reached)", swarm.notes()))


@pytest.mark.parametrize("direction", ["both", "out", "in"])
def test_a_peer_may_be_cut_off(swarm: Swarm, direction: str) -> None:
    """In whichever direction: it is put out, comes back by itself as the process it was, and the others go on meanwhile."""
    said = swarm.chaos(f'kind = "cut"\ndirection = "{direction}"\nfor = "15 s"')
    (label,) = re.findall(r"  cut (p\d+)", said)
    assert f"links of {label} are as before" in said
    wait_for(lambda: swarm.going() and re.search(rf"removed .*\b{label} silent", swarm.notes()))
    wait_for(lambda: swarm.going() and label in {seat.label for seat in swarm.locals.members})


def test_the_leader_may_be_cut_off_from_one_peer_only(swarm: Swarm) -> None:
    other = next(peer.label for peer in swarm.locals.peers if not peer.leads)
    said = swarm.chaos(f'kind = "cut"\nwho = "leader"\nfrom = "{other}"\nfor = "12 s"')
    assert f"from {other}" in said


def test_a_whole_stage_may_be_cut_off_and_its_side_waits_says_so_and_comes_back(swarm: Swarm) -> None:
    """Its peers still reach one another. Being no majority they commit nothing; the others go back to the newest checkpoint."""
    two = min(swarm.stages_with(2), key=lambda stage: swarm.stages()[stage])
    before = swarm.notes().count("nothing is committed until a majority")
    said = swarm.chaos(f'kind = "cut"\nwho = "stage {two}"\nevery = true\nfor = "25 s"')
    (labels,) = re.findall(r"  cut ([p0-9, ]+) from all others", said)
    assert len(labels.split(", ")) >= 2
    wait_for(lambda: swarm.going() and swarm.notes().count("nothing is committed until a majority") > before)
    wait_for(lambda: swarm.going() and set(labels.split(", ")) <= {seat.label for seat in swarm.locals.members})


def test_a_peer_may_be_ten_times_slower(swarm: Swarm) -> None:
    began = len(swarm.commits())
    said = swarm.chaos('kind = "slow"\nby = 10\nfor = "20 s"')
    assert re.search(r"slow p\d+ .*10x for 20.0 s", said)
    swarm.trained(1)
    assert len(swarm.commits()) > began


def test_links_may_be_ten_times_slower(swarm: Swarm) -> None:
    said = swarm.chaos(
        'kind = "lag"\nwho = "stage 1"\nevery = true\ndelay = "300 ms"\nbandwidth = "2 MB/s"\nfor = "20 s"'
    )
    assert "by 300 ms and 1.9 MiB/s for 20.0 s" in said


# -------------------------------------------------------------------------------------------------------------- the end


def test_after_all_of_that_every_loss_is_that_of_one_process(run: Swarm) -> None:
    wait_for(lambda: run.going() and (run.run_directory / "peers.json").exists() and run.locals.started)
    run.whole()
    run.run.send_signal(signal.SIGINT)
    assert run.run.wait(LONG_S) == 130
    account = json.loads((run.run_directory / "summary.json").read_bytes())
    assert (account["lost"], account["counted_twice"]) == (0, 0)
    config = configuration.load(run.directory / "big.toml", [f"data.path={run.directory / 'a.txt'}"])
    steps = [step.commit for step in surviving(run.commits())]
    assert [commit.step for commit in steps] == list(range(len(steps)))
    _, alone = reference.follow(config, open_dataset(config), map(reference.as_recorded, steps))
    assert [one.loss for one in alone] == [commit.loss for commit in steps] == account["losses"]
    assert [one.norm for one in alone] == [commit.norm for commit in steps]

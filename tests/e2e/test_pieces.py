"""Real processes that hold the whole model and average it in pieces (run.averaging_memory_bytes); one is killed between two.

What must hold: the losses are bit for bit those of the same run in one piece until the death, and of one process that adds in the
recorded orders (tests/reference.py) to the end; every sample is counted once; what a peer keeps of tensors stays below the gradient.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import reference
from tests.e2e.test_identity import Left, assert_same_bits
from tests.e2e.test_run import SOURCE, wait_for

from shoal import config as configuration
from shoal import trace
from shoal.core.messages import Do, Export, Gather
from shoal.launcher.files import rundir
from shoal.runtime.data.dataset import open_dataset

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PEERS, STEPS, MICROBATCHES = 4, 5, 8
PIECES_BYTES = 9000  # three copies of a piece of 750 values
DIES = 2  # the step in whose averaging the peer dies

# The modelled delay makes a piece take a tenth of a second: long enough to look where a peer is, and stop it there.
CONFIG = f"""
[run]
name = "whole"
peers = {PEERS}
stages = 1
steps = {STEPS}
min_request_timeout_s = 20.0
[model]
hidden_size = 16
layers = 2
heads = 2
kv_heads = 1
intermediate_size = 24
tied_embeddings = true
[data]
source = "text"
path = "a.txt"
sequence = 16
[train]
batch = 16
microbatch = 2
learning_rate = 1e-3
warmup = 0
[network]
discovery = "gossip"
delay_s = 0.03
fault_injection = true # traces are written at once
[checkpoint]
every = 0
"""


def gathers(path: Path, peer: str = "") -> list[Gather]:
    """The pieces' sums that a peer, or all, came to hold, in order, from a trace."""
    records = (item for item in trace.read(path) if isinstance(item, trace.TraceRecord) and peer in ("", item.peer))
    tasks = (command.task for record in records for command in record.commands if isinstance(command, Do))
    return [task for task in tasks if isinstance(task, Gather)]


def between_pieces(path: Path, peer: str, step: int) -> bool:
    """Whether a peer has gathered some pieces of that step's sum, as the last that it did, and not yet the last of them."""
    gathered = gathers(path, peer)
    return bool(gathered) and gathered[-1].step == step and not gathered[-1].last


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_directory = tmp_path_factory.mktemp("pieces")
    (run_directory / "whole.toml").write_text(CONFIG)
    (run_directory / "a.txt").write_bytes(bytes(32 + (i * i) % 90 for i in range(5000)))
    return run_directory


class Run:
    """`shoal run` in the background, under a name of its own."""

    def __init__(self, directory: Path, name: str, *words: str, plan: Path | None = None) -> None:
        self.run_directory = directory / "runs" / name
        self._words = [f"run.name={name}", f"data.path={directory / 'a.txt'}", *words]
        self._toml, self._log = directory / "whole.toml", directory / f"{name}.log"
        planned = ["--plan", str(plan)] if plan is not None else []
        with open(self._log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "shoal.cli.main", "run", str(self._toml), *self._words, *planned],
                cwd=directory,
                env={**os.environ, "PYTHONPATH": str(SOURCE)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def going(self) -> bool:
        assert self.process.poll() is None, self._log.read_text()[-5000:]
        return True

    def left(self) -> Left:
        assert self.process.wait(300) == 0, self._log.read_text()[-5000:]
        config = configuration.load(self._toml, self._words)
        summary = json.loads((self.run_directory / "summary.json").read_bytes())
        return Left(directory=self.run_directory, config=config, dataset=open_dataset(config), summary=summary)

    def kill_between_pieces(self, step: int) -> str:
        """SIGKILL to a peer that stands still in the middle of that step's averaging. Its name."""
        wait_for(
            lambda: (
                self.going()
                and (self.run_directory / "peers.json").exists()
                and rundir.locals_of(self.run_directory).started
            )
        )
        victim = rundir.locals_of(self.run_directory).peers[-1]
        path = self.run_directory / f"traces/{victim.label}.jsonl"
        wait_for(lambda: self.going() and path.exists() and between_pieces(path, victim.peer, step))
        os.killpg(victim.process.pid, signal.SIGSTOP)
        assert between_pieces(path, victim.peer, step), "it was not stopped in time"
        os.killpg(victim.process.pid, signal.SIGKILL)
        return victim.peer


@pytest.fixture(scope="module")
def runs(directory: Path) -> Iterator[tuple[Left, Left, str]]:
    """In one piece; in pieces, with a death; who died."""
    started = []
    try:
        started.append(one_piece := Run(directory, "whole"))
        whole = one_piece.left()
        started.append(pieces := Run(directory, "pieces", f"run.averaging_memory_bytes={PIECES_BYTES}"))
        died = pieces.kill_between_pieces(DIES)
        yield whole, pieces.left(), died
    finally:
        for run in started:
            if run.process.poll() is None:
                run.process.kill()
                run.process.wait()


def test_the_whole_model_goes_in_pieces_and_a_peer_died_between_two(runs: tuple[Left, Left, str]) -> None:
    whole, pieces, died = runs
    assert all(task.last for task in gathers(whole.trace))
    of_pieces = gathers(pieces.trace)
    assert sum(not task.last for task in of_pieces) >= 5 * sum(task.last for task in of_pieces) > 0
    assert between_pieces(pieces.trace, died, DIES)


def test_losses_are_those_in_one_piece_until_the_death_and_those_of_one_process_to_the_end(
    runs: tuple[Left, Left, str],
) -> None:
    whole, pieces, _ = runs
    assert len(whole.summary["losses"]) == len(pieces.summary["losses"]) == STEPS
    # Step DIES was computed before its averaging, with the same parameters: its loss is the same too.
    assert pieces.summary["losses"][: DIES + 1] == whole.summary["losses"][: DIES + 1]
    assert pieces.summary["losses"] == pytest.approx(whole.summary["losses"], rel=1e-4)
    assert_same_bits(whole, reference.commits(whole.directory))
    assert_same_bits(pieces, reference.commits(pieces.directory))


def test_every_sample_is_counted_once_also_those_of_the_dead(runs: tuple[Left, Left, str]) -> None:
    for left in runs[:2]:
        for commit in reference.commits(left.directory):
            (group,) = commit.groups
            assert sorted(itertools.chain(*(share.indices for share in group))) == list(range(MICROBATCHES))
        said = left.summary
        assert said["balanced"], said["reason"]
        assert (said["issued"], said["committed"]) == (STEPS * MICROBATCHES, STEPS * MICROBATCHES)
        assert (said["lost"], said["counted_twice"]) == (0, 0)
    of_pieces, died = reference.commits(runs[1].directory), runs[2]
    assert [len(commit.groups[0]) for commit in of_pieces[: DIES + 1]] == [PEERS] * DIES + [PEERS - 1]
    assert all(len(commit.groups[0]) in (PEERS - 1, PEERS) for commit in of_pieces[DIES + 1 :])  # with its successor
    assert died not in {share.peer for commit in of_pieces[DIES:] for share in commit.groups[0]}


def test_what_a_peer_keeps_of_tensors_is_a_piece_and_not_the_gradient(runs: tuple[Left, Left, str]) -> None:
    whole, pieces, _ = runs
    gradient_bytes = 4 * sum(
        value.numel() for value in reference.OneProcess(whole.config, whole.dataset).parameters.values()
    )
    tokens_bytes = 8 * whole.config.train.batch * (whole.config.data.sequence + 1)  # of a step: more than a peer holds

    def most(left: Left) -> int:
        """Of peers that neither gave anybody their state nor joined and took one."""
        first = {share.peer for share in reference.commits(left.directory)[0].groups[0]}
        items = list(trace.read(left.trace))
        events = [item for item in items if isinstance(item, trace.TraceRecord)]
        donors = {
            one.peer for one in events for do in one.commands if isinstance(do, Do) and isinstance(do.task, Export)
        }
        carried = [item for item in items if isinstance(item, trace.TrafficRecord) and item.peer in first - donors]
        return max(item.kept.memory for item in carried)

    assert PIECES_BYTES / 4 < most(pieces) <= PIECES_BYTES + tokens_bytes < gradient_bytes < most(whole)

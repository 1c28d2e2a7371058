"""A guest without the model takes part in tuning it: its stage's frozen weights come from the run's peers, in chunks, once."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
from tests import reference
from tests.e2e.test_run import LONG_S, Start, end, start, steps_done, summary, wait_for
from tests.e2e.test_serve import kill

from shoal import config as configuration
from shoal.config import Config
from shoal.launcher.files import rundir
from shoal.model import stages
from shoal.runtime.frozen import LISTED

assert start  # a fixture
pytestmark = [pytest.mark.slow, pytest.mark.timeout(LONG_S)]

SHAPE = ("model.hidden_size=256", "model.intermediate_size=1024", "model.layers=4")
STEPS = 5000  # it is interrupted when all was seen
RUN = (
    *("tune.method=lora", "tune.rank=1", "tune.lend=true", "run.stages=1", "run.peers=3"),
    *("network.discovery=gossip", f"run.steps={STEPS}"),
)
SLOW = "network.up_Bps=1500000"  # so that 18 MB take some seconds
GUEST = ("data.path=a.txt", "run.dir=guest")


@pytest.fixture
def base(start: Start, tmp_path: Path) -> Path:
    """A model. The run's file says nothing of its shape."""
    lines = (tmp_path / "tiny.toml").read_text()
    (tmp_path / "tiny.toml").write_text(re.sub(r"\[model\].*?(?=\[)", "", lines, flags=re.S))
    shape: Config = configuration.load(None, SHAPE)
    stages.whole(shape).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def listed(tmp_path: Path) -> tuple[Path, list[int]]:
    """The file that the guest writes, and where the chunks begin that it has."""
    for file in sorted((tmp_path / "guest").glob(f".cache/models/*/*{LISTED}")):
        starts = [json.loads(line)[0] for line in file.read_text().splitlines() if line.endswith("]")]
        return file.with_name(file.name.removesuffix(LISTED)), starts
    return tmp_path, []


def trained(tmp_path: Path) -> set[str]:
    """The peers whose sums are in the newest step."""
    return {share.peer for group in reference.commits(tmp_path / "runs/tiny")[-1].groups for share in group}


def test_a_guest_gets_its_stage_from_peers_though_one_is_killed_and_it_is_interrupted(
    start: Start, tmp_path: Path, base: Path
) -> None:
    host = start("run", "tiny.toml", *RUN, f"model.path={base}", SLOW)
    wait_for(lambda: host.poll() is not None or steps_done(tmp_path) > 0)
    assert host.poll() is None, end(host)
    invite = end(start("invite", "runs/tiny")).strip()

    guest = start("join", "-", *GUEST, stdin=invite)
    wait_for(lambda: guest.poll() is not None or listed(tmp_path)[1])
    assert guest.poll() is None, end(guest)
    guest.send_signal(signal.SIGINT)
    assert "no model here" in end(guest, code=130)
    file, before = listed(tmp_path)
    assert before and not file.exists()

    guest = start("join", "-", *GUEST, stdin=invite)
    wait_for(lambda: guest.poll() is not None or len(listed(tmp_path)[1]) > len(before))
    assert guest.poll() is None, end(guest)
    own = {local.peer for local in rundir.locals_of(tmp_path / "runs/tiny").peers}
    kill(tmp_path / "runs/tiny", sorted(own)[0])  # one of three donors
    wait_for(lambda: guest.poll() is not None or file.exists())
    own |= {local.peer for local in rundir.locals_of(tmp_path / "runs/tiny").peers}
    wait_for(lambda: guest.poll() is not None or trained(tmp_path) - own)
    assert guest.poll() is None, end(guest)
    starts = listed(tmp_path)[1]
    assert file.exists() and len(starts) == len(set(starts)), "each chunk came once"
    for process in (guest, host):
        process.send_signal(signal.SIGINT)
        end(process, code=130)
    account = summary(tmp_path)
    assert (account["lost"], account["counted_twice"]) == (0, 0)
    assert account["issued"] == account["committed"] + account["begun"], "it was interrupted in a step"


def test_a_run_that_does_not_lend_its_model_says_so(start: Start, tmp_path: Path, base: Path) -> None:
    host = start("run", "tiny.toml", *RUN, f"model.path={base}", "tune.lend=false", "run.steps=8")
    bootstrap = tmp_path / "runs/tiny/bootstrap.json"
    wait_for(lambda: host.poll() is not None or bootstrap.exists())
    invite = end(start("invite", "runs/tiny")).strip()
    refused = end(start("join", "-", *GUEST, stdin=invite), code=2)
    assert "name it yourself: model.path=DIRECTORY" in re.sub(r"\s+", " ", refused)
    refused = end(start("join", "-", *GUEST, "model.path=peers", stdin=invite), code=2)
    assert "gives no frozen weights away" in re.sub(r"\s+", " ", refused)
    end(host)

"""`shoal run --plan FILE`: the plan's stages and peers are the run's, and what a run cannot do is refused."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from shoal import config as configuration
from shoal.cli import main as program
from shoal.cli import run
from shoal.core.messages import Committed
from shoal.planner.plan import Plan, Prediction, StagePlan
from shoal.planner.plan import save as save_plan
from shoal.runtime.account import Step

EVEN = Plan(
    layers=6,
    stages=(StagePlan(0, 3, ("a", "b"), microbatch_s=0.2), StagePlan(3, 6, ("c",), microbatch_s=0.1)),
    predicted=Prediction(2.0, 100.0, 1.5, 0.4, 0.1, 1e6, "compute of stage 0"),
)


def test_a_plan_gives_the_run_its_stages_peers_and_costs() -> None:
    config = configuration.load(None, run._planned(EVEN, "plan.json"))
    assert (config.run.stages, config.run.peers, config.run.stage_seconds) == (2, 3, (0.2, 0.1))
    assert configuration.settings(config).stage_seconds == (0.2, 0.1)


def test_costs_of_another_number_of_stages_are_refused() -> None:
    with pytest.raises(ValueError, match=r"run\.stage_seconds = \[0\.2, 0\.1\].*run\.stages = 3"):
        configuration.load(None, ["run.stages=3", "run.stage_seconds=[0.2, 0.1]"])


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (msgspec.structs.replace(EVEN, layers=8), "model of 8 blocks; model.layers = 6"),
        (
            msgspec.structs.replace(EVEN, stages=(StagePlan(0, 1, ("a",)), StagePlan(1, 6, ("b",)))),
            "plan without --uneven",
        ),
        (
            msgspec.structs.replace(EVEN, stages=(StagePlan(0, 6, ("a",), executor="swapping"),)),
            "try device.executor=swapping",
        ),
    ],
)
def test_what_a_run_cannot_do_is_refused_with_what_would_do(
    plan: Plan, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_plan(plan, "plan.json")
    Path("run.toml").write_text("[model]\nlayers = 6\n")
    assert program.main(["run", "run.toml", "--plan", "plan.json"]) == 2
    assert words in capsys.readouterr().err
    assert not Path("runs").exists(), "nothing was started"


def test_the_end_of_a_run_says_what_was_predicted_and_what_was_measured() -> None:
    commits = [Step(0, Committed(n, n, 1.0, 2.0, (), ()), heard_s=10.0 + 2.5 * n) for n in range(5)]
    assert run._against(EVEN, tuple(commits)) == (
        "the plan predicted 2.00 s a step; measured 2.50 s (+25%), median of 4"
    )
    assert run._against(EVEN, tuple(commits[:1])) == ""


@pytest.mark.slow
def test_a_plan_made_for_a_lab_is_run_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lab.toml").write_text(
        '[run]\nname = "lab"\nsteps = 6\npeers = 4\nstages = 2\n[train]\nbatch = 8\nmicrobatch = 1\n'
        '[device]\nexecutor = "emulated"\nemulated_s = "50 ms"\nemulated_values = 20000\n'
        '[network]\ndelay_s = "5 ms"\nbandwidth_Bps = "200 Mbit/s"\n'
    )
    assert program.main(["plan", "lab.toml", "--out", "plan.json"]) == 0
    stages = json.loads(Path("plan.json").read_text())["stages"]
    assert program.main(["run", "lab.toml", "--plan", "plan.json"]) == 0
    assert "the plan predicted" in capsys.readouterr().out
    assert configuration.load("runs/lab/config.toml").run.stages == len(stages)

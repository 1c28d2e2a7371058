"""A recorded run as a forecast's inputs: what was simulated is found in its trace; what cannot be true, or is too little, is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import pytest

from shoal.cli.main import main
from shoal.core.messages import Committed, Settings, Share
from shoal.forecasting import recorded
from shoal.forecasting.fitted import Fitted, changed, fitted, replayed
from shoal.forecasting.models.played import Played
from shoal.forecasting.recorded import Transfer
from shoal.runtime.records.account import CommittedStep
from shoal.sim.run import Tracer
from shoal.sim.scenarios.scenario import Case, Happenings, Messages, Scenario
from shoal.sim.swarm import Swarm

ROOT = Path(__file__).parents[2]
SPEEDS = (0.8, 1.0, 1.2, 1.0)
FORWARD_S, BACKWARD = 0.3, 2.0


@cache
def _simulated(steps: int, dies_at_s: float) -> tuple[bytes, dict[int, float]]:
    with TemporaryDirectory() as folder:
        commits_s = _play(Path(folder) / "trace", steps, dies_at_s)
        return (Path(folder) / "trace").read_bytes(), commits_s


def simulated(path: Path, steps: int = 8, dies_at_s: float = 0.0) -> dict[int, float]:
    """Writes the trace of four peers on two stages; when each step was committed. One may die."""
    text, commits_s = _simulated(steps, dies_at_s)
    path.write_bytes(text)
    return commits_s


def _play(path: Path, steps: int, dies_at_s: float) -> dict[int, float]:
    settings = Settings(
        stages=2, microbatches=12, steps=steps, peers=4, inflight=4, save_last=False, seats=(0, 1, 0, 1)
    )
    scenario = Scenario(name="recorded", delay_s=(0.02, 0.02), backward=BACKWARD, bandwidth_Bps=(1e9, 1e9))
    case = Case(
        scenario=scenario,
        seed=0,
        settings=settings,
        peers=4,
        speeds=SPEEDS,
        forward_s=FORWARD_S,
        messages=Messages(),
        happenings=Happenings(),
    )
    tracer = Tracer(case, path)
    swarm = tracer.swarm = Swarm(case, tracer)
    if dies_at_s:
        swarm.kernel.after(dies_at_s, lambda _: swarm.processes.kill(swarm.nodes["p3.0"]), None)
    outcome = swarm.run()
    tracer._file.close()
    assert outcome.committed == steps and not outcome.violations
    return dict(enumerate(swarm.watch.commits.times_s))


def fit_of(path: Path, commits_s: dict[int, float]) -> Fitted:
    return fitted(recorded.read(path), commits_s, {}, 512)


def test_what_was_simulated_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    fit = fit_of(path, simulated(path))
    job = fit.job
    assert sorted(zip(fit.labels, job.stage_of, strict=True)) == [("p0.0", 0), ("p1.0", 1), ("p2.0", 0), ("p3.0", 1)]
    speed = dict(zip(("p0.0", "p1.0", "p2.0", "p3.0"), SPEEDS, strict=True))
    for slot, label in enumerate(fit.labels):
        stage = job.stage_of[slot]
        assert job.backward_s[slot, stage] == pytest.approx(BACKWARD * FORWARD_S * speed[label], rel=0.01)
        assert stage or job.forward_s[slot, 0] == pytest.approx(FORWARD_S * speed[label], rel=0.01)
    assert float(np.median(job.machines.delay_s)) == pytest.approx(0.022, rel=0.05)  # the network's own jitter is 1.1
    assert job.patience.heartbeat_s == 0.5 and not fit.own.deaths and not fit.churn.life_s
    assert replayed(fit, Played(job)) == pytest.approx(fit.own.seconds, rel=0.1)


def test_a_death_in_the_record_is_forecast_with_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    calm = fit_of(path, simulated(path, 12))
    struck = fit_of(path, simulated(path, 12, dies_at_s=30.0))
    assert struck.own.deaths == 1 and struck.churn.life_s > 0 and struck.own.seconds > calm.own.seconds
    assert replayed(struck, Played(struck.job)) == pytest.approx(struck.own.seconds, rel=0.1)


def test_what_if_lines_links_and_machines_were_others(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    job = fit_of(path, simulated(path)).job
    planned = np.array(job.stage_of)

    def step_s(other: Any) -> float:
        step = Played(other)(planned)
        assert step is not None
        return step.step_s

    assert step_s(changed(job, speed=2.0)) < 0.7 * step_s(job)
    assert step_s(changed(job, delay=10.0)) > 1.05 * step_s(job)


def test_a_line_shows_its_rate_by_what_larger_tensors_take(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    commits_s = simulated(path)
    record = recorded.read(path)
    one, other = record.peers[:2]
    transfers = [
        Transfer(one, other, 10.0 * number, 10.0 * number + 0.03 + nbytes / 5e6, nbytes)
        for number, nbytes in enumerate([100_000, 1_000_000, 300_000] * 4)
    ]
    job = fitted(_with(record, transfers=transfers), commits_s, {}, 512).job
    assert job.machines.kinds[0].up_Bps == pytest.approx(5e6, rel=0.01)
    assert job.machines.kinds[1].down_Bps == pytest.approx(5e6, rel=0.01)
    assert job.machines.kinds[2].up_Bps == 0.0


def _with(record: recorded.Recorded, **fields: Any) -> recorded.Recorded:
    return msgspec.structs.replace(record, **fields)


# ------------------------------------------------------------------------------------------------------- untrue records


def _swap(lines: list[str]) -> list[str]:
    return [*lines[:300], lines[600], *lines[300:]]


def _lengthen(lines: list[str]) -> list[str]:
    at = max(number for number, line in enumerate(lines) if '"type":"Done"' in line)
    item = json.loads(lines[at])
    item[2]["seconds"] = 1000.0
    return [*lines[:at], json.dumps(item, separators=(",", ":")), *lines[at + 1 :]]


def _unsent(lines: list[str]) -> list[str]:
    """A receipt of another peer that nobody sent, in the middle of the run."""
    for number, line in enumerate(lines):
        item = json.loads(line)
        if isinstance(item, list) and item[2].get("message", [""])[0] == "Output" and item[2]["peer"] != item[1]:
            item[2]["message"][2] = 99  # the step
            return [*lines[:number], json.dumps(item, separators=(",", ":")), *lines[number + 1 :]]
    raise AssertionError("no receipt is in the trace")


def _unknown(lines: list[str]) -> list[str]:
    return [line for line in lines if not (line.startswith("{") and '"p2.0"' in line)]


def _cut(lines: list[str]) -> list[str]:
    return [line.replace('"before":0', '"before":70') if line.startswith("{") else line for line in lines]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_swap, "a trace is in order of time"),
        (_lengthen, "this record is not true"),
        (_unsent, "has not sent before"),
        (_unknown, "acts before the header"),
        (_cut, "70 lines of p0.0 are not in this trace any more"),
    ],
)
def test_an_untrue_record_is_refused(tmp_path: Path, change: Callable[[list[str]], list[str]], says: str) -> None:
    path = tmp_path / "trace.jsonl"
    simulated(path)
    path.write_text("\n".join(change(path.read_text().splitlines())) + "\n")
    with pytest.raises(ValueError, match=says):
        recorded.read(path)


def test_too_short_a_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with pytest.raises(ValueError, match="4 committed steps is too short a record; wanted 5"):
        fit_of(path, simulated(path, 4))


# ---------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's directory, as far as a forecast reads it."""
    monkeypatch.chdir(tmp_path)
    there = tmp_path / "runs" / "lab"
    there.mkdir(parents=True)
    (there / "config.toml").write_text((ROOT / "configs" / "lab.toml").read_text())
    groups = ((Share("p0.0", (0,)), Share("p2.0", (1,))), (Share("p1.0", (0,)), Share("p3.0", (1,))))
    steps = [
        CommittedStep(0, Committed(step=step, round=step, norm=1.0, loss=1.0, digests=("", ""), groups=groups), at_s)
        for step, at_s in simulated(there / "trace.jsonl").items()
    ]
    (there / "commits.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, steps)) + b"\n")
    return there


def forecast(*words: str) -> int:
    return main(["forecast", "--from-run", "runs/lab", "--hours", "0.1", "--seeds", "1", *words])


def test_the_command_prints_what_was_fitted_the_run_itself_and_what_would_be(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert forecast("--speed", "x2", "run.inflight=8") == 0
    text = capsys.readouterr().out
    assert "fitted to its record" in text and "forecast against the run itself" in text
    assert "with speed x2, run.inflight=8 makes +" in text and "simulated" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--bandwidth", "fast"], "--bandwidth fast: wanted a factor above 0"),
        (["--delay", "x-1"], "wanted a factor above 0"),
        (["model.layers=12"], "model.layers: a record says nothing of another one"),
        (["other.toml"], "leave it out"),
        (["--from-run", "runs/none"], "no run is there"),
    ],
)
def test_what_a_record_cannot_tell_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert forecast(*words) == 2
    assert says in capsys.readouterr().err


def test_a_run_whose_other_members_were_elsewhere_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "commits.jsonl"
    path.write_text(path.read_text().replace("p3.0", "p9.0"))
    assert forecast() == 2
    assert "1 of 4 members have their traces elsewhere, such as p9.0" in capsys.readouterr().err


def test_what_ifs_need_a_recorded_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["forecast", str(ROOT / "configs" / "lab.toml"), "--bandwidth", "x2"]) == 2
    assert "name it with --from-run" in capsys.readouterr().err

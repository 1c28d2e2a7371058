"""Preference pairs (DPO): many peers train as one process that holds the adapted model and, apart from it, the base.

As tests/e2e/test_identity.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from tests import reference
from tests.e2e.test_chats import kill_one
from tests.e2e.test_identity import Left, a_config, adapted, assert_same_bits, trained_in_memory
from tests.e2e.test_run import Start, end, start, steps_done, summary, wait_for
from tests.preferences import preferred, some_choices, some_pairs

from shoal import config as configuration
from shoal import trace
from shoal.config import Config, Data, Eval, Model, Run
from shoal.core.messages import Rewards
from shoal.launcher.files import saved
from shoal.model import stages
from shoal.runtime.data.dataset import open_dataset

__all__ = ["start"]  # a fixture
_SLOW = pytest.mark.slow


def of_pairs(folder: Path, config: Config, pairs: int = 40) -> Config:
    data = msgspec.structs.replace(
        config.data,
        source="jsonl",
        format="preference",
        path=some_pairs(folder / "pairs.jsonl", pairs),
        sequence=16,
    )
    config = msgspec.structs.replace(config, data=data)
    return adapted(config, folder / "base", rank=2, alpha=64.0, beta=0.3)


@pytest.mark.parametrize(
    ("stages", "staleness"), [pytest.param(1, 0, marks=_SLOW), pytest.param(3, 0, marks=_SLOW), (2, 1)]
)
def test_peers_that_train_on_pairs_have_the_bits_of_one_process(tmp_path: Path, stages: int, staleness: int) -> None:
    left = trained_in_memory(tmp_path, of_pairs(tmp_path, a_config(stages, 4, steps=3, staleness=staleness)))
    commits = reference.commits(left.directory)
    assert [commit.counted for commit in commits] == [16] * 3
    assert commits[0].loss == pytest.approx(0.69314718, abs=1e-6) and commits[-1].loss != commits[0].loss
    assert commits[0].rewards == Rewards(0.0, 0.0)  # at first the adapters change nothing
    newest = commits[-1].rewards
    assert newest is not None and 0 < newest.accuracy <= 1 and newest.margin != 0
    assert_same_bits(left, commits)
    assert trace.replay(left.trace).differing == 0


@pytest.mark.slow
def test_held_out_pairs_are_measured_once_each(tmp_path: Path) -> None:
    config = of_pairs(tmp_path, a_config(2, 4, steps=3, batch=8))
    held = some_pairs(tmp_path / "held.jsonl", 7)
    left = trained_in_memory(tmp_path, msgspec.structs.replace(config, eval=Eval(path=held, every=2)))
    commits = reference.commits(left.directory)
    losses = [commit.heldout for commit in commits]
    assert losses[0] == pytest.approx(0.69314718, abs=1e-6) and losses[1] is None
    assert losses[2] is not None and losses[2] != losses[0]
    figures = [commit.heldout_rewards for commit in commits]
    assert figures[0] == Rewards(0.0, 0.0) and figures[1] is None and figures[2] is not None
    assert figures[2].accuracy * 7 == pytest.approx(round(figures[2].accuracy * 7))  # of seven pairs
    assert [commit.counted for commit in commits] == [8] * 3


STEPS = 120
TUNED = f"""
[run]
name = "tiny"
peers = 4
stages = 2
steps = {STEPS}
min_request_timeout_s = 20.0
[model]
path = "base"
[tune]
method = "lora"
rank = 8
beta = 0.5
[data]
source = "jsonl"
format = "preference"
path = "choices.jsonl"
sequence = 16
[eval]
path = "held.jsonl"
every = 40
[train]
batch = 16
microbatch = 4
learning_rate = 0.01
warmup = 5
[checkpoint]
every = 0
[network]
host = "127.0.0.1"
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_four_processes_of_which_one_is_killed_learn_a_preference_as_one_process_does(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    held = some_choices(tmp_path)
    shape = Model(hidden_size=64, layers=4, heads=4, kv_heads=2, intermediate_size=128)
    base = stages.whole(Config(run=Run(seed=1), model=shape, data=Data(sequence=16)))
    base.save_pretrained(tmp_path / "base")
    (tmp_path / "tiny.toml").write_text(TUNED)
    launcher = start("run", "tiny.toml")
    wait_for(lambda: launcher.poll() is not None or steps_done(tmp_path) >= 5)
    kill_one(launcher)
    output = end(launcher)
    account = summary(tmp_path)
    assert "removed" in output and account["removed"] >= 1 and "gone otherwise" in output
    assert account["balanced"], account["reason"]
    assert account["issued"] == account["committed"] == STEPS * 4 and account["counted_twice"] == 0
    assert 0.2 < preferred(base, held) < 0.8
    result = json.loads(end(start("eval", "runs/tiny", str(held), "--json")).splitlines()[-1])
    assert result["accuracy"] > 0.95 and result["margin"] > 0
    assert account["heldout"]["loss"] == pytest.approx(result["loss"], rel=1e-5)
    assert account["reward_accuracy"] > 0.9 and "of the last step's pairs are in their order" in output
    tuned = saved.model_of(saved.checkpoint(str(tmp_path / "runs/tiny")))
    assert preferred(tuned, held) > 0.95
    config = configuration.load(tmp_path / "tiny.toml")
    left = Left(directory=tmp_path / "runs/tiny", config=config, dataset=open_dataset(config), summary=account)
    commits = reference.commits(left.directory)
    assert {commit.counted for commit in commits} == {16}
    assert_same_bits(left, commits)

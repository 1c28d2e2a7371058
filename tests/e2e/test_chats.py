"""Chats, whose loss counts the assistant's tokens alone: many peers train as one process that takes the mean over all counted tokens.

As tests/e2e/test_identity.py, with microbatches of very different numbers of counted tokens.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import msgspec
import pytest
import torch
from tests import reference
from tests.chats import IDS, a_tokenizer, some_chats
from tests.e2e.test_identity import Left, a_config, assert_same_bits, trained_in_memory
from tests.e2e.test_run import Start, children, end, start, steps_done, summary, wait_for

from shoal import config as configuration
from shoal import trace
from shoal.config import Config
from shoal.core.messages import Committed
from shoal.runtime.data.dataset import Dataset, open_dataset

__all__ = ["start"]  # a fixture
STEPS = 40
CHATS = f"""
data.source=jsonl data.format=chat data.path=chats.jsonl data.tokenizer=tokenizer data.sequence=64 data.wrong_rows=skip
model.vocab_size={IDS} run.peers=4 run.stages=2 run.steps={STEPS} train.batch=16 train.learning_rate=0.01
""".split()


def of_chats(folder: Path, config: Config) -> Config:
    data = msgspec.structs.replace(
        config.data,
        source="jsonl",
        format="chat",
        path=some_chats(folder / "chats.jsonl", 40),
        tokenizer=a_tokenizer(folder / "tokenizer"),
        sequence=64,
        wrong_rows="skip",
    )
    return msgspec.structs.replace(config, data=data, model=msgspec.structs.replace(config.model, vocab_size=IDS))


def counted(config: Config, dataset: Dataset, step: int) -> list[int]:
    """Of each microbatch."""
    count = configuration.microbatches(config.train)
    return [int((dataset.microbatch(step, index)[:, 1:] >= 0).sum()) for index in range(count)]


def assert_counted(left: Left, commits: list[Committed]) -> None:
    for commit in commits:
        counts = counted(left.config, left.dataset, commit.step)
        assert commit.counted == sum(counts) > 0
        assert len(set(counts)) > 1


@pytest.mark.parametrize(
    ("stages", "executor", "staleness"),
    [
        (2, "resident", 0),
        pytest.param(1, "swapping", 0, marks=pytest.mark.slow),
        pytest.param(2, "resident", 1, marks=pytest.mark.slow),
        (1, "swapping", 1),
    ],
)
def test_peers_that_train_on_chats_have_the_bits_of_one_process(
    tmp_path: Path, stages: int, executor: str, staleness: int
) -> None:
    config = of_chats(tmp_path, a_config(stages, 4, steps=2 + staleness, staleness=staleness))
    device = msgspec.structs.replace(config.device, executor=executor, memory_bytes=1 << 20 if stages == 1 else 0)
    left = trained_in_memory(tmp_path, msgspec.structs.replace(config, device=device))
    commits = reference.commits(left.directory)
    assert_counted(left, commits)
    assert_same_bits(left, commits)
    assert trace.replay(left.trace).differing == 0


def test_the_mean_is_over_the_counted_tokens_of_the_whole_step(tmp_path: Path) -> None:
    """Against torch's own mean over one batch of all samples, within rounding."""
    config = of_chats(tmp_path, a_config(1, 1))
    dataset = open_dataset(config)
    process = reference.OneProcess(config, dataset)
    parts = [dataset.microbatch(0, index) for index in range(process.microbatches)]
    tokens = torch.cat(parts)
    ids, wanted = (
        torch.where(tokens < 0, ~tokens, tokens),
        tokens[:, 1:].clamp(min=-100).where(tokens[:, 1:] >= 0, -100),
    )
    logits = process.model(input_ids=ids[:, :-1], use_cache=False).logits
    mean = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
    grads = torch.autograd.grad(mean, list(process.parameters.values()))
    norm = float(torch.cat([grad.flatten() for grad in grads]).double().norm())
    trained = process.train(reference.one_after_the_other(process.microbatches, 1))
    assert trained.loss == pytest.approx(mean.item(), rel=1e-6)
    assert trained.norm == pytest.approx(norm, rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_processes_of_which_one_is_killed_learn_chats_as_one_process_does(start: Start, tmp_path: Path) -> None:
    some_chats(tmp_path / "chats.jsonl", 60)
    with (tmp_path / "chats.jsonl").open("a") as file:
        file.write('{"messages": []}\n')
    a_tokenizer(tmp_path / "tokenizer")
    launcher = start("run", "tiny.toml", *CHATS)
    wait_for(lambda: launcher.poll() is not None or steps_done(tmp_path) >= 5)
    kill_one(launcher)
    output = end(launcher)
    account = summary(tmp_path)
    assert "removed" in output and account["removed"] >= 1 and "gone otherwise" in output
    assert account["balanced"], account["reason"]
    assert account["issued"] == account["committed"] == STEPS * 8 and account["counted_twice"] == 0
    assert account["losses"][-1] < 0.7 * account["losses"][0]
    words = [
        word.replace("=chats", f"={tmp_path}/chats").replace("=tokenizer", f"={tmp_path}/tokenizer") for word in CHATS
    ]
    config = configuration.load(tmp_path / "tiny.toml", words)
    left = Left(directory=tmp_path / "runs/tiny", config=config, dataset=open_dataset(config), summary=account)
    commits = reference.commits(left.directory)
    assert_counted(left, commits)
    assert_same_bits(left, commits)


def kill_one(launcher: subprocess.Popen[str]) -> None:
    os.kill(max(children(launcher.pid)), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("staleness", [0, 1])
def test_one_machine_trains_on_chats_with_the_bits_of_one_process(start: Start, tmp_path: Path, staleness: int) -> None:
    some_chats(tmp_path / "chats.jsonl", 60)
    a_tokenizer(tmp_path / "tokenizer")
    words = [*CHATS, "run.steps=6", "run.stages=1", "run.peers=1", f"train.staleness={staleness}"]
    end(start("train", "tiny.toml", *words))
    words = [
        word.replace("=chats", f"={tmp_path}/chats").replace("=tokenizer", f"={tmp_path}/tokenizer") for word in words
    ]
    config = configuration.load(tmp_path / "tiny.toml", words)
    commits = reference.commits(tmp_path / "runs/tiny")
    process, trained = reference.follow(config, open_dataset(config), map(reference.as_recorded, commits))
    assert [one.loss for one in trained] == [commit.loss for commit in commits]
    assert [one.norm for one in trained] == [commit.norm for commit in commits]
    assert reference.differing(process.state(), reference.checkpoint(tmp_path / "runs/tiny", 6)) == []

"""Training by many peers is training on one machine: one process that adds in the ledger's order gets the same bits.

tests/reference.py is that process. The quick test runs whole peers over the network in memory; the slow ones run `shoal run` with
real processes, undisturbed and with a SIGKILL every few seconds, and look at everything that a run leaves behind.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests import reference
from tests.runtime.test_node import TINY, Swarm

from shoal import config as configuration
from shoal import trace
from shoal.config import Config, Model, Tune
from shoal.core.messages import Do, Gather
from shoal.model import stages
from shoal.runtime.data.dataset import Dataset, open_dataset

ROOT = Path(__file__).parents[2]
STAGES, REPLICAS = 3, 2
STEPS = 50
SWAPPING_BYTES = 110_000  # half of what the whole model of these tests takes: its layers take turns
# Real kills come on top of whatever else makes this machine slow: a run takes as long as it takes.
RUN_S = 1500.0

TOML = """
[run]
name = "real"
peers = 6
stages = 3
steps = 50
min_request_timeout_s = 20.0
[model]
hidden_size = 64
layers = 6
heads = 4
kv_heads = 2
intermediate_size = 128
[data]
source = "text"
path = "a.txt"
sequence = 64
[train]
batch = 32
microbatch = 2
staleness = STALENESS
learning_rate = 1e-3 # at 3e-3 training is chaotic: rounding grows from 1e-7 to 1e-2 within 30 steps, on one machine too
warmup = 5
[network]
delay_s = 0.03 # fifty steps take half a minute on the fastest machine too, so that peers are killed in them
[checkpoint]
every = 20
"""


class Left(msgspec.Struct, frozen=True):
    """What is left of a run, and what there is to repeat it in one process."""

    directory: Path
    config: Config
    dataset: Dataset
    summary: dict[str, Any] = {}

    @property
    def trace(self) -> Path:
        return self.directory / "trace.jsonl"


def assert_same_bits(left: Left, commits: list[reference.Committed]) -> reference.OneProcess:
    """Every loss, every norm, every replica's parameters after every step, and all that is in the checkpoint."""
    config = left.config
    assert [commit.step for commit in commits] == list(range(config.run.steps))
    process, trained = reference.follow(config, left.dataset, map(reference.as_recorded, commits))
    assert [one.loss for one in trained] == [commit.loss for commit in commits]
    assert [one.norm for one in trained] == [commit.norm for commit in commits]
    wanted = {(stage, one.step + 1): digest for one in trained for stage, digest in enumerate(one.digests)}
    held = [one for one in reference.held(left.trace) if one.step > 0]
    assert {(one.stage, one.step) for one in held} == wanted.keys()
    assert [one for one in held if one.digest != wanted[one.stage, one.step]] == []
    assert reference.differing(process.state(), reference.checkpoint(left.directory, config.run.steps)) == []
    return process


def assert_within_rounding(left: Left, process: reference.OneProcess) -> None:
    """In other orders than the run's: as one machine would add, and in orders drawn anew for every step."""
    config, microbatches = left.config, process.microbatches
    stages = config.run.stages
    plain, _ = reference.follow(config, left.dataset, repeat(reference.one_after_the_other(microbatches, stages)))
    drawn, _ = reference.follow(config, left.dataset, reference.shuffled(microbatches, stages, seed=7))
    for other in (plain, drawn):
        assert reference.differing(other.state(), process.state()) != []  # the order does matter to the last bits
        assert reference.relative(other.state(), process.state()) <= 1e-5


# --------------------------------------------------------------------------------------------------- in one process


def trained_in_memory(directory: Path, config: Config) -> Left:
    """What peers leave that have talked over the network in memory."""
    configuration.validate(config)
    swarm = Swarm(config, directory)
    for _ in range(config.run.peers):
        swarm.add()
    finishes = asyncio.run(swarm.run())
    swarm.close()
    assert all(finish.ok for finish in finishes)
    books = swarm.books()
    assert books.totals().balanced, books.totals().reason
    (directory / "commits.jsonl").write_bytes(b"".join(msgspec.json.encode(step) + b"\n" for step in books.steps))
    trace.merge([[path] for path in sorted(directory.glob("[0-9]*.jsonl"))], directory / "trace.jsonl")
    return Left(directory=directory, config=config, dataset=swarm.dataset)


def a_config(stages: int, peers: int, steps: int = 4, **train: Any) -> Config:
    changed = msgspec.structs.replace
    return changed(
        TINY,
        run=changed(TINY.run, stages=stages, peers=peers, steps=steps),
        model=changed(TINY.model, layers=4, extra={"attention_bias": True}, tied_embeddings=stages == 1),
        train=changed(TINY.train, **{"batch": 16, **train}),
        checkpoint=changed(TINY.checkpoint, every=0, at_end=True),
    )


@pytest.fixture(autouse=True)
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(32 + (i * i) % 90 for i in range(3000)))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def in_memory(tmp_path: Path) -> Left:
    return trained_in_memory(tmp_path, a_config(STAGES, STAGES * REPLICAS, steps=3))


@pytest.mark.parametrize(
    ("executor", "staleness"),
    [("resident", 0), *(pytest.param("swapping", late, marks=pytest.mark.slow) for late in (0, 1))],
)
def test_four_peers_that_hold_the_whole_model_have_the_bits_of_one_process(
    tmp_path: Path, executor: str, staleness: int
) -> None:
    config = a_config(1, 4, steps=2 + staleness, staleness=staleness)
    device = msgspec.structs.replace(config.device, executor=executor, memory_bytes=SWAPPING_BYTES)
    left = trained_in_memory(tmp_path, msgspec.structs.replace(config, device=device))
    commits = reference.commits(left.directory)
    assert_same_bits(left, commits)
    for commit in commits:  # nobody computed for another
        (group,) = commit.groups
        owned = {frozenset(range(place, 8, 4)) for place in range(4)}
        assert {frozenset(share.indices) for share in group} == owned


@pytest.mark.parametrize("local_warmup", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_rounds_of_local_steps_have_the_bits_of_one_process_that_trains_each_share_alone(
    tmp_path: Path, local_warmup: int
) -> None:
    left = trained_in_memory(tmp_path, a_config(1, 4, steps=2, local_steps=3, local_batch=4, local_warmup=local_warmup))
    assert_same_bits(left, reference.commits(left.directory))


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_with_delayed_updates_too_every_replica_has_the_bits_of_one_process_that_is_a_step_late(
    tmp_path: Path, optimizer: str
) -> None:
    config = a_config(STAGES, STAGES * REPLICAS, steps=3, staleness=1, optimizer=optimizer)
    left = trained_in_memory(tmp_path, config)
    commits = reference.commits(left.directory)
    process = assert_same_bits(left, commits)
    assert trace.replay(left.trace).differing == 0
    in_time = msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, staleness=0))
    other, _ = reference.follow(in_time, left.dataset, map(reference.as_recorded, commits))
    assert reference.relative(other.state(), process.state()) > 1e-5  # it does matter


@pytest.mark.parametrize(
    ("local_steps", "staleness"), [(1, 0), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((3, 0), (1, 1)))]
)
def test_a_gradient_that_is_averaged_piece_by_piece_has_the_same_bits(
    tmp_path: Path, local_steps: int, staleness: int
) -> None:
    local_batch = 4 if local_steps > 1 else 0
    local = {"local_steps": local_steps, "local_batch": local_batch}
    config = a_config(1, 4, steps=2 + staleness, staleness=staleness, **local)
    config = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, averaging_memory_bytes=8000))
    left = trained_in_memory(tmp_path, config)
    gathers = [
        command.task
        for record in trace.read(left.trace)
        if isinstance(record, trace.TraceRecord)
        for command in record.commands
        if isinstance(command, Do) and isinstance(command.task, Gather)
    ]
    assert sum(not gather.last for gather in gathers) > 4 * sum(gather.last for gather in gathers)
    assert_same_bits(left, reference.commits(left.directory))


@pytest.mark.parametrize(
    ("staleness", "tune"),
    [
        (0, {}),
        pytest.param(1, {}, marks=pytest.mark.slow),
        pytest.param(0, {"dora": True}, marks=pytest.mark.slow),
        pytest.param(0, {"quantize": "nf4"}, marks=pytest.mark.slow),
        pytest.param(0, {"dropout": 0.2}, marks=pytest.mark.slow),
        (1, {"dropout": 0.2}),
    ],
)
def test_adapters_have_the_bits_of_one_process(tmp_path: Path, staleness: int, tune: dict[str, Any]) -> None:
    config = a_config(2, 2 * REPLICAS, steps=2 + staleness, staleness=staleness)
    left = trained_in_memory(tmp_path, adapted(config, tmp_path / "base", rank=2, alpha=64.0, **tune))
    process = assert_same_bits(left, reference.commits(left.directory))
    assert all("lora_" in name for name in process.parameters)
    assert_within_rounding(left, process)


class Peft:
    """PEFT's own model, as its users make it, with the first adapters of a run, under the run's names."""

    def __init__(self, config: Config) -> None:
        import peft
        import transformers

        ours = dict(stages.whole(config).named_parameters())
        base: Any = transformers.AutoModelForCausalLM.from_pretrained(config.model.path)
        lora = peft.LoraConfig(
            r=config.tune.rank, lora_alpha=config.tune.alpha, target_modules="all-linear", modules_to_save=PEFT_NAMES
        )
        self.model = peft.get_peft_model(base, lora).eval()
        for name, value in self.named_parameters():
            if "lora_" in name:
                value.data = ours[name].data.clone()
            elif value.requires_grad:
                assert torch.equal(value, ours[name])

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for name, value in self.model.named_parameters():
            yield name.removeprefix("base_model.model.").replace(".modules_to_save.default", ""), value

    def modules(self) -> Iterator[torch.nn.Module]:
        return self.model.modules()

    def __call__(self, **given: Any) -> Any:
        return self.model(**given)


PEFT_NAMES = ["embed_tokens", "lm_head", "input_layernorm", "post_attention_layernorm", "norm"]


@pytest.mark.parametrize("staleness", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_embeddings_head_and_norms_beside_adapters_have_the_bits_of_peft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    config = a_config(2, 2 * REPLICAS, steps=2 + staleness, staleness=staleness)
    config = adapted(config, tmp_path / "base", rank=2, alpha=64.0, also=("embeddings", "head", "norms"))
    left, peft_model = trained_in_memory(tmp_path, config), Peft(config)
    monkeypatch.setattr(reference.stages, "whole", lambda _: peft_model)
    process = assert_same_bits(left, reference.commits(left.directory))
    assert process.model is peft_model
    others = {name for name in process.parameters if "lora_" not in name}
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} < others
    before = dict(transformers_base(config))
    assert [name for name in others if torch.equal(before[name], process.parameters[name])] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "tune", [{"also": ("embeddings", "norms"), "quantize": "nf4"}, {"also": ("head",), "dropout": 0.2}]
)
def test_embeddings_and_norms_beside_other_adapters_have_the_bits_of_one_process(
    tmp_path: Path, tune: dict[str, Any]
) -> None:
    config = a_config(2, 2 * REPLICAS, steps=2)
    left = trained_in_memory(tmp_path, adapted(config, tmp_path / "base", rank=2, alpha=64.0, **tune))
    process = assert_same_bits(left, reference.commits(left.directory))
    assert not all("lora_" in name for name in process.parameters)


def transformers_base(config: Config) -> Iterator[tuple[str, torch.nn.Parameter]]:
    import transformers

    base: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(config.model.path)
    return base.named_parameters()


def adapted(config: Config, base: Path, **tune: Any) -> Config:
    """The same model, which lies in `base`, with adapters."""
    stages.whole(config).save_pretrained(base)
    changed = msgspec.structs.replace
    return changed(config, model=Model(path=str(base)), tune=Tune(method="lora", **tune))


def test_six_peers_and_one_process_that_adds_in_their_order_get_the_same_bits(in_memory: Left) -> None:
    commits = reference.commits(in_memory.directory)
    process = assert_same_bits(in_memory, commits)
    assert_within_rounding(in_memory, process)
    assert trace.replay(in_memory.trace).differing == 0


# ---------------------------------------------------------------------------------------------------- real processes


def shoal_run(directory: Path, *words: str, staleness: int = 0, adapters: bool = False) -> Left:
    """`shoal run` to its end, in a directory of its own."""
    (directory / "a.txt").write_bytes((ROOT / "src/shoal/core/messages.py").read_bytes() * 4)
    (directory / "real.toml").write_text(TOML.replace("STALENESS", str(staleness)))
    if adapters:
        config = configuration.load(directory / "real.toml", [f"data.path={directory / 'a.txt'}"])
        stages.whole(config).save_pretrained(directory / "base")
        text = TOML.replace("STALENESS", str(staleness))
        begin, end = text.index("[model]"), text.index("[data]")
        model = f'[model]\npath = "{directory / "base"}"\n[tune]\nmethod = "lora"\nrank = 4\nalpha = 64.0\n'
        (directory / "real.toml").write_text(text[:begin] + model + text[end:])
    done = subprocess.run(
        [sys.executable, "-m", "shoal.cli.main", "run", "real.toml", *words],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_S,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    config = configuration.load(directory / "real.toml", [f"data.path={directory / 'a.txt'}"])
    run_directory = directory / "runs" / config.run.name
    summary = json.loads((run_directory / "summary.json").read_bytes())
    return Left(directory=run_directory, config=config, dataset=open_dataset(config), summary=summary)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Left:
    return shoal_run(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Left:
    """Every 10 s: long enough for the dead to be removed and replaced, also where everything is slow."""
    return shoal_run(tmp_path_factory.mktemp("killed"), "--kill-every", "10")


def assert_every_sample_once(left: Left) -> None:
    """Counted here from the groups of each commit, then compared with what the run says of itself."""
    microbatches = configuration.microbatches(left.config.train)
    for commit in reference.commits(left.directory):
        for group in commit.groups:
            assert sorted(index for share in group for index in share.indices) == list(range(microbatches))
    said = left.summary
    assert said["balanced"], said["reason"]
    assert (said["steps"], said["issued"], said["committed"]) == (STEPS, STEPS * microbatches, STEPS * microbatches)
    assert (said["lost"], said["counted_twice"]) == (0, 0)


@pytest.mark.slow
@pytest.mark.timeout(2 * RUN_S)
def test_fifty_steps_of_six_processes_have_the_bits_of_one(undisturbed: Left) -> None:
    assert_every_sample_once(undisturbed)
    process = assert_same_bits(undisturbed, reference.commits(undisturbed.directory))
    assert_within_rounding(undisturbed, process)


@pytest.mark.slow
@pytest.mark.timeout(3 * RUN_S)
def test_peers_killed_and_joined_change_neither_a_sample_nor_a_loss(undisturbed: Left, killed: Left) -> None:
    assert killed.summary["killed"] >= 1
    assert_every_sample_once(killed)
    assert killed.summary["losses"] == pytest.approx(undisturbed.summary["losses"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(3 * RUN_S)
def test_with_kills_too_every_replica_has_the_bits_of_one_process_after_every_step(killed: Left) -> None:
    assert_same_bits(killed, reference.commits(killed.directory))


@pytest.mark.slow
@pytest.mark.timeout(3 * RUN_S)
def test_with_kills_and_delayed_updates_every_replica_has_the_bits_of_one_process_that_is_a_step_late(
    tmp_path: Path,
) -> None:
    left = shoal_run(tmp_path, "--kill-every", "10", staleness=1)
    assert left.summary["killed"] >= 1 and left.summary["staleness"] == 1
    assert left.summary["overlapped_steps"] >= STEPS // 2
    assert_every_sample_once(left)
    assert_same_bits(left, reference.commits(left.directory))
    assert trace.replay(left.trace).differing == 0


@pytest.mark.slow
@pytest.mark.timeout(3 * RUN_S)
def test_with_kills_adapters_have_the_bits_of_one_process(tmp_path: Path) -> None:
    left = shoal_run(tmp_path, "--kill-every", "10", adapters=True)
    assert left.summary["killed"] >= 1
    assert_every_sample_once(left)
    assert_same_bits(left, reference.commits(left.directory))


@pytest.mark.slow
@pytest.mark.timeout(3 * RUN_S)
def test_machines_that_are_told_what_a_disturbed_run_was_told_say_the_same(killed: Left) -> None:
    replayed = trace.replay(killed.trace)
    assert replayed.peers >= STAGES * REPLICAS + killed.summary["joined"]
    assert replayed.differing == 0, replayed.first

"""`shoal train`: one machine's training is a run's, goes on after any end, and refuses what cannot work before it begins."""

from __future__ import annotations

import json
import re
import threading
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import reference

from shoal import config as configuration
from shoal import host
from shoal.cli import main, train
from shoal.executor import fit
from shoal.executor.delayed import Delayed
from shoal.executor.swap.swapping import Swapping
from shoal.exit_codes import ExitCode
from shoal.model import stages
from shoal.runtime.data.dataset import open_dataset

SMALL = (
    "run.name=one",
    "run.steps=4",
    "model.hidden_size=16",
    "model.layers=3",
    "model.heads=2",
    "model.kv_heads=1",
    "model.intermediate_size=24",
    "model.tied_embeddings=true",
    "data.source=text",
    "data.path=a.txt",
    "data.sequence=8",
    "train.batch=8",
    "train.microbatch=2",
    "train.warmup=0",
    "checkpoint.every=2",
    "run.queue_limit=3",  # a step takes two passes, of three microbatches and of one
)


@pytest.fixture(autouse=True)
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(32 + (i * i) % 90 for i in range(3000)))
    monkeypatch.chdir(tmp_path)


def trained(*words: str) -> int:
    return main.main(["train", *SMALL, *words])


def summary() -> dict[str, Any]:
    account: dict[str, Any] = json.loads(Path("runs/one/summary.json").read_bytes())
    return account


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert trained(*words) == ExitCode.USER_ERROR
    assert not list(Path("runs").glob("one*/checkpoints"))
    return capsys.readouterr().err


@pytest.mark.parametrize("words", [(), ("device.memory=110 kB",)], ids=["resident", "swapping"])
def test_it_leaves_what_a_run_leaves_and_has_the_bits_of_plain_pytorch(words: tuple[str, ...]) -> None:
    assert trained(*words) == 0
    account = summary()
    assert account["balanced"] and (account["steps"], account["issued"], account["committed"]) == (4, 16, 16)
    config = train.configured([*SMALL, *words])
    order = repeat(reference.one_after_the_other(4, 1))
    process, steps = reference.follow(config, open_dataset(config), order)
    assert account["losses"] == [step.loss for step in steps]
    commits = reference.commits(Path("runs/one"))
    assert [commit.norm for commit in commits] == [step.norm for step in steps]
    assert reference.differing(process.state(), reference.checkpoint(Path("runs/one"), 4)) == []


@pytest.mark.parametrize("words", [(), ("device.memory=110 kB",)], ids=["resident", "swapping"])
def test_with_delayed_updates_it_has_the_bits_of_plain_pytorch_that_is_a_step_late(words: tuple[str, ...]) -> None:
    words = (*words, "train.staleness=1")
    assert trained(*words) == 0
    account = summary()
    assert account["balanced"] and (account["steps"], account["staleness"], account["overlapped_steps"]) == (4, 1, 3)
    config = train.configured([*SMALL, *words])
    process, steps = reference.follow(config, open_dataset(config), repeat(reference.one_after_the_other(4, 1)))
    assert account["losses"] == [step.loss for step in steps]
    assert reference.differing(process.state(), reference.checkpoint(Path("runs/one"), 4)) == []


def test_the_optimizer_runs_while_the_next_step_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 1 is computed to its end before step 0 is applied; without delayed updates it would wait for ever."""
    computed, finish, back = threading.Event(), Delayed.finish, Swapping.backward_batch
    passes: list[bool] = []
    late: list[bool] = []

    def finish_late(self: Delayed, reduced: torch.Tensor, norm: float, step: int, scale: float) -> None:
        if step == 0:
            late.append(computed.wait(60))
        finish(self, reduced, norm, step, scale)

    def counted(self: Swapping, batch: list[torch.Tensor]) -> list[float]:
        result = back(self, batch)
        passes.append(True)
        if len(passes) == 4:  # two a step
            computed.set()
        return result

    monkeypatch.setattr(Delayed, "finish", finish_late)
    monkeypatch.setattr(Swapping, "backward_batch", counted)
    assert trained("device.memory=110 kB", "train.staleness=1") == 0
    assert late == [True]


def test_an_optimizer_that_fails_beside_the_next_step_ends_training_with_the_last_checkpoint_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Delayed.finish

    def fails(self: Delayed, reduced: torch.Tensor, norm: float, step: int, scale: float) -> None:
        if step == 2:
            raise RuntimeError("cannot allocate memory")
        real(self, reduced, norm, step, scale)

    with monkeypatch.context() as patched:
        patched.setattr(Delayed, "finish", fails)
        assert trained("train.staleness=1") == ExitCode.FAILED
    output = capsys.readouterr().out
    assert "the optimizer failed at the end of step 2: cannot allocate memory" in output
    assert "the checkpoint of step 2 is whole" in output
    assert trained("train.staleness=1", "--resume") == 0
    assert (summary()["steps"], summary()["balanced"]) == (4, True)


def test_a_device_lost_in_the_middle_leaves_the_last_checkpoint_and_the_rest_goes_on_from_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    passes, real = [0], Swapping.backward_batch

    def lost(self: Swapping, batch: list[torch.Tensor]) -> list[float]:
        passes[0] += 1
        if passes[0] == 8:  # the second pass of the fourth step
            raise RuntimeError("CUDA error: unspecified launch failure\nCompile with TORCH_USE_CUDA_DSA.\n")
        return real(self, batch)

    monkeypatch.setattr(Swapping, "backward_batch", lost)
    assert trained("device.memory=110 kB") == ExitCode.FAILED
    output = capsys.readouterr().out
    assert "unspecified launch failure Compile with TORCH_USE_CUDA_DSA; the checkpoint of step 2 is whole" in output
    assert (summary()["steps"], summary()["balanced"]) == (3, False)
    assert trained("--resume", "device.memory=110 kB") == 0
    assert (summary()["steps"], summary()["committed"], summary()["balanced"]) == (4, 16, True)
    gone_on = reference.checkpoint(Path("runs/one"), 4)
    assert trained() == 0
    assert reference.differing(reference.checkpoint(Path("runs/one"), 4), gone_on) == []


def test_a_device_lost_while_a_checkpoint_is_written_leaves_the_one_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Swapping.state

    def lost(self: Swapping) -> dict[str, torch.Tensor]:
        if Path("runs/one/checkpoints/step-2/training.json").exists():
            raise RuntimeError("CUDA error: unspecified launch failure")
        return real(self)

    with monkeypatch.context() as patched:
        patched.setattr(Swapping, "state", lost)
        assert trained("device.memory=110 kB") == ExitCode.FAILED
    output = capsys.readouterr().out
    assert "CUDA error" in output and "the checkpoint of step 2 is whole" in output
    assert trained("--resume", "device.memory=110 kB") == 0
    assert (summary()["steps"], summary()["balanced"]) == (4, True)


@pytest.mark.parametrize("executor", ["resident", "swapping"])
@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"model_type": "llama", "num_hidden_layers": 0}, "the model has no repeated blocks"),
        ({"model_type": "biogpt", "num_hidden_layers": 2}, "bare: this family has no pipeline plan"),
    ],
    ids=["no blocks", "blocks that the family does not name"],
)
def test_a_model_without_repeated_blocks_is_refused(
    fields: dict[str, Any], complaint: str, executor: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bare").mkdir()
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 256}
    Path("bare/config.json").write_text(json.dumps(sizes | fields))
    Path("bare/model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    words = ["model=bare", f"device.executor={executor}", "device.memory_bytes=1 MB"]
    assert "model.hidden_size = 16 has no effect" in refused(capsys, *words), "the directory has its own"
    rest = [word for word in SMALL if not word.startswith("model.")]
    assert main.main(["train", *rest, *words]) == ExitCode.USER_ERROR
    said = capsys.readouterr().err
    assert said.startswith("shoal: ") and complaint in said


def test_a_signal_ends_it_after_the_step_with_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    real = train.LocalTraining._step

    def asked(self: train.LocalTraining, *given: Any) -> None:
        real(self, *given)
        self.stopped = True

    with monkeypatch.context() as patched:
        patched.setattr(train.LocalTraining, "_step", asked)
        assert trained("checkpoint.every=0") == ExitCode.INTERRUPTED
    assert Path("runs/one/checkpoints/step-1/training.json").exists()
    assert trained("--resume") == 0
    assert summary()["steps"] == 4


def test_its_status_is_told_while_it_trains_when_it_was_killed_and_when_it_is_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Killed(BaseException):
        """As a SIGKILL: nothing is written any more."""

    screens: list[str] = []
    real = train.LocalTraining._step

    def looked_at(self: train.LocalTraining, *given: Any) -> None:
        if self.alone.done == 2:
            self._written_s = float("-inf")
        real(self, *given)
        if self.alone.done == 3:
            capsys.readouterr()
            assert main.main(["status", "runs/one"]) == 0
            screens.append(capsys.readouterr().out)
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(train.LocalTraining, "_step", looked_at)
        with pytest.raises(Killed):
            trained()
    assert "one: step 3/4, loss" in screens[0] and "nobody" not in screens[0] and "not running" not in screens[0]
    assert main.main(["status"]) == 0
    dead = capsys.readouterr().out
    assert "DEAD since 20" in dead and "`shoal train ... --resume` goes on" in dead and "to go," not in dead
    assert trained("--resume") == 0
    assert main.main(["status", "runs/one"]) == 0
    said = capsys.readouterr().out
    assert "\nEvery sample counted once.\n" in said and said.endswith("(all of it: shoal leaderboard)\n")


def test_what_has_no_room_is_refused_with_what_is_needed_before_anything_is_trained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = refused(capsys, "device.memory=10 kB")
    needed = re.search(r"try device\.memory_bytes=(\d+)", said)
    assert "the model: device.memory_bytes = 10,000 is too little for this stage's largest unit" in said
    assert re.search(r"unit, that of \S+weight: at least [\d,]+ bytes are needed, [\d,]+ of them for parameters", said)
    assert needed is not None
    assert trained(f"device.memory={needed[1]}", "run.steps=1", "checkpoint.at_end=false", "checkpoint.every=0") == 0
    assert "takes 17.0 KiB before any activation" not in refused(capsys, "device.memory_bytes=1 kB")
    said = refused(capsys, "device.host_bytes=20 kB")
    assert re.search(r"the model takes [\d.]+ KiB of host memory .*device\.host_bytes allows 19\.5 KiB", said)
    assert "; try" not in said, "not even a stage for each block would do"
    wider = ("model.hidden_size=64", "model.intermediate_size=64")
    said = refused(capsys, "device.host_bytes=1 MB", *wider)
    assert said.endswith("; try train.moments=8bit or shoal run with run.stages=2 on several machines\n")
    assert "; try shoal run with run.stages=3 on" in refused(capsys, "device.host_bytes=600 kB", *wider)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("train.local_steps=4",), "here is nobody to average with; try train.local_steps=1"),
        (("device.executor=emulated",), "trains nothing"),
        (("model.family=mamba",), "has no pipeline plan"),
        (("one.toml", "two.toml"), "'two.toml' is a second file"),
    ],
)
def test_what_is_no_machines_own_training_is_refused(
    words: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert complaint in refused(capsys, *words)


def test_threads_are_pytorchs_choice_unless_they_are_set() -> None:
    Path("set.toml").write_text("[device]\nthreads = 1\n")
    Path("unset.toml").write_text("[train]\nwarmup = 0\n")
    for words, threads in (
        ([], 0),
        (["unset.toml"], 0),
        (["set.toml"], 1),
        (["device.threads=2"], 2),
        (["set.toml", "device.threads=3"], 3),
    ):
        assert train.configured([*SMALL, *words]).device.threads == threads
    before = torch.get_num_threads()
    try:
        assert trained("device.threads=2", "run.steps=1", "checkpoint.at_end=false", "checkpoint.every=0") == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_free_memory_is_what_the_container_and_the_machine_both_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    without = host.free_bytes()
    assert without is not None and without > 0
    for name, text in (
        ("memory.max", "5000"),
        ("memory.current", "3000"),
        ("memory.stat", "anon 1\ninactive_file 500\n"),
    ):
        (tmp_path / name).write_text(text)
    assert host.free_bytes() == 2500
    (tmp_path / "memory.max").write_text("max")
    assert host.free_bytes() != 2500


@pytest.mark.parametrize(("round_bytes", "per_parameter", "besides"), [(1 << 30, 16 + 4 + 12, 0), (1024, 16 + 4, 1024)])
def test_a_peer_that_averages_needs_room_for_that_too(round_bytes: int, per_parameter: int, besides: int) -> None:
    words = ["run.stages=1", "run.peers=2", f"run.averaging_memory_bytes={round_bytes}"]
    config = configuration.load(None, [*SMALL, *words])
    values = sum(value.numel() for _, value in stages.hollow(config, 0).named_parameters())
    needed = values * per_parameter + besides
    fit.check_host(configuration.load(None, [*SMALL, *words, f"device.host_bytes={needed}"]), 0)
    with pytest.raises(ValueError, match=r"KiB for averaging\), device\.host_bytes allows"):
        fit.check_host(configuration.load(None, [*SMALL, *words, f"device.host_bytes={needed - 1}"]), 0)

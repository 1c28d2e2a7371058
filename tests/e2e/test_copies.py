"""Checkpoints of machines without a disk in common: two processes with directories of their own save, are killed, and go on from what
both hold, from what one of them holds, and from damaged files as long as one copy of each is whole."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.e2e.test_run import NO_MODEL, Start, end, start, summary, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
__all__ = ["start"]  # a fixture

WORDS = ("run.stages=2", "run.peers=2", "checkpoint.every=2", "checkpoint.keep=9")
MODEL = ("model.layers=2",)


class Machines:
    """The founder's, with runs/tiny, and the guest's, with guest/tiny."""

    def __init__(self, start: Start, place: Path, *words: str) -> None:
        self.start, self.place, self.words = start, place, words
        self.guests: tuple[str, ...] = ()  # settings of the guest alone
        self.host: subprocess.Popen[str]
        self.guest: subprocess.Popen[str]

    @property
    def stores(self) -> tuple[Path, Path]:
        return self.place / "runs/tiny/checkpoints", self.place / "guest/tiny/checkpoints"

    def train(self, *words: str) -> None:
        self.host = self.start("run", "tiny.toml", "--here", "1", *WORDS, *self.words, *words)
        bootstrap = self.place / "runs/tiny/bootstrap.json"
        bootstrap.unlink(missing_ok=True)
        wait_for(lambda: self.host.poll() is not None or (bootstrap.exists() and json.loads(bootstrap.read_bytes())))
        if self.host.poll() is not None:
            return
        invite = end(self.start("invite", "tiny.toml")).strip()
        local = [word for word in self.words if word.startswith("device.")]
        files = ("--files", ".") if not local else ()
        self.guest = self.start("join", invite, "run.dir=guest", *files, *local, *self.guests)

    def kill(self) -> None:
        for launcher in (self.host, self.guest):
            launcher.kill()
            launcher.wait()

    def save(self, step: int, every: int = 0) -> int:
        """Train, saving each `every` steps or else each `step`, until that step or a later one is saved on both machines, and kill
        everything. Returns the newest that both hold; what one of them has made visible since then is removed."""
        self.train("run.steps=100000", f"checkpoint.every={every or step}")
        wait_for(lambda: self.host.poll() is not None or max(self.common(), default=0) >= step)
        self.kill()
        newest = max(self.common())
        for store in self.stores:
            for later in [match for match in steps_in(store) if match > newest]:
                shutil.rmtree(store / f"step-{later}")
        return newest

    def common(self) -> set[int]:
        return steps_in(self.stores[0]) & steps_in(self.stores[1])

    def goes_on(self, steps: int) -> str:
        self.train(f"run.steps={steps}", "--resume")
        said = end(self.host)
        assert "the run is finished" in end(self.guest)
        match = summary(self.place)
        assert (match["balanced"], match["lost"], match["steps"], match["saved"]) == (True, 0, steps, steps), said
        return said


def steps_in(store: Path) -> set[int]:
    return {int(path.name[5:]) for path in store.glob("step-*")}


def flip(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-9] + bytes([data[-9] ^ 4]) + data[-8:])


def every_file(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def machines(start: Start, tmp_path: Path) -> Machines:
    return Machines(start, tmp_path, *MODEL)


def test_two_machines_save_on_both_are_killed_and_go_on(machines: Machines) -> None:
    step = machines.save(4)
    for store in machines.stores:
        names = [path.name for path in every_file(store / f"step-{step}")]
        assert [name for name in names if name.endswith(".safetensors")] == [
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "stage-00001-of-00002.safetensors",
            "stage-00002-of-00002.safetensors",
        ]
    said = machines.goes_on(step + 4)
    assert f"step {step + 4} saved at " in said or "Every sample counted once." in said


@pytest.mark.parametrize("lost", [0, 1])
def test_either_machine_may_have_lost_its_checkpoints(machines: Machines, lost: int) -> None:
    step = machines.save(4)
    shutil.rmtree(machines.stores[lost])
    said = machines.goes_on(step + 4)
    if not lost:
        assert "is downloaded from the machines that join" in said
    assert summary(machines.place)["first_step"] in steps_in(machines.stores[1 - lost]), "as the founder's commits say"


def test_the_founders_whole_machine_may_be_gone(machines: Machines) -> None:
    step = machines.save(4)
    shutil.rmtree(machines.place / "runs")
    words = (*WORDS, *machines.words, f"checkpoint.url={machines.stores[1]}")
    end(machines.start("run", "tiny.toml", *words, "--resume", "--adopt", f"run.steps={step + 4}"))
    match = summary(machines.place)
    assert (match["balanced"], match["lost"], match["adopted_steps"], match["first_step"]) == (True, 0, step, step)


def test_a_bit_in_every_file_of_one_machine_is_found_and_repaired(machines: Machines) -> None:
    step = machines.save(4)
    whole = {path.name: path.read_bytes() for path in every_file(machines.stores[1] / f"step-{step}")}
    for path in every_file(machines.stores[0] / f"step-{step}"):
        flip(path)
    machines.goes_on(step + 4)
    repaired = {path.name: path.read_bytes() for path in every_file(machines.stores[0] / f"step-{step}")}
    differing = [name for name in sorted(repaired) if repaired[name] != whole[name]]
    shards = [[name for name in sorted(repaired) if f"0000{stage}-of" in name] for stage in (1, 2)]
    assert differing in shards, "the founder's peer serves one of the two stages and repairs what it needs"


def test_what_no_machine_has_whole_is_refused_by_name_and_the_next_time_an_older_one_is_taken(
    machines: Machines,
) -> None:
    step = machines.save(4, every=2)
    for store in machines.stores:
        flip(store / f"step-{step}/model-00002-of-00002.safetensors")
    machines.train(f"run.steps={step + 4}", "--resume")
    said = end(machines.host, code=1)
    assert "damaged: model-00002-of-00002.safetensors" in said and "no other peer has it" in said
    assert f"the newest whole one is of step {step - 2}" in said
    end(machines.guest, code=1)
    said = machines.goes_on(step + 4)
    assert f"no machine could load the checkpoint of step {step}; an older one is taken" in said
    assert summary(machines.place)["first_step"] == step - 2


def test_machines_without_a_model_save_on_both_too(start: Start, tmp_path: Path) -> None:
    machines = Machines(start, tmp_path, *NO_MODEL, "device.emulated_s=0.05")
    machines.train("run.steps=8")
    assert "NOTHING SAVED" not in end(machines.host)
    end(machines.guest)
    assert all((store / "step-8").exists() for store in machines.stores)


def test_a_guest_without_room_is_named_and_the_run_is_saved_in_one_copy(start: Start, tmp_path: Path) -> None:
    machines = Machines(start, tmp_path, *NO_MODEL, "device.emulated_s=0.05")
    machines.guests = ("checkpoint.disk_bytes=1",)
    machines.train("run.steps=8", "run.stages=1")
    said = end(machines.host)
    assert "step 8 is saved in 1 of 2 copies: " in said and "checkpoint.disk_bytes" in said
    end(machines.guest)
    assert (machines.stores[0] / "step-8").exists() and not list(machines.stores[1].glob("step-*"))

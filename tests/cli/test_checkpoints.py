"""Which checkpoint a run begins with: its own, every byte of which is whole; another run's only with --adopt; never step 0 in silence."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest
from tests.cli.test_train import SMALL, summary, text, trained

from shoal.config import Config, Run
from shoal.core.messages import Committed
from shoal.exit_codes import ExitCode
from shoal.launcher.files import checkpoints, rundir
from shoal.runtime.checkpoints.catalog import Catalog
from shoal.runtime.records.account import CommittedStep

__all__ = ["text"]  # a fixture

CK = "checkpoint.url=CK"


def steps() -> list[int]:
    return sorted(int(path.name[5:]) for path in Path("CK").glob("step-*") if path.name[5:].isdigit())


def content() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(Path("CK").rglob("*")) if path.is_file()}


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What is said when that is refused; what lies in CK is untouched."""
    before = content()
    assert trained(*words) == ExitCode.USER_ERROR
    assert content() == before
    return capsys.readouterr().err


def test_another_runs_directory_is_refused_at_the_start_and_nothing_there_changes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert trained(CK) == 0
    key = checkpoints.authority(Path("runs/one"))
    said = refusal(capsys, CK, "run.name=two", "run.steps=2")
    assert f"checkpoint.url = CK holds another run's checkpoints (steps 2 and 4 of run 'one' (key {key[:8]}))" in said
    assert "Give another checkpoint.url; or --adopt to begin anew" in said
    assert not Path("runs/two/commits.jsonl").exists()
    said = refusal(capsys, CK, "run.name=two", "--resume")
    assert "steps 2 and 4 of run 'one'" in said and "this is run 'two'" in said and "--adopt" in said
    said = refusal(capsys, CK)  # the same name, without --resume: another run
    assert "holds an earlier session's checkpoints (steps 2 and 4 of run 'one'" in said
    assert "Add --resume to go on from them" in said
    assert Path("runs/one/summary.json").exists(), "it was not set aside"
    assert trained(CK, "run.steps=6", "--resume") == 0
    assert (summary()["steps"], summary()["balanced"]) == (6, True)


def test_what_another_run_saved_becomes_this_runs_only_by_adopt(capsys: pytest.CaptureFixture[str]) -> None:
    assert trained(CK) == 0
    assert trained(CK, "run.name=two", "run.steps=6", "--resume", "--adopt") == 0
    assert "the checkpoints of steps 2 and 4 of run 'one'" in capsys.readouterr().out
    two = checkpoints.authority(Path("runs/two"))
    assert [(entry.step, entry.wrong) for entry in Catalog("CK", two).entries()] == [(6, ""), (4, ""), (2, "")]
    assert "steps 2, 4 and 6 of run 'two'" in refusal(capsys, CK, "--resume"), "the first run does not take them back"


def test_a_setting_that_changed_is_named_and_one_that_may_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert trained() == 0
    said = refusal(capsys, "--resume", "train.batch=4", "train.microbatch=1")
    assert "has train.batch = 8, this run has 4: the place in the data is counted in it" in said
    assert trained("--resume", "run.steps=6", "train.learning_rate=0.5") == 0
    assert "changed since the checkpoint of step 4: train.learning_rate: 0.001 -> 0.5" in capsys.readouterr().out


def test_traces_of_earlier_sessions_take_no_more_than_their_room(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"trace-before-{number}.jsonl").write_bytes(b"x" * 100)
        os.utime(tmp_path / f"trace-before-{number}.jsonl", (number, number))
    rundir._thin_earlier(tmp_path, 250)
    assert sorted(path.name for path in tmp_path.glob("trace*")) == ["trace-before-3.jsonl", "trace-before-4.jsonl"]
    rundir._thin_earlier(tmp_path, 0)
    assert [path.name for path in tmp_path.glob("trace*")] == ["trace-before-4.jsonl"], "the newest stays"


def test_beginning_anew_with_adopt_keeps_what_was_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert trained(CK) == 0
    kept = (Path("CK/step-4/training.json")).read_bytes()
    assert trained(CK, "run.name=two", "run.steps=2", "--adopt") == 0
    assert steps() == [2]
    assert Path("CK/step-4.before/training.json").read_bytes() == kept
    assert "step-4.before" in capsys.readouterr().out


def test_an_adopted_checkpoint_of_another_model_is_refused_and_keeps_its_owner(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert trained(CK) == 0
    said = refusal(capsys, CK, "run.name=two", "--resume", "--adopt", "model.layers=2")
    assert "has model.layers = 3, this run has 2" in said


def test_checkpoints_from_before_there_were_keys_are_nobodys_until_adopted(capsys: pytest.CaptureFixture[str]) -> None:
    assert trained(CK) == 0
    for path in Path("CK").glob("step-*/training.json"):
        record = json.loads(path.read_text())
        for name in ("authority", "model", "adopted", "seal"):
            del record[name]
        path.write_text(json.dumps(record))
    assert "from before checkpoints carried their run's key" in refusal(capsys, CK, "run.steps=6", "--resume")
    assert trained(CK, "run.steps=6", "--resume", "--adopt") == 0
    assert (summary()["steps"], summary()["balanced"]) == (6, True)


def test_an_operator_is_given_the_newest_whole_checkpoint_of_that_run_only() -> None:
    assert trained(CK) == 0
    from shoal.cli.train import configured

    config, run = configured([*SMALL, CK]), checkpoints.authority(Path("runs/one"))
    assert checkpoints.saved_by(config, run) == 4
    damage("step-4")
    assert checkpoints.saved_by(config, run) == 2
    damage("step-2")
    with pytest.raises(ValueError, match=r"of this run .* that is whole: .*/CK/step-4: damaged.*/CK/step-2: damaged"):
        checkpoints.saved_by(config, run)
    with pytest.raises(ValueError, match=r"CK/step-4: of another run: run 'one'"):
        checkpoints.saved_by(config, "z" * 32)


def test_resume_names_each_checkpoint_and_what_is_wrong_where_none_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert trained(CK) == 0
    damage("step-4")
    newer_format("step-2")
    said = refusal(capsys, CK, "run.steps=6", "--resume")
    assert "CK holds 2 checkpoints, and none can be gone on from: " in said
    assert "/CK/step-4: damaged: model-00001-of-00001.safetensors has SHA-256" in said
    assert "/CK/step-2: foreign: training.json has format 99, this version reads 1" in said
    assert "give the command without --resume to begin at step 0" in said


def test_a_damaged_checkpoint_is_named_and_the_next_older_one_is_said_to_be_taken(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert trained(CK) == 0
    damage("step-4")
    assert trained(CK, "run.steps=6", "--resume") == 0
    said = capsys.readouterr().out
    assert "/CK/step-4: damaged: model-00001-of-00001.safetensors has SHA-256" in said and "step-4.damaged" in said
    assert "GOING BACK to step 2: its checkpoint is the newest that is whole" in said
    assert "2 steps that were committed after step 2 are undone and trained again" in said
    assert (summary()["steps"], summary()["undone"], summary()["balanced"]) == (6, 8, True)


def test_what_a_newer_version_wrote_is_never_passed_over_and_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    assert trained(CK) == 0
    newer_format("step-4")
    said = refusal(capsys, CK, "run.steps=6", "--resume")
    assert "newer than the checkpoint of step 2" in said and "/CK/step-4: foreign: training.json has format 99" in said


def test_resume_begins_at_step_0_only_where_nothing_was_ever_saved(capsys: pytest.CaptureFixture[str]) -> None:
    assert trained(CK, "--resume") == 0
    assert "--resume: there is no checkpoint in CK yet: training begins at step 0" in capsys.readouterr().out
    Path("CK").rename("moved")
    said = refusal(capsys, CK, "run.steps=6", "--resume")
    assert "a checkpoint of step 4 was saved, and none is at CK" in said
    Path("moved").rename("CK")
    assert trained(CK, "run.steps=6", "--resume") == 0


def newer_format(name: str) -> None:
    path = Path("CK", name, "training.json")
    path.write_text(path.read_text().replace('"format": 1', '"format": 99'))


def damage(name: str) -> None:
    """One bit of its weights."""
    path = next(Path("CK", name).glob("model-*.safetensors"))
    data = path.read_bytes()
    path.write_bytes(data[:-9] + bytes([data[-9] ^ 4]) + data[-8:])


def test_a_lost_directory_is_never_taken_for_one_in_which_nothing_was_saved(tmp_path: Path) -> None:
    """The last commit that asked for a checkpoint does not know yet that it was saved; another machine may hold it."""
    config = Config(run=Run(name="one", dir=str(tmp_path), steps=99))
    directory = tmp_path / "one"
    directory.mkdir()
    commits = [CommittedStep(0, Committed(step, 1, 1.0, 1.0, (), (), save=step % 2 == 1), 0.0) for step in range(5)]
    text = b"".join(msgspec.json.encode(commit) + b"\n" for commit in commits)
    for before, wanted in ((None, 4), (4, 2), (2, 0)):
        (directory / "commits.jsonl").write_bytes(text)
        if before is not None:
            rundir.pass_over(directory, before)
        assert rundir.resume(config, directory, others=True).first_step == wanted


def test_only_a_run_of_ones_own_is_said_to_go_on_with_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A guest that joins again was told that its run had been killed and could be resumed."""
    directory = tmp_path / "ours"
    for own, serves, steps in ((False, False, 1), (True, False, 1), (True, True, 1), (True, False, 0)):
        directory.mkdir()
        (directory / "commits.jsonl").write_bytes(b"{}\n" * steps)
        (directory / "config.toml").write_text(f"[run]\nserve = {str(serves).lower()}\n")
        if own:
            (directory / checkpoints.KEY).write_bytes(b"")
        rundir.set_aside(directory)
        resumes = (
            own and not serves and steps > 0
        )  # `shoal serve` trains nothing; a wrong row ends a run before its first step
        assert ("add --resume" in capsys.readouterr().out) is resumes
        directory.rmdir()

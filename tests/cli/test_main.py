"""The program: help without heavy imports, errors as one line, exit codes."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal import config
from shoal.cli import main as program
from shoal.config.describe import keys
from shoal.launcher.saved import checkpoint


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], int]], None]:
    """Puts a command in the place of `shoal run`."""

    def install(body: Callable[[], int]) -> None:
        module = types.ModuleType("shoal.cli.run")
        module.arguments = lambda parser: None  # type: ignore[attr-defined]
        module.main = lambda args: body()  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "shoal.cli.run", module)

    return install


def raising(error: BaseException) -> Callable[[], int]:
    def body() -> int:
        raise error

    return body


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom shoal.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print([name for name in ('torch', 'numpy', 'rich', 'transformers', 'hivemind') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    for name in program.COMMANDS:
        assert f"\n  {name} " in done.stdout


def test_every_command_has_its_file() -> None:
    folder = Path(program.__file__).parent
    assert [name for name in program.COMMANDS if not (folder / f"{name}.py").is_file()] == []


@pytest.mark.parametrize("name", program.COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        program.main([name, "--help"])
    assert left.value.code == 0
    assert f"usage: shoal {name}" in capsys.readouterr().out


def test_what_a_user_can_mend_is_one_line_and_exit_code_2(command: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["config", "train.microbatch=5"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "shoal: train.microbatch = 5 does not divide train.batch = 64; try 4\n"
    assert captured.out == ""


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["config", str(tmp_path / "none.toml")]) == 2
    assert capsys.readouterr().err == f"shoal: {tmp_path}/none.toml: No such file or directory\n"


def test_control_c_is_exit_code_130(command: Callable[[Callable[[], int]], None]) -> None:
    command(raising(KeyboardInterrupt()))
    assert program.main(["run"]) == 130


def test_an_error_of_several_lines_is_told_in_one(
    command: Callable[[Callable[[], int]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command(raising(ValueError("this\n  and that")))
    assert program.main(["run"]) == 2
    assert capsys.readouterr().err == "shoal: this and that\n"


def test_a_mistake_of_ours_is_shown_in_full(command: Callable[[Callable[[], int]], None]) -> None:
    command(raising(AssertionError("our mistake")))
    with pytest.raises(AssertionError):
        program.main(["run"])
    command(raising(ValueError("where?")))
    with pytest.raises(ValueError, match="where"):
        program.main(["run", "--traceback"])


def test_the_exit_code_of_a_command_is_that_of_the_program(command: Callable[[Callable[[], int]], None]) -> None:
    command(lambda: 1)
    assert program.main(["run"]) == 1


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        program.main(["rum"])
    assert left.value.code == 2
    assert "rum" in capsys.readouterr().err


def test_config_prints_what_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["config", "run.steps=5", "network.bandwidth_Bps=200 Mbit/s"]) == 0
    path = tmp_path / "printed.toml"
    path.write_text(capsys.readouterr().out)
    assert config.load(path) == config.load(None, ["run.steps=5", "network.bandwidth_Bps=200 Mbit/s"])


def test_init_writes_a_config_named_after_its_file_and_never_overwrites(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    assert program.main(["init", str(path), "run.stages=2"]) == 0
    tree = config.load(path)
    assert (tree.run.name, tree.run.stages) == ("mine", 2)
    written = path.read_text()
    assert all(f"\n# {key.description}\n{key.name} = " in written for key in keys().values())
    assert program.main(["init", str(path)]) == 2
    assert "exists" in capsys.readouterr().err
    assert config.load(path) == tree
    assert program.main(["init", str(path), "--force", "run.stages=1"]) == 0
    assert config.load(path).run.stages == 1


def test_the_newest_whole_checkpoint_of_a_run_is_found(tmp_path: Path) -> None:
    for name in ("step-9", "step-10", "step-11", "notes"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    for name in ("step-9", "step-10"):
        (tmp_path / "checkpoints" / name / "config.json").write_text("{}")
    assert checkpoint(str(tmp_path)).name == "step-10"
    assert checkpoint(str(tmp_path / "checkpoints" / "step-9")).name == "step-9"
    with pytest.raises(ValueError, match="holds no checkpoint"):
        checkpoint(str(tmp_path / "checkpoints" / "step-11"))
    with pytest.raises(ValueError, match="no such directory"):
        checkpoint(str(tmp_path / "nowhere"))

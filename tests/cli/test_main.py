"""The program: help without heavy imports, errors as one line, exit codes."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from shoal import config, exit_codes
from shoal.cli import completion, demo
from shoal.cli import main as program
from shoal.config.describe import keys
from shoal.dashboard.terminal import Snapshot
from shoal.exit_codes import ExitCode
from shoal.launcher.files.saved import checkpoint
from shoal.transport.identity.invite import Authority


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


# Not imported by a command that says something at once; each takes from 30 ms to some seconds.
COMPUTING = ("torch", "transformers", "hivemind", "numba", "scipy", "matplotlib", "datasets")
SLOW = (*COMPUTING, "fsspec", "cryptography.x509", "tokenizers")
EVERYTHING_BUT_ASYNCIO = (*SLOW, "numpy", "rich", "cryptography", "shtab")
EVERYTHING = (*EVERYTHING_BUT_ASYNCIO, "asyncio", "ssl")


def called(words: Sequence[str], not_imported: Sequence[str], cwd: Path | None = None) -> str:
    """What the command prints. It imports none of these modules."""
    code = (
        f"import sys\nfrom shoal.cli.main import main\ncode = 0\n"
        f"try: code = main({list(words)!r})\nexcept SystemExit: pass\n"
        f"print([name for name in {not_imported!r} if name in sys.modules]); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=cwd)
    assert done.stdout.splitlines()[-1] == "[]"
    return done.stdout


def test_help_and_version_import_nothing() -> None:
    listing = called(["--help"], EVERYTHING)
    for name in program.COMMANDS:
        assert f"\n  {name} " in listing
    assert called(["--version"], EVERYTHING).startswith("shoal ")


@pytest.mark.parametrize(
    ("command", "not_imported"),
    [
        ("config", EVERYTHING),
        ("init", EVERYTHING),
        ("simulate", EVERYTHING),
        ("generate", EVERYTHING),
        ("completion", EVERYTHING),
        ("status", (*SLOW, "numpy", "asyncio")),
        ("invite", (*SLOW, "numpy")),
        ("revoke", (*SLOW, "numpy")),
        ("replay", (*SLOW, "numpy")),
        ("join", EVERYTHING_BUT_ASYNCIO),
        ("doctor", EVERYTHING_BUT_ASYNCIO),
        ("run", SLOW),
        ("demo", SLOW),
        ("train", SLOW),
        ("chaos", SLOW),
        ("recover", SLOW),
        ("probe", SLOW),
    ],
)
def test_what_a_command_imports_before_it_knows_what_to_do(command: str, not_imported: Sequence[str]) -> None:
    called([command, "--help"], not_imported)


def test_configurations_and_states_are_shown_without_what_computes(tmp_path: Path) -> None:
    called(["config", "run.steps=5"], EVERYTHING)
    called(["init", str(tmp_path / "mine.toml")], EVERYTHING)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "status.json").write_bytes(msgspec.json.encode(a_snapshot()))
    called(["status"], (*SLOW, "numpy", "asyncio"), tmp_path)


def a_snapshot() -> Snapshot:
    return Snapshot(name="mine", elapsed_s=1.0, step=1, steps=5, stages=1)


def test_an_invite_is_made_without_torch(tmp_path: Path) -> None:
    """It reads the data's digest, and cuts no model."""
    directory = tmp_path / "runs" / "mine"
    directory.mkdir(parents=True)
    (tmp_path / "texts").write_text("some text of some length\n" * 100)
    settings = ["run.name=mine", "data.source=text", f"data.path={tmp_path}/texts", "data.sequence=16"]
    (directory / "config.toml").write_text(config.text(config.load(None, settings)))
    (directory / "bootstrap.json").write_text('["192.0.2.1:4711"]')
    Authority.load(directory / "authority.key")
    printed = called(["invite", str(directory / "config.toml")], COMPUTING, tmp_path)
    assert printed.startswith("shoal1")


def test_the_documented_exit_codes_are_those_of_the_program() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    assert f"\n{exit_codes.table()}\n" in page
    assert set(exit_codes.MEANING) == set(ExitCode)


def test_the_demo_is_the_quickstart_and_takes_the_options_of_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert config.load(demo.CONFIG).run.name == "quickstart"
    assert program.main(["demo", "run.peers=5", "--here", "6"]) == ExitCode.USER_ERROR
    assert "--here 6: training starts with run.peers = 5" in capsys.readouterr().err
    assert (Path(__file__).parents[2] / "configs" / "quickstart.toml").resolve() == demo.CONFIG.resolve()


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_the_completion_of_a_shell_knows_commands_and_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab", reason="`make setup` installs it")
    assert program.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(word in script for word in (*program.COMMANDS, "--kill-every", "--resume"))


def test_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab", reason="`make setup` installs it")
    assert program.main(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    (tmp_path / "mine.toml").touch()
    ask = 'COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _shtab_shoal; echo "${COMPREPLY[@]}"'
    for words, wanted in (
        ("shoal ini", "init"),
        ("shoal run mine.toml --kill", "--kill-every"),
        ("shoal run mi", "mine.toml"),
    ):
        line = " ".join(f"'{word}'" for word in words.split())
        done = subprocess.run(
            ["bash", "-c", f". ./script; COMP_WORDS=({line}); {ask}"], cwd=tmp_path, capture_output=True, text=True
        )
        assert wanted in done.stdout.split(), (words, done.stderr)


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

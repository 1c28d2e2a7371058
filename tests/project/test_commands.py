"""Every `shoal ...` line that a page quotes names a command, options and settings that exist; a line of a code block parses whole."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest

from shoal.cli.main import COMMANDS, main
from shoal.config.describe import keys, sections

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "docs", ROOT / "docs" / "launch", ROOT / "docs" / "variants")
PAGES = [ROOT / "README.md", *(page for folder in FOLDERS for page in sorted(folder.glob("*.md")))]
_BLOCK = re.compile(r"^```[a-z]*\n(.*?)^```", re.M | re.S)
SHORTCUTS = {"device.memory"}  # `shoal train device.memory=SIZE` takes it apart


def parser_of(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(command, exit_on_error=False)
    parser.add_argument("--traceback", action="store_true")
    importlib.import_module(f"shoal.cli.{command}").arguments(parser)
    return parser


def in_blocks(text: str) -> list[str]:
    """The command lines of a page's code blocks."""
    lines = [line.removeprefix(".venv/bin/") for block in _BLOCK.findall(text) for line in block.splitlines()]
    return [line for line in lines if line.startswith("shoal ") and not line.startswith("shoal --")]


def in_sentences(text: str) -> list[str]:
    """The commands that sentences and tables quote, with their placeholders."""
    quotes = re.findall(r"`(shoal [a-z][^`]*)`", _BLOCK.sub("", text).replace("\\|", "|"))
    return [quote for quote in quotes if not quote.startswith("shoal COMMAND")]


def unknown(line: str) -> list[str]:
    """What of a quoted line does not exist: the command, options, settings."""
    command, *words = shlex.split(line.replace("[", "").replace("]", ""), comments=True)[1:]
    if command not in COMMANDS:
        return [command]
    known = parser_of(command)._option_string_actions
    settings = [word.partition("=")[0] for word in words if "=" in word and not word.startswith("-")]
    return [
        *(word for word in words if word.startswith("--") and word.partition("=")[0] not in known),
        *(
            path
            for path in settings
            if path.partition(".")[0] in sections() and "." in path and path not in keys() and path not in SHORTCUTS
        ),
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_quoted_commands_options_and_settings_exist(page: Path) -> None:
    text = page.read_text()
    assert {line: missing for line in in_blocks(text) + in_sentences(text) if (missing := unknown(line))} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_line_of_a_code_block_parses(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in in_blocks(page.read_text()):
        command, *words = shlex.split(line, comments=True)[1:]
        try:
            parser_of(command).parse_intermixed_args(words)
        except (argparse.ArgumentError, SystemExit):
            pytest.fail(f"{line}: {capsys.readouterr().err}")


def test_the_pages_are_searched() -> None:
    """A changed format of the pages must not leave the tests above with nothing to look at."""
    text = "\n".join(page.read_text() for page in PAGES)
    assert len(in_blocks(text)) > 25 and len(in_sentences(text)) > 60
    assert unknown("shoal run my.toml --no-such run.no_such=1") == ["--no-such", "run.no_such"]
    assert unknown("shoal fly") == ["fly"]


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_quoted_simulation_is_what_the_command_prints_today(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    quoted = re.search(r"^seed 7: .* events, ", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert quoted is not None
    assert main(["simulate", "chaos", "seed=7"]) == 0
    assert quoted[0] in capsys.readouterr().out

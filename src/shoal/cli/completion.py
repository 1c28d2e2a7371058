"""`shoal completion SHELL`: the script that makes a shell complete commands, options and files. It starts no Python at a TAB."""

from __future__ import annotations

import argparse

from shoal.cli import main as program

SHELLS = ("bash", "zsh")
FILES = ("FILE", "CSV", "CONFIG")  # what stands in a metavar or a name for a file
DIRECTORIES = ("DIR",)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "shell", choices=SHELLS, help="eval its output, or keep it where the shell looks for completions"
    )


def main(args: argparse.Namespace) -> int:
    import shtab

    print(shtab.complete(whole(), args.shell))
    return 0


def whole() -> argparse.ArgumentParser:
    """One parser of all commands, which imports every one of them."""
    import shtab

    parser = argparse.ArgumentParser("shoal")
    commands = parser.add_subparsers(dest="command")
    for name, text in program.COMMANDS.items():
        command = commands.add_parser(name, help=text)
        program.command(name).arguments(command)
        for action in command._actions:
            words = f"{action.metavar or ''} {action.dest.upper()}"
            if any(word in words for word in DIRECTORIES):
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
            elif any(word in words for word in (*FILES, "RUN", "CHECKPOINT", "WORDS", "SCENARIO")):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    return parser

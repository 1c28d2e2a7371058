"""`shoal config [FILE] [a.b=c ...]`: the whole effective tree, each setting described, as TOML that `shoal run` reads back."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from shoal import config


def arguments(parser: argparse.ArgumentParser) -> None:
    configured(parser, required=False)


def main(args: argparse.Namespace) -> int:
    print(config.text(load(args)))
    return 0


def configured(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Declare CONFIG and settings, for every command that takes them; `load` reads them."""
    file = "a TOML file" if required else "a TOML file (default: all default values), and settings that replace its own"
    parser.add_argument("words", nargs="+" if required else "*", metavar="CONFIG | section.field=value", help=file)


def load(args: argparse.Namespace) -> config.Config:
    """The configuration that the words name: one file, wherever it stands, and settings that override it."""
    return config.load(*divided(args.words))


def divided(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The file among the words, and the settings."""
    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise ValueError(f"two configurations, {files[0]} and {files[1]}; a setting is written section.field=value")
    return files[0] if files else None, [word for word in words if "=" in word]

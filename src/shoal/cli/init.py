"""`shoal init FILE [a.b=c ...]`: write a config with every setting and what it means, to be edited."""

from __future__ import annotations

import argparse
from pathlib import Path

from shoal import config


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="the TOML file to write; the run is named after it")
    parser.add_argument(
        "settings", nargs="*", metavar="section.field=value", help="settings to write instead of defaults"
    )
    parser.add_argument("--like", metavar="CONFIG", help="start from this config instead of the defaults")
    parser.add_argument("--force", action="store_true", help="overwrite the file")


def main(args: argparse.Namespace) -> int:
    path = Path(args.file)
    tree = config.load(args.like, [f"run.name={path.stem}", *args.settings])
    try:
        with open(path, "w" if args.force else "x", encoding="utf-8") as file:
            file.write(f"# Made by `shoal init`. Fields left out keep these values.\n\n{config.text(tree)}")
    except FileExistsError:
        raise ValueError(f"{path} exists; choose another name, or --force to overwrite it") from None
    print(f"wrote {path}. Edit it, then one of:")
    print(f"  shoal run {path}            all {tree.run.peers} peers on this machine")
    print(f"  shoal run {path} --here 1   one here; it prints the command for other machines")
    return 0

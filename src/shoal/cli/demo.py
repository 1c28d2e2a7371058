"""`shoal demo`: `shoal run` with the configuration that comes with the package; nothing to download, no checkout needed."""

from __future__ import annotations

import argparse
from pathlib import Path

from shoal.cli import run
from shoal.cli.run import main as main

CONFIG = Path(__file__).with_name("quickstart.toml")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(config=str(CONFIG))
    run.options(parser)

"""Writes docs/live-view.svg from the status of a real run: `python docs/live_view.py runs/NAME/status.json`.

`status.json` holds what the terminal shows at that moment, so the picture is the live view itself, drawn by the same function.
"""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path

import msgspec
from rich.console import Console
from rich.terminal_theme import MONOKAI

from shoal.dashboard.terminal import Snapshot, render

PICTURE = Path(__file__).with_name("live-view.svg")
WIDTH, HEIGHT = 118, 34


def drawn(snapshot: Snapshot) -> str:
    console = Console(width=WIDTH, height=HEIGHT, record=True, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(render(snapshot, WIDTH, HEIGHT))
    picture = console.export_svg(title=f"shoal run: {snapshot.name}", theme=MONOKAI, unique_id="live")
    return re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.S)  # no fonts from elsewhere


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("status", type=Path, help="status.json of a run")
    parser.add_argument("--out", type=Path, default=PICTURE)
    given = parser.parse_args()
    snapshot = msgspec.json.decode(given.status.read_bytes(), type=Snapshot)
    given.out.write_text(drawn(snapshot), encoding="utf-8")


if __name__ == "__main__":
    main()

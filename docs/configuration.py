"""Writes docs/configuration.md from the sections in src/shoal/config/: `make configuration`. A test says when it is out of date."""

from __future__ import annotations

from pathlib import Path

from shoal import guest, units
from shoal.config import printing
from shoal.config.describe import Key, keys, sections, span, wanted

PAGE = Path(__file__).parent / "configuration.md"
UNITS = {"_s": "s", "_Bps": "B/s", "_bytes": "B"}


def page() -> str:
    text = [
        "# Configuration",
        "",
        f"All {len(keys())} settings. Made by `make configuration` from `src/shoal/config/`; do not edit.",
        "",
        "A run is a TOML file with these sections. A setting is also an argument: `shoal run my.toml train.batch=128`.",
        "`shoal init FILE` writes a file with all of them, and `shoal config [FILE]` prints what is in effect. A setting with a unit",
        'takes a plain number in it, or text: `"80 ms"`, `"200 Mbit/s"`, `"24 GiB"`. A setting that another one makes meaningless',
        "is refused.",
        "",
        "The last column says who decides: the *run*, for all its peers, in the file that it was started with and the invites made",
        "from it; each *machine* for itself; or the run by a *name* of a file or place, which a guest allows or gives itself",
        "(`shoal join --files`).",
    ]
    for section, kind in sections().items():
        text += ["", f"## {section}", "", (kind.__doc__ or "").strip(), ""]
        text += ["| setting | default | unit | values | meaning | decided by |", "|---|---|---|---|---|---|"]
        text += [_row(key) for key in keys().values() if key.section == section]
    return "\n".join(text) + "\n"


def _row(key: Key) -> str:
    unit, values = UNITS.get(units.suffix(key.name), ""), span(key)
    if not values or values.startswith("each "):
        values = ", ".join(filter(None, [wanted(key).partition(", such as")[0], values]))
    cells = [f"`{key.name}`", f"`{printing.toml(key, key.default)}`", unit, values, key.description, _decides(key)]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _decides(key: Key) -> str:
    if key.path in guest.RUN:
        return "run"
    return "machine" if key.path in guest.MACHINE else "name"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

"""Writes docs/results.md and its plots from benchmarks/results.jsonl: `make results`. A test says when the page is out of date."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "benchmarks"))

from report import Measurement, read  # noqa: E402

PAGE = HERE / "results.md"
PLOTS = HERE / "results"
HISTORY = 3  # points that a plot needs
CELL = 200  # characters that a cell of a table may have
History = dict[str, list[Measurement]]

INTRODUCTION = """\
# Results

The newest measurement of every benchmark, and whether it meets its target. `make results` writes this page from
`benchmarks/results.jsonl`; do not edit it. `make bench` runs the benchmarks, and `python benchmarks/NAME.py --record` adds a
measurement to the file.

A benchmark without a target compares two versions or shows a bound. `+` after a commit: the tree had changes that were not committed.
"""


def histories(measurements: Sequence[Measurement]) -> History:
    """By name, oldest first. Measurements of one name with another unit than the newest are not comparable and left out of it."""
    newest = {one.name: one for one in measurements}
    return {
        name: [one for one in measurements if one.name == name and one.unit == newest[name].unit]
        for name in sorted(newest, key=str.casefold)
    }


def page(measurements: Sequence[Measurement]) -> str:
    known = histories(measurements)
    newest = [history[-1] for history in known.values()]
    lines = [INTRODUCTION]
    for title, met in (("Targets not met", False), ("Targets met", True), ("Without a target", None)):
        rows = [one for one in newest if one.met is met]
        lines += [
            f"## {title}",
            "",
            "| benchmark | value | unit | target | date | commit |",
            "|---|---|---|---|---|---|",
        ]
        lines += [_row(one) for one in rows] or ["| none | | | | | |"]
        lines.append("")
    lines += ["## Details", ""]
    for name, history in known.items():
        lines += _details(name, history)
    return "\n".join(lines).rstrip() + "\n"


def plotted(measurements: Sequence[Measurement]) -> History:
    return {name: history for name, history in histories(measurements).items() if len(history) >= HISTORY}


def picture(name: str) -> Path:
    return PLOTS / f"{_anchor(name)}.svg"


def draw(name: str, history: Sequence[Measurement]) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with pyplot.rc_context({"svg.hashsalt": "shoal", "svg.fonttype": "none", "font.size": 9}):
        figure, axes = pyplot.subplots(figsize=(8, 2.6), layout="constrained")
        axes.plot([one.value for one in history], "o-", color="tab:blue", label="measured")
        targets = [(at, one.target) for at, one in enumerate(history) if one.target is not None]
        for at, target in targets:
            axes.hlines(target, at - 0.3, at + 0.3, color="tab:red", linestyle="--")
        if targets:
            axes.plot([], [], "--", color="tab:red", label=f"target, {history[-1].direction} is better")
        axes.set_xticks(range(len(history)), [f"{one.date}\n{one.commit.split()[0]}" for one in history], fontsize=7)
        axes.set_title(f"{name}: {history[-1].unit}", fontsize=9, loc="left")
        axes.grid(axis="y", alpha=0.3)
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))
        figure.savefig(picture(name), metadata={"Date": None})
        pyplot.close(figure)


def _row(one: Measurement) -> str:
    sign = "≥" if one.direction == "higher" else "≤"
    target = "" if one.target is None else f"{sign} {_number(one.target)}"
    cells = [f"[{one.name}](#{_anchor(one.name)})", _number(one.value), one.unit, target, one.date, one.commit]
    assert all(len(cell) <= CELL for cell in cells), cells
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _details(name: str, history: Sequence[Measurement]) -> list[str]:
    newest = history[-1]
    lines = [f"### {name}", ""]
    command = newest.setting.get("command")
    if command:
        lines += [f"Command: `{command}`", ""]
    lines += [f"Hardware: {newest.hardware}.", ""]
    others = {key: value for key, value in newest.setting.items() if key != "command"}
    if others:
        lines += ["Other figures: " + ", ".join(f"{key} = {_brief(value)}" for key, value in others.items()) + ".", ""]
    if newest.note:
        lines += [newest.note.rstrip(".") + ".", ""]
    if len(history) >= HISTORY:
        lines += [f"![Measurements of {name}, oldest first]({PLOTS.name}/{picture(name).name})", ""]
    return lines


def _number(value: float) -> str:
    return f"{value:,.10g}"


def _brief(value: object) -> str:
    text = str(value)
    return text if len(text) <= CELL else f"{text[:CELL]}... (benchmarks/results.jsonl has all)"


def _anchor(name: str) -> str:
    """As Markdown makes it of a heading."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", name).strip().lower())


def main() -> None:
    measurements = read()
    PAGE.write_text(page(measurements), encoding="utf-8")
    PLOTS.mkdir(exist_ok=True)
    drawn = plotted(measurements)
    for old in set(PLOTS.glob("*.svg")) - {picture(name) for name in drawn}:
        old.unlink()
    for name, history in drawn.items():
        draw(name, history)


if __name__ == "__main__":
    main()

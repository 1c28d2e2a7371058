"""The generated parts of docs/papers/*.md and docs/internet-tax.md, from recorded.json."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import rows
from rows import Row

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
RECORDED = HERE / "recorded.json"
PAPERS = {"swarm": "papers/swarm.md", "dtfm": "papers/dtfm.md", "atom": "papers/atom.md"}
SHAPES = ("1.3B", "8B", "70B")
TAX, PICTURE = DOCS / "internet-tax.md", DOCS / "internet-tax"
AIM = 1.15


def module(paper: str) -> ModuleType:
    return importlib.import_module(paper)


def recorded() -> dict[str, Any]:
    return dict(msgspec.json.decode(RECORDED.read_bytes())) if RECORDED.is_file() else {}


def parts(known: dict[str, Any]) -> dict[Path, str]:
    """By page: its generated part."""
    result = {
        DOCS / page: rows.generated(msgspec.convert(known[paper], list[Row]))
        for paper, page in PAPERS.items()
        if paper in known
    }
    taxes = {shape: known[f"tax-{shape}"] for shape in SHAPES if f"tax-{shape}" in known}
    left = {shape: known[f"remains-{shape}"] for shape in SHAPES if f"remains-{shape}" in known}
    return result | ({TAX: tax_part(taxes, left)} if taxes else {})


def write(known: dict[str, Any]) -> None:
    for path, part in parts(known).items():
        path.write_text(rows.page_with(path.read_text(encoding="utf-8"), part), encoding="utf-8")
    taxes = {shape: known[f"tax-{shape}"] for shape in SHAPES if f"tax-{shape}" in known}
    if taxes:
        draw(taxes)


def tax_part(taxes: dict[str, Any], left: dict[str, Any]) -> str:
    lines = [
        rows.BEGIN,
        "",
        "| shape | chosen | tax | worst day | with all machines there | loss against exact steps | plan | 1.15 |",
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for shape, outcome in taxes.items():
        best = next(row for row in outcome["rows"] if row["variant"] == outcome["chosen"])
        met = "met" if best["tax"] <= AIM else "missed"
        figures = (_tax(best[name]) for name in ("tax", "worst", "full"))
        cells = (shape, best["variant"], *figures, best["loss"], best["plan"], met)
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## What was tried", ""]
    for shape, outcome in taxes.items():
        lines += [f"### {shape}", "", "| variant | tax | with all there | step, averaging | plan | loss | 1.15 |"]
        lines.append("|---|---|---|---|---|---|---|")
        for row in outcome["rows"]:
            seconds = f"{row['step_s']:.3g} s, {row['averaging_s']:.3g} s" if row["step_s"] else ""
            met = "" if not row["tax"] else "meets" if row["tax"] <= AIM else ""
            cells = (row["variant"], _tax(row["tax"]), _tax(row["full"]), seconds, row["plan"], row["loss"], met)
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    lines += [
        "## Sensitivity of the chosen plan",
        "",
        f"| change | {' | '.join(taxes)} |",
        "|---|" + "---|" * len(taxes),
    ]
    for change in dict.fromkeys(name for outcome in taxes.values() for name in outcome["sensitivities"]):
        values = (_tax(outcome["sensitivities"].get(change, 0.0)) for outcome in taxes.values())
        lines.append(f"| {change} | {' | '.join(values)} |")
    return "\n".join([*lines, "", *meeting(taxes), *remaining(left), *bounds(left), rows.END])


def meeting(taxes: dict[str, Any]) -> list[str]:
    """Levers one after another until the aim is met."""
    if not any(outcome.get("tried") for outcome in taxes.values()):
        return []
    lines = ["## What would meet it", "", "| shape | with | tax | plan | 1.15 |", "|---|---|---|---|---|"]
    for shape, outcome in taxes.items():
        by_size: dict[int, list[dict[str, Any]]] = {}
        for one in outcome.get("tried", []):
            by_size.setdefault(len(one["levers"]), []).append(one)
        for looked in by_size.values():
            able = [one for one in looked if one["tax"]]
            if able:
                best = min(able, key=lambda one: one["tax"])
                met = "meets" if best["tax"] <= AIM else ""
                lines.append(
                    f"| {shape} | {', '.join(best['levers'])} | {_tax(best['tax'])} | {best['plan']} | {met} |"
                )
    return [*lines, ""]


# Columns of a tax's parts, and which of the forecaster's they add up
COLUMNS = {
    "compute": ("compute",),
    "hops": ("network",),
    "averaging": ("averaging",),
    "waiting": ("waiting",),
    "redone": ("redone", "joining", "stalled"),
}


def remaining(left: dict[str, Any]) -> list[str]:
    """Each way's tax and its parts."""
    if not left:
        return []
    lines = ["## What remains, by settings", ""]
    lines += [
        f"| shape | settings | tax | {' | '.join(COLUMNS)} | with all there | price | 1.15 |",
        "|---|---" + "|---" * 9 + "|",
    ]
    for shape, outcome in left.items():
        for way in outcome["ways"]:
            parts = (_tax(sum(way["parts"].get(name, 0.0) for name in names)) for names in COLUMNS.values())
            met = "meets" if 0 < way["tax"] <= AIM else ""
            cells = (shape, way["way"], _tax(way["tax"]), *parts, _tax(way["full"]), way["price"], met)
            lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def bounds(left: dict[str, Any]) -> list[str]:
    """The least that lines allow."""
    if not left:
        return []
    lines = ["## What the lines allow", ""]
    heads = ("shape", "machines", "compute, s", "best stages: hops, averaging, s", "exact at least", "late at least")
    heads += ("exact with planned stages", "1.15 with those: lines", "or batch")
    lines.append(f"| {' | '.join(heads)} |")
    lines.append("|---" * len(heads) + "|")
    for shape, outcome in left.items():
        for one in outcome["bounds"]:
            batch = f"x {one['planned_needs_batch']:.1f}" if one["planned_needs_batch"] else "none"
            cells = (
                shape,
                str(one["machines"]),
                f"{one['compute_s']:.3g}",
                f"{one['exact_stages']}: {one['exact_hops_s']:.3g}, {one['exact_averaging_s']:.3g}",
                _tax(one["exact"]),
                f"{_tax(one['late'])} with {one['late_stages']}",
                f"{_tax(one['planned'])} with {one['planned_stages']}",
                f"x {one['planned_needs_line']:.1f}",
                batch,
            )
            lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _tax(value: float) -> str:
    return f"{value:.2f}" if value else "-"


def draw(taxes: dict[str, Any]) -> None:
    from shoal.dashboard.pictures import COLOURS, RED, figure_of, saved

    names = [row["variant"] for row in next(iter(taxes.values()))["rows"]]
    figure, axes = figure_of(8.0, 0.42 * len(names) + 1.6)
    height = 0.8 / len(taxes)
    for number, (shape, outcome) in enumerate(taxes.items()):
        known = {row["variant"]: row["tax"] for row in outcome["rows"]}
        values = [min(known.get(name, 0.0), 4.2) for name in names]
        at = [row + (number - (len(taxes) - 1) / 2) * height for row in range(len(names))]
        axes.barh(at, values, height=height, color=COLOURS[number % len(COLOURS)], label=shape)
    axes.axvline(AIM, color=RED, linestyle="--", label="aim 1.15")
    axes.axvspan(1.2, 2.3, color="grey", alpha=0.15, label="published, 1.2 to 2.3")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xlim=(0, 4.2), xlabel="internet tax, simulated (bars end at 4.2; none: impossible, or not computed)")
    axes.legend(loc="lower right", fontsize=8, frameon=False)
    saved(figure, PICTURE)

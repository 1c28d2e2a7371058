"""Writes docs/view.md from core/consensus/phases.py: `make protocol`. A test says when it is out of date.

Unlike protocol.py it imports the package: the table is a value, not text. Needs nothing but msgspec beside it.
"""

from __future__ import annotations

import ast
from pathlib import Path

from shoal.core import messages
from shoal.core.consensus.phases import TRANSITIONS, Step, Transition
from shoal.core.messages import Phase

PAGE = Path(__file__).with_name("view.md")
START, END = "[*]", "[*]"


def page() -> str:
    text = [
        "# The View's phases",
        "",
        "A run is in one phase under each agreed View. Made by `make protocol` from `src/shoal/core/consensus/phases.py`; do not edit.",
        "The leader's rules (`core/leader/rules`) propose only these transitions, voters refuse all others",
        "(`core/consensus/validity.py`), and the simulator's checkers report them (`sim/checkers.py`).",
        "",
        "```mermaid",
        "stateDiagram-v2",
        f"    {START} --> {Phase.GATHERING.value}",
        *_arrows(),
        *(f"    {phase.value} --> {END}" for phase in (Phase.FINISHED, Phase.FAILED)),
        "```",
        "",
        "Transitions within an epoch, from a phase to another. A new epoch begins from any phase but finished and failed: see the table.",
        "",
        "## Phases",
        "",
        "| phase | meaning |",
        "|---|---|",
        *(f"| {phase.value} | {meaning} |" for phase, meaning in _meanings().items()),
        "",
        "## Transitions",
        "",
        "| from | to | step | epoch | when |",
        "|---|---|---|---|---|",
        *(_row(one) for one in TRANSITIONS),
    ]
    return "\n".join(text) + "\n"


def _arrows() -> list[str]:
    arrows = [one for one in TRANSITIONS if not one.new_epoch and one.before is not one.after]
    arrows += [one for one in TRANSITIONS if one.before is one.after and one.step is Step.NEXT]
    return [f"    {one.before.value} --> {one.after.value}: {one.reason.replace(':', ',')}" for one in arrows]


def _row(one: Transition) -> str:
    epoch = "new" if one.new_epoch else "same"
    return f"| {one.before.value} | {one.after.value} | {one.step.value} | {epoch} | {one.reason} |"


def _meanings() -> dict[Phase, str]:
    """The comment behind each phase."""
    lines = Path(messages.__file__).read_text(encoding="utf-8").splitlines()
    kind = next(
        one for one in ast.parse("\n".join(lines)).body if isinstance(one, ast.ClassDef) and one.name == "Phase"
    )
    rows = [one for one in kind.body if isinstance(one, ast.Assign)]
    comments = {ast.literal_eval(row.value): lines[row.lineno - 1].partition("  # ")[2].strip() for row in rows}
    return {phase: comments[phase.value] for phase in Phase}


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

"""Writes docs/protocol.md from the definitions in core/messages.py: `make protocol`. A test says when it is out of date."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
SOURCE = HERE.parent / "src" / "shoal" / "core" / "messages.py"
PAGE = HERE / "protocol.md"
CELL = 200  # characters of a table's cell, at most
KINDS = {
    "Value": "Values inside messages",
    "Enum": "Enumerations",
    "Wire": "Messages between peers",
    "Event": "Events: what a machine is told",
    "Command": "Commands: what a machine wants done",
    "TaskBase": "Tasks of `Do`",
    "msgspec.Struct": "What goes with tasks",
}


def page() -> str:
    source = SOURCE.read_text(encoding="utf-8")
    lines = source.splitlines()
    number = next(line for line in lines if line.startswith("PROTOCOL = ")).split()[2]
    rows: dict[str, list[str]] = {kind: [] for kind in KINDS}
    notes: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name not in KINDS and node.bases:
            kind = ast.unparse(node.bases[0])
            row, note = _described(node, lines)
            rows[kind].append(row)
            notes[kind] += note
    text = [
        "# Protocol",
        "",
        f"Version {number}. Made by `make protocol` from `src/shoal/core/messages.py`; do not edit. A field with `?` may be left out.",
        "What does not fit a table stands below it.",
    ]
    for kind, title in KINDS.items():
        text += ["", f"## {title}", "", "| name | fields | meaning |", "|---|---|---|", *rows[kind], *notes[kind]]
    return "\n".join(text) + "\n"


def _described(node: ast.ClassDef, lines: list[str]) -> tuple[str, list[str]]:
    """Its row of the table, and the lines below the table that say the rest of it."""
    lane, fields = _lane(node), _fields(node)
    fields = f"id, {fields}" if lane else fields
    meaning, of_fields = " ".join((ast.get_docstring(node) or "").split()), _of_fields(node, lines)
    summary, rest = " ".join([meaning, *of_fields]).strip(), ""
    note = []
    if len(_escaped(summary) + lane) > CELL:
        summary, rest = _first_sentences(meaning, CELL - len(lane))
        note = [*([rest] if rest else []), *of_fields]
    if len(fields) > CELL:
        fields, note = "below", [f"Fields: {fields}.", *note]
    row = f"| `{node.name}` | {fields} | {_escaped(summary)}{lane} |"
    if not note:
        return row, []
    return row, ["", f"**`{node.name}`**", "", *(f"- {line}" for line in note)]


def _first_sentences(text: str, most: int) -> tuple[str, str]:
    """As many as fit, and the rest."""
    sentences = re.split(r"(?<=[.?!])\s+(?=[A-Z`])", text)
    count = next(n for n in range(len(sentences), -1, -1) if len(_escaped(" ".join(sentences[:n]))) <= most)
    return " ".join(sentences[:count]), " ".join(sentences[count:])


def _fields(node: ast.ClassDef) -> str:
    names = []
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            names.append(f"{field.target.id}{'?' if field.value is not None else ''}")
        elif isinstance(field, ast.Assign) and ast.unparse(node.bases[0]) == "Enum":
            names.append(str(ast.literal_eval(field.value)))
    return ", ".join(names) or "none"


def _lane(node: ast.ClassDef) -> str:
    """Of a task, in words."""
    if ast.unparse(node.bases[0]) != "TaskBase":
        return ""
    lanes = [
        ast.literal_eval(one.value)
        for one in node.body
        if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "lane"
    ]
    return f" Lane: {lanes[0] if lanes else 'compute'}."


def _of_fields(node: ast.ClassDef, lines: list[str]) -> list[str]:
    """What the comments beside its fields say."""
    words = []
    for field in node.body:
        if isinstance(field, ast.AnnAssign | ast.Assign) and field.end_lineno is not None:
            comment = lines[field.end_lineno - 1].partition("  # ")[2].strip()
            if comment:
                name = ast.unparse(field.target) if isinstance(field, ast.AnnAssign) else ast.literal_eval(field.value)
                words.append(f"`{name}`: {comment}.")
    return words


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

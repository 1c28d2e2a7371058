"""Writes docs/protocol.md from the definitions in core/messages.py: `make protocol`. A test says when it is out of date."""

from __future__ import annotations

import ast
from pathlib import Path

HERE = Path(__file__).parent
SOURCE = HERE.parent / "src" / "shoal" / "core" / "messages.py"
PAGE = HERE / "protocol.md"
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
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef) or node.name in KINDS or not node.bases:
            continue
        rows = found[ast.unparse(node.bases[0])]
        fields, lane = _fields(node), _lane(node)
        rows.append(
            f"| `{node.name}` | {f'id, {fields}' if lane else fields} | {_escaped(_meaning(node, lines))}{lane} |"
        )
    text = [
        "# Protocol",
        "",
        f"Version {number}. Made by `make protocol` from `src/shoal/core/messages.py`; do not edit.",
    ]
    for kind, title in KINDS.items():
        text += ["", f"## {title}", "", "| name | fields | meaning |", "|---|---|---|", *found[kind]]
    return "\n".join(text) + "\n"


def _fields(node: ast.ClassDef) -> str:
    names = []
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            names.append(f"{field.target.id}{'?' if field.value is not None else ''}")
        elif isinstance(field, ast.Assign):  # of an enumeration
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


def _meaning(node: ast.ClassDef, lines: list[str]) -> str:
    words = [" ".join((ast.get_docstring(node) or "").split())]
    for field in node.body:
        if isinstance(field, ast.AnnAssign | ast.Assign) and field.end_lineno is not None:
            comment = lines[field.end_lineno - 1].partition("  # ")[2].strip()
            if comment:
                name = ast.unparse(field.target) if isinstance(field, ast.AnnAssign) else ast.literal_eval(field.value)
                words.append(f"`{name}`: {comment}.")
    return " ".join(word for word in words if word)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

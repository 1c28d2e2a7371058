"""Prints a configuration as TOML in which every setting is described; `load` reads it back."""

from __future__ import annotations

import json

from shoal import units
from shoal.config import describe
from shoal.config.describe import Key
from shoal.config.tree import Config


def text(config: Config) -> str:
    """The whole effective tree: above each setting what it decides, behind it the values that it takes."""
    lines = []
    for section, kind in describe.sections().items():
        lines += [f"# {(kind.__doc__ or '').strip()}", f"[{section}]"]
        for key in describe.keys().values():
            if key.section == section:
                line = f"{key.name} = {toml(key, getattr(getattr(config, section), key.name))}"
                span = describe.span(key)
                lines += [f"# {key.description}", f"{line}  # {span}" if span else line]
        lines.append("")
    return "\n".join(lines)


def toml(key: Key, value: object) -> str:
    """A setting's value as TOML, sizes with their unit."""
    if value and isinstance(value, int) and units.suffix(key.name) == "_bytes":
        return quoted(units.exact_size(value))
    return _toml(value)


def quoted(text: str) -> str:
    """As TOML writes it, also as a key."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{quoted(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    return repr(value)

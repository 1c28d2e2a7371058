"""Reads a configuration from TOML, `a.b=c` arguments or dictionaries, and refuses what cannot work.

`load` reads a file and arguments, `from_tree` a dictionary, `validate` a tree made in Python: all three end with the
same checks, and every complaint is a ValueError saying where, what was found and what would do. Fields whose names end
in _s, _Bps or _bytes also take text with a unit ("80 ms", "200 Mbit/s", "24 GiB"). What needs more than the tree is checked by
its owner: whether a model can be cut by model/stages.py, whether a data set is there by runtime/data.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from shoal import units
from shoal.config import describe
from shoal.config.describe import Key, keys, sections
from shoal.config.sections.train import FLOAT16, NO_FLOAT16
from shoal.config.tree import Config, completed, problems, to_tree
from shoal.escaping import UNDECODABLE, Faults


def load(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Defaults, then the file, then `a.b=c` arguments; checked."""
    tree: dict[str, Any] = {}
    if path is not None:
        if "=" in str(path) and not Path(path).exists():
            raise ValueError(
                f"{str(path)!r} is a setting, and a TOML file belongs before it, such as configs/quickstart.toml"
            )
        try:
            tree = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, *UNDECODABLE) as error:
            raise ValueError(f"{path} is not TOML: {error}") from None
    try:
        return from_tree(overridden(tree, overrides))
    except Faults as error:
        raise Faults([f"{path}: {line}" if path is not None else line for line in error.lines]) from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}" if path is not None else str(error)) from None


def from_tree(tree: Mapping[str, Any]) -> Config:
    """A checked configuration from plain dictionaries, such as a TOML file or an invite holds. Faults: all that is wrong with it."""
    wrong: list[str] = []
    sections = {name: _section(name, fields, wrong) for name, fields in tree.items()}
    config = Config() if wrong else completed(Config(**sections), tree)
    if wrong := wrong or list(problems(config)):
        raise Faults(wrong)
    return config


def validate(config: Config) -> None:
    """ValueError for the first thing that cannot work, types included, so that trees made in Python are checked too."""
    from_tree(to_tree(config))


# ------------------------------------------------------------------------------------------------------------ arguments


def overridden(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The tree with `a.b=c` arguments put into it."""
    for override in overrides:
        _override(tree, override)
    return tree


def _override(tree: dict[str, Any], argument: str) -> None:
    """Put one `a.b=c` into the tree. Only what is plainly a number, list or truth value is not taken as text."""
    path, sign, written = argument.partition("=")
    names = path.strip().split(".")
    if not sign or not all(names):
        raise ValueError(f"{argument!r} is not a setting; write section.field=value, such as run.steps=100")
    node = tree
    for i, name in enumerate(names[:-1]):
        child = node.setdefault(name, {})
        if not isinstance(child, dict):
            raise ValueError(f"{'.'.join(names[: i + 1])} is a value, not a section, so {path} cannot be set")
        node = child
    key = keys().get(path.strip())
    node[names[-1]] = written if key is not None and key.is_text else _literal(written)


def _literal(written: str) -> Any:
    try:
        return tomllib.loads(f"value = {written}")["value"]
    except tomllib.TOMLDecodeError:
        return written


# --------------------------------------------------------------------------------------------------------------- values


def _section(name: str, tree: object, wrong: list[str]) -> Any:
    """The section of that name from a dictionary; None when something is wrong with it, which is added to `wrong`."""
    if name not in sections():
        wrong.append(f"{name} is not a setting{_suggestion(name)}")
        return None
    if not isinstance(tree, Mapping):
        wrong.append(f"{name} = {tree!r} is a value; it must be a section [{name}]")
        return None
    values = {}
    for field, value in tree.items():
        key = keys().get(f"{name}.{field}")
        if key is None:
            wrong.append(f"{name}.{field} is not a setting{_suggestion(str(field), name)}")
            continue
        try:
            values[field] = _value(key, value)
        except ValueError as error:
            wrong.append(str(error))
    return None if wrong else sections()[name](**values)


def _value(key: Key, value: Any) -> Any:
    ending = units.suffix(key.name)
    if ending and isinstance(value, str):
        try:
            value = units.parse(value, ending)
        except ValueError as error:
            raise ValueError(f"{key.path}: {error}") from None
        if isinstance(key.kind, inspect.IntType) and value.is_integer():
            value = int(value)
    for where, number, kind in describe.out_of_bounds(key.kind, value, key.path):
        if not describe.finite(number):
            raise ValueError(f"{where} = {str(number)[:20]} is not a finite number")
        if isinstance(kind, inspect.FloatType) or isinstance(number, int):
            raise ValueError(f"{where} = {number} is out of range; try {describe.bounds(kind, key.name)}")
    try:
        return msgspec.convert(value, key.annotation)
    except msgspec.ValidationError:
        if key.path == "train.dtype" and value in FLOAT16:
            raise ValueError(f"train.dtype = {value!r} {NO_FLOAT16}") from None
        near = difflib.get_close_matches(str(value), key.choices, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{key.path} = {value!r} must be {describe.wanted(key)}{hint}") from None


def _suggestion(written: str, section: str = "") -> str:
    """The likeliest meaning: a field of that section, else one of that name in another section."""
    fields = [key.name for key in keys().values() if key.section == section] if section else list(sections())
    near = difflib.get_close_matches(written, fields, n=1)
    if near:
        return f"; did you mean {f'{section}.' if section else ''}{near[0]}?"
    elsewhere = [key.path for key in keys().values() if difflib.get_close_matches(written, [key.name], cutoff=0.8)]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    return f"; {f'[{section}]' if section else 'the configuration'} has {', '.join(fields)}"

"""Every name that a benchmark, or a script that makes a page, takes from shoal or from a file beside it is there. Most of them are run by
hand, months apart."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from symtable import symtable
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(
    path.relative_to(ROOT).as_posix() for folder in ("benchmarks", "docs") for path in (ROOT / folder).rglob("*.py")
)


def lacking(path: Path) -> list[str]:
    """`from shoal.a import b` and `b.c` without a `b` or a `c`, and the same of files in its folder or the one above."""
    tree = ast.parse(path.read_text())
    wrong, modules = list[str](), dict[str, ModuleType]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                if not exists(node.module, alias.name, path, modules, alias.asname or alias.name):
                    wrong.append(f"line {node.lineno}: {node.module} has no {alias.name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id)
            if module is not None and not hasattr(module, node.attr):
                wrong.append(f"line {node.lineno}: {module.__name__} has no {node.attr}")
    return wrong


def exists(module: str, name: str, path: Path, modules: dict[str, ModuleType], known_as: str) -> bool:
    """`modules`: gets those that are imported whole, by the name they have in the script."""
    if module.split(".")[0] != "shoal":
        files = [folder / f"{module}.py" for folder in (path.parent, path.parent.parent)]
        beside = [file for file in files if file.exists()]
        return not beside or any(name in bound(file) for file in beside)
    try:
        holder = importlib.import_module(module)
    except ImportError:
        return False
    if hasattr(holder, name):
        value = getattr(holder, name)
    else:
        try:
            value = importlib.import_module(f"{module}.{name}")
        except ImportError:
            return False
    if isinstance(value, ModuleType):
        modules[known_as] = value
    return True


def bound(file: Path) -> set[str]:
    """What it binds at its top level."""
    symbols = symtable(file.read_text(), file.name, "exec").get_symbols()
    return {each.get_name() for each in symbols if each.is_assigned() or each.is_imported()}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_takes_what_is_there(script: str) -> None:
    assert not lacking(ROOT / script)


def test_a_module_that_has_gone_is_seen(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from shoal.forecasting import gone\nfrom shoal import codec\ncodec.missing\nfrom other import lost\n"
    )
    (tmp_path / "other.py").write_text("def kept():\n    lost = 1\n")
    assert [words.partition(": ")[2] for words in lacking(script)] == [
        "shoal.forecasting has no gone",
        "other has no lost",
        "shoal.codec has no missing",
    ]

"""Every name that a benchmark, or a script that makes a page, takes from shoal or from a file beside it is there. Most of them are run by
hand, months apart."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
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
        beside = [folder / f"{module}.py" for folder in (path.parent, path.parent.parent)]
        return not any(one.exists() for one in beside) or name in {
            each for one in beside if one.exists() for each in bound(ast.parse(one.read_text()))
        }
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


def bound(tree: ast.Module) -> Iterator[str]:
    """What a file binds at its top level."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.asname or node.name


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_takes_what_is_there(script: str) -> None:
    assert not lacking(ROOT / script)


def test_a_module_that_has_gone_is_seen(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from shoal.forecasting import gone\nfrom shoal import codec\ncodec.missing\nfrom other import lost\n"
    )
    (tmp_path / "other.py").write_text("def kept(): ...\n")
    assert [words.partition(": ")[2] for words in lacking(script)] == [
        "shoal.forecasting has no gone",
        "other has no lost",
        "shoal.codec has no missing",
    ]

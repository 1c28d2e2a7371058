"""Measures the structure of a checkout: sizes, complexity, attributes, types, settings, import cycles.

`make structure` prints one table, `--json` the same as JSON, `--against REF` the values before and after and the change.
The sources are parsed and never imported, so any commit can be measured, and a definition is found by its name wherever it
moved to. Complexity is what `radon cc` prints; the import graph is grimp's, as in the import contract.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RETIRED = Path(__file__).with_name("retired_words.txt")  # one word or phrase a line; what follows "#" is a comment
# Limits, and what is over them on purpose; tests/project/test_structure.py holds the project to them.
LONG_FILE = 500  # lines
KEPT_LONG = {"src/shoal/core/messages.py"}  # the catalogue of messages, events, commands and tasks
FULL_FOLDER = 14  # modules
KEPT_FULL = {"src/shoal/cli"}  # one command per file
COMPLEX = 15  # cyclomatic complexity
KEPT_COMPLEX = {"planner.search.swaps.advance"}  # split, an annealing takes 0.47 s instead of 0.29 (its docstring)
MANY_ATTRIBUTES = 15
TOP = 5
# mypy options that `strict = true` turns on and an override could turn off
STRICT = {
    "strict", "check_untyped_defs", "disallow_any_generics", "disallow_incomplete_defs", "disallow_subclassing_any",
    "disallow_untyped_calls", "disallow_untyped_decorators", "disallow_untyped_defs", "strict_equality", "warn_return_any",
}  # fmt: skip

Items = list[tuple[str, int]]


@dataclass(frozen=True)
class Row:
    """One line of the table: a value, and the places that make it up."""

    value: int
    items: Items = field(default_factory=list)


@dataclass(frozen=True)
class Class:
    """A class of the package. `module` is dotted, `bases` are the names as written, without their modules."""

    module: str
    node: ast.ClassDef

    @property
    def name(self) -> str:
        return f"{self.module}.{self.node.name}"

    @property
    def bases(self) -> list[str]:
        return [_last_name(base) for base in self.node.bases]


class Package:
    """The parsed sources of the one package under src/."""

    def __init__(self, root: Path) -> None:
        self.root = root
        inits = sorted((root / "src").glob("*/__init__.py"))
        if len(inits) != 1:
            raise ValueError(f"{root / 'src'} holds {len(inits)} packages; one is wanted")
        self.folder = inits[0].parent
        self.sources = {path: path.read_text(encoding="utf-8") for path in sorted(self.folder.rglob("*.py"))}
        self.trees = {self.module(path): ast.parse(source) for path, source in self.sources.items()}

    def module(self, path: Path) -> str:
        """Dotted name below the package; of the package's own __init__: its name."""
        parts = path.relative_to(self.folder).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or self.folder.name

    @cached_property
    def classes(self) -> list[Class]:
        return [
            Class(module, node)
            for module, tree in self.trees.items()
            for node in _statements(tree)
            if isinstance(node, ast.ClassDef)
        ]

    @cached_property
    def by_name(self) -> dict[str, Class]:
        return {kind.name: kind for kind in self.classes}

    @cached_property
    def imported(self) -> dict[tuple[str, str], str]:
        """What `from MODULE import NAME` means: (importing module, name) -> dotted name within the package."""
        return {
            (module, alias.asname or alias.name): f"{node.module.removeprefix(f'{self.folder.name}.')}.{alias.name}"
            for module, tree in self.trees.items()
            for node in _statements(tree)
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
        }

    def resolve(self, module: str, name: str) -> Class | None:
        """The class that `name` means in a module: its own, the one it imports, or the only one of that name."""
        if f"{module}.{name}" in self.by_name:
            return self.by_name[f"{module}.{name}"]
        if (module, name) in self.imported:
            source, _, original = self.imported[module, name].rpartition(".")
            return self.resolve(source, original) if (source, original) != (module, name) else None
        same = [kind for kind in self.classes if kind.node.name == name]
        return same[0] if len(same) == 1 else None

    def base_classes(self, kind: Class) -> list[Class]:
        found = [self.resolve(kind.module, base) for base in kind.bases]
        return [base for base in found if base is not None and base is not kind]

    @cached_property
    def structs(self) -> dict[str, Class]:
        """Data structs by dotted name: msgspec structs, dataclasses, named tuples, and what inherits from them."""
        found: dict[str, Class] = {}
        while True:
            more = {
                kind.name: kind
                for kind in self.classes
                if kind.name not in found
                and (_is_struct(kind) or any(base.name in found for base in self.base_classes(kind)))
            }
            if not more:
                return found
            found.update(more)

    def members(self, name: str) -> list[str]:
        """Types of the union `name = A | B | ...`, or, when there is none, the classes that inherit from class `name`."""
        unions = {
            target.id: node.value
            for module, tree in self.trees.items()
            if module.startswith("core")
            for node in tree.body
            for target in _targets(node)
            if isinstance(target, ast.Name) and isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        }
        if name in unions:
            return sorted(_expanded(unions[name], unions))
        core = [kind for kind in self.classes if kind.module.startswith("core")]
        children = [kind for kind in core if name in kind.bases]
        parents = {base for kind in core for base in kind.bases}
        leaves = [kind.node.name for kind in children if kind.node.name not in parents]
        inner = [leaf for kind in children if kind.node.name in parents for leaf in self.members(kind.node.name)]
        return sorted({*leaves, *inner})

    def settings(self) -> list[str]:
        """Paths of the leaves of the configuration: the fields of class Config and, downwards, of its sections."""
        roots = [kind for kind in self.structs.values() if kind.node.name == "Config" and "config" in kind.module]
        if len(roots) != 1:
            raise ValueError(f"{len(roots)} data structs are called Config in modules called config; one is wanted")
        return self._leaves(roots[0], "")

    def _leaves(self, section: Class, path: str) -> list[str]:
        found: list[str] = []
        for entry in _fields(section.node):
            key = f"{path}{ast.unparse(entry.target)}"
            parts = [self.resolve(section.module, name) for name in _union(entry.annotation)]
            sections = [part for part in parts if part is not None and part.name in self.structs]
            for part in sections:
                found += self._leaves(part, f"{key}.")
            if not sections:
                found.append(key)
        return list(dict.fromkeys(found))


def measure(package: Package, retired: list[str]) -> dict[str, Row]:
    """The table, in the order in which it is printed."""
    root = package.root
    src = {str(path.relative_to(root)): len(text.splitlines()) for path, text in package.sources.items()}
    tests = {
        str(path.relative_to(root)): len(path.read_text(encoding="utf-8").splitlines())
        for path in sorted((root / "tests").rglob("*.py"))
    }
    long_files = _descending({name: lines for name, lines in {**src, **tests}.items() if lines > LONG_FILE})
    complexities, attributes = _complexities(package), _attributes(package)
    complex_ones = [item for item in _descending(complexities) if item[1] > COMPLEX]
    types = {name: package.members(name) for name in ("Message", "Event", "Command", "Task")}
    settings = package.settings()
    per_section = Counter(key.rpartition(".")[0] for key in settings)
    return {
        "lines of src": Row(sum(src.values())),
        "lines of tests": Row(sum(tests.values())),
        f"src files over {LONG_FILE} lines": _counted([item for item in long_files if item[0] in src]),
        f"test files over {LONG_FILE} lines": _counted([item for item in long_files if item[0] in tests]),
        "longest function (lines)": _worst(_function_lines(package)),
        "worst cyclomatic complexity": _worst(complexities),
        f"functions over complexity {COMPLEX}": _counted([one for one in complex_ones if one[0] not in KEPT_COMPLEX]),
        "functions over it on purpose": _counted([one for one in complex_ones if one[0] in KEPT_COMPLEX]),
        "most attributes of a class": _worst(attributes),
        f"classes over {MANY_ATTRIBUTES} attributes": _counted(
            [item for item in _descending(attributes) if item[1] > MANY_ATTRIBUTES]
        ),
        "most fields of a data struct": _worst(
            {_labelled(kind, package): len(list(_fields(kind.node))) for kind in package.structs.values()}
        ),
        "most modules in a folder": _folders(package),
        **{f"{name.lower()} types": Row(len(members)) for name, members in types.items()},
        "settings": Row(len(settings), _descending(per_section)),
        "import cycles": _counted(_cycles(package, type_checking=False)),
        "import cycles with TYPE_CHECKING": _counted(_cycles(package, type_checking=True)),
        **_typed(package, src),
        **_retired(package, retired),
    }


# ---------------------------------------------------------------------------------------------------------- measures


def _function_lines(package: Package) -> dict[str, int]:
    found: dict[str, int] = {}
    for module, tree in package.trees.items():
        for name, node in _functions(tree, module):
            found[name] = (node.end_lineno or node.lineno) - node.lineno + 1
    return found


def _functions(tree: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in _inner_statements(tree):
        inner = prefix
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{prefix}.{node.name}"
            if not isinstance(node, ast.ClassDef):
                yield inner, node
        yield from _functions(node, inner)


def _complexities(package: Package) -> dict[str, int]:
    try:
        from radon.complexity import cc_visit_ast
    except ImportError:
        raise ValueError("radon is not installed; `make setup` installs it") from None
    found = {}
    for module, tree in package.trees.items():
        for block in cc_visit_ast(tree):
            if block.letter != "C":  # a class; its methods are blocks of their own
                found[f"{module}.{block.fullname}"] = block.complexity
    return found


def _attributes(package: Package) -> dict[str, int]:
    """Attributes that a class assigns on self or declares in its body; data structs count apart."""
    found = {}
    for kind in package.classes:
        if kind.name in package.structs:
            continue
        names = {ast.unparse(entry.target) for entry in _fields(kind.node)}
        for node in kind.node.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.args.args:
                names |= _assigned(node, node.args.args[0].arg)
        found[kind.name] = len(names)
    return found


def _assigned(function: ast.AST, owner: str) -> set[str]:
    return {
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == owner
    }


def _labelled(kind: Class, package: Package) -> str:
    return kind.name if _frozen(kind, package) else f"{kind.name} (not frozen)"


def _frozen(kind: Class, package: Package) -> bool:
    calls = [node for node in kind.node.decorator_list if isinstance(node, ast.Call)]
    keywords = [word for call in calls for word in call.keywords] + kind.node.keywords
    if any(word.arg == "frozen" and isinstance(word.value, ast.Constant) and word.value.value for word in keywords):
        return True
    return "NamedTuple" in kind.bases or any(_frozen(base, package) for base in package.base_classes(kind))


def _folders(package: Package) -> Row:
    paths = [path for path in package.sources if path.name != "__init__.py"]
    counts = _descending(Counter(str(path.parent.relative_to(package.root)) for path in paths))
    return Row(counts[0][1] if counts else 0, [item for item in counts if item[1] > FULL_FOLDER])


def _cycles(package: Package, type_checking: bool) -> Items:
    """Groups of modules in which each imports each, at least by way of others; the largest first."""
    import grimp
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    sys.path.insert(0, str(package.folder.parent))  # where grimp looks for the package; it does not import it
    try:
        graph = grimp.build_graph(package.folder.name, exclude_type_checking_imports=not type_checking, cache_dir=None)
    finally:
        sys.path.pop(0)
    modules = sorted(graph.modules)
    index = {module: number for number, module in enumerate(modules)}
    edges = [
        (index[module], index[other]) for module in modules for other in graph.find_modules_directly_imported_by(module)
    ]
    if not edges:
        return []
    rows, columns = zip(*edges, strict=True)
    matrix = csr_array(([1] * len(edges), (rows, columns)), shape=(len(modules), len(modules)))
    _, labels = connected_components(matrix, directed=True, connection="strong")
    groups: dict[int, list[str]] = {}
    for module, label in zip(modules, labels.tolist(), strict=True):
        groups.setdefault(label, []).append(module.removeprefix(f"{package.folder.name}."))
    return _descending({" <-> ".join(group): len(group) for group in groups.values() if len(group) > 1})


def _typed(package: Package, lines: dict[str, int]) -> dict[str, Row]:
    """Lines that mypy checks with `strict = true`, and how many in a hundred those are of src."""
    page = tomllib.loads((package.root / "pyproject.toml").read_text(encoding="utf-8"))
    settings = page.get("tool", {}).get("mypy", {})
    roots = [package.root / name for name in settings.get("files", [])] if settings.get("strict") else []
    loose = [
        module.removeprefix(f"{package.folder.name}.")
        for override in settings.get("overrides", [])
        if override.get("ignore_errors") or any(override.get(option) is False for option in STRICT)
        for module in ([override["module"]] if isinstance(override["module"], str) else override["module"])
    ]
    total = 0
    for path in package.sources:
        module = package.module(path)
        within = any(root == path or root in path.parents for root in roots)
        if within and not any(re.fullmatch(name.replace(".*", r"(\..*)?"), module) for name in loose):
            total += lines[str(path.relative_to(package.root))]
    return {
        "lines under strict types": Row(total),
        "per cent of src under strict types": Row(round(100 * total / max(sum(lines.values()), 1))),
    }


def _retired(package: Package, words: list[str]) -> dict[str, Row]:
    """How often retired words stand in src: in names, also as a part of one, in comments and in strings."""
    if not words:
        return {}
    text = "\n".join(package.sources.values())
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_", " ", text).lower()
    return {"retired words": _counted(_descending({word: _occurrences(word, spaced) for word in words}), total=True)}


def _occurrences(word: str, text: str) -> int:
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_", " ", word).lower()
    return len(re.findall(rf"\b{re.escape(spaced)}s?\b", text))


# -------------------------------------------------------------------------------------------------------------- syntax


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Every statement below, and the handlers and cases that statements stand in; expressions are most of a tree and hold none."""
    for node in _inner_statements(tree):
        yield node
        yield from _statements(node)


def _inner_statements(node: ast.AST) -> Iterator[ast.AST]:
    for block in ("body", "handlers", "cases", "orelse", "finalbody"):
        inner = getattr(node, block, ())
        if isinstance(inner, list):  # the body of a lambda or of a conditional expression is an expression
            yield from inner


def _last_name(node: ast.AST) -> str:
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            return node.attr
        case ast.Subscript():
            return _last_name(node.value)
        case ast.Call():
            return _last_name(node.func)
    return ""


def _is_struct(kind: Class) -> bool:
    decorators = {_last_name(node) for node in kind.node.decorator_list}
    return "dataclass" in decorators or bool({"Struct", "NamedTuple", "TypedDict"} & set(kind.bases))


def _fields(node: ast.ClassDef) -> Iterator[ast.AnnAssign]:
    for entry in node.body:
        if isinstance(entry, ast.AnnAssign) and _last_name(entry.annotation) != "ClassVar":
            yield entry


def _targets(node: ast.AST) -> list[ast.expr]:
    match node:
        case ast.Assign():
            return node.targets
        case ast.AnnAssign():
            return [node.target]
    return []


def _union(node: ast.expr) -> list[str]:
    """Names of `A | B`, `Union[A, B]` and `Optional[A]`; of anything else its own."""
    match node:
        case ast.BinOp(op=ast.BitOr()):
            return _union(node.left) + _union(node.right)
        case ast.Subscript() if _last_name(node.value) in ("Union", "Optional"):
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            return [name for part in parts for name in _union(part)]
        case ast.Name() | ast.Attribute():
            return [_last_name(node)]
    return []


def _expanded(node: ast.expr, unions: dict[str, ast.expr]) -> set[str]:
    return {
        leaf
        for name in _union(node)
        for leaf in (_expanded(unions[name], unions) if name in unions and _union(unions[name]) else {name})
    }


# --------------------------------------------------------------------------------------------------------------- table


def _descending(counts: dict[str, int]) -> Items:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _worst(counts: dict[str, int]) -> Row:
    items = _descending(counts)[:TOP]
    return Row(items[0][1] if items else 0, items)


def _counted(items: Items, total: bool = False) -> Row:
    return Row(sum(count for _, count in items) if total else len(items), items)


def table(rows: dict[str, Row]) -> str:
    cells = [("measure", "value", "where"), *_cells({name: (row,) for name, row in rows.items()})]
    return _aligned(cells)


def comparison(before: dict[str, Row], after: dict[str, Row]) -> str:
    pairs = {name: (before.get(name), after.get(name)) for name in {**after, **before}}
    return _aligned([("measure", "before", "after", "change", "where, after"), *_cells(pairs)])


def _cells(rows: Mapping[str, tuple[Row | None, ...]]) -> Iterator[tuple[str, ...]]:
    """The lines of each measure: its values, their change when there are two, and one line for each place."""
    for name, row in rows.items():
        values = [f"{one.value:,}" if one else "-" for one in row]
        if len(row) == 2:
            old, new = row
            values.append(f"{new.value - old.value:+,}" if old and new else "-")
        places = [f"{count:>6,}  {place}" for place, count in row[-1].items] if row[-1] else []
        yield name, *values, *places[:1]
        for place in places[1:]:
            yield "", *("" for _ in values), place


def _aligned(lines: list[tuple[str, ...]]) -> str:
    columns = len(lines[0]) - 1  # the last one is as wide as it likes
    widths = [max(len(line[column]) for line in lines) for column in range(columns)]
    text = []
    for line in lines:
        cells = [line[0].ljust(widths[0]), *(line[column].rjust(widths[column]) for column in range(1, columns))]
        text.append("  ".join([*cells, *line[columns:]]).rstrip())
    return "\n".join(text)


def at_commit(repository: Path, ref: str) -> dict[str, Row]:
    """The table of a commit: its files in a temporary directory, measured by this script as it is now."""
    command = ["git", "-C", str(repository), "archive", "--format=tar", ref]
    done = subprocess.run(command, capture_output=True)
    if done.returncode:
        raise ValueError(f"--against {ref}: {done.stderr.decode().strip()}")
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(done.stdout)) as files:
        if hasattr(tarfile, "data_filter"):  # not in Python 3.11.2, which Debian 12 has
            files.extraction_filter = tarfile.data_filter
        files.extractall(folder)
        # A process of its own: grimp finds one package of a name per process.
        script = [sys.executable, __file__, "--json", "--root", folder]
        done = subprocess.run(script, capture_output=True, check=False)
    if done.returncode:
        raise ValueError(f"--against {ref}: {done.stderr.decode().strip()}")
    return {
        name: Row(row["value"], [(where, count) for where, count in row["items"]])
        for name, row in json.loads(done.stdout).items()
    }


def as_json(rows: dict[str, Row]) -> dict[str, Any]:
    return {name: {"value": row.value, "items": row.items} for name, row in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the structure of a checkout.")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to measure")
    parser.add_argument("--against", metavar="REF", help="a commit of that checkout to compare with")
    parser.add_argument("--json", action="store_true")
    choice = parser.parse_args()
    lines = RETIRED.read_text(encoding="utf-8").splitlines() if RETIRED.exists() else []
    retired = [word for line in lines if (word := line.partition("#")[0].strip())]
    try:
        before = at_commit(choice.root, choice.against) if choice.against else None
        after = measure(Package(choice.root.resolve()), retired)
    except (ValueError, SyntaxError) as error:
        sys.exit(f"structure: {error}")
    if choice.json:
        print(json.dumps({"before": as_json(before), "after": as_json(after)} if before else as_json(after), indent=1))
    else:
        print(comparison(before, after) if before else table(after))


if __name__ == "__main__":
    main()

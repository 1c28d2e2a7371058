"""`make structure` counts what is there, wherever it stands, and compares with a commit."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal import config
from shoal.core import messages

pytest.importorskip("radon", reason="`make setup` installs it")

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools" / "structure.py"

FILES = {
    "pyproject.toml": '[tool.mypy]\nstrict = true\nfiles = ["src/shoal/core", "src/shoal/config"]\n',
    "src/shoal/__init__.py": "",
    "src/shoal/core/__init__.py": "",
    # The messages are a package, and one union is made of two
    "src/shoal/core/messages/__init__.py": (
        "from .wire import Ping, Pong\nfrom .tasks import Load, Store, Task\nReply = Pong\nMessage = Ping | Reply\n"
    ),
    "src/shoal/core/messages/wire.py": (
        "import msgspec\nclass Wire(msgspec.Struct, frozen=True):\n    pass\n"
        "class Ping(Wire, frozen=True):\n    id: int\nclass Pong(Wire, frozen=True):\n    id: int\n    delay_s: float\n"
    ),
    "src/shoal/core/messages/tasks.py": (
        "import msgspec\nclass Load(msgspec.Struct):\n    id: str\nclass Store(msgspec.Struct):\n    id: str\n"
        "Task = Load | Store\nclass Event(msgspec.Struct):\n    pass\nclass Tick(Event):\n    pass\n"
        "class Command(msgspec.Struct):\n    pass\n"
    ),
    "src/shoal/config/__init__.py": "from shoal.config.tree import Config\n",
    "src/shoal/config/tree.py": (
        "import msgspec\nclass Section(msgspec.Struct):\n    pass\nclass Plan(Section):\n    steps: int = 1\n    peers: int = 2\n"
        "class Config(Section):\n    plan: Plan | None = None\n    name: str = ''\n"
    ),
    # Another Plan, and a class with three attributes and a method of complexity 3
    "src/shoal/runtime.py": (
        "from typing import TYPE_CHECKING\nimport shoal.disk\nif TYPE_CHECKING:\n    import shoal.link\n"
        "class Plan:\n    seed: int\n    def __init__(self):\n        self.one, self.two = 1, 2\n        self.one += 1\n"
        "    def choose(self, kind):\n        match kind:\n            case 1:\n                return 'a'\n"
        "            case 2:\n                return 'b'\n        return ''\n"
    ),
    "src/shoal/disk.py": "def load():\n    import shoal.runtime\n",
    "src/shoal/link.py": "import shoal.runtime\n",
    "tests/test_long.py": "\n" * 501,
}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A small project, measured against its newest commit, which lacks the cycle of runtime and disk."""
    root = tmp_path_factory.mktemp("project")
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if name == "src/shoal/disk.py" else text)
    git = ["git", "-C", str(root), "-c", "user.name=test", "-c", "user.email=test@localhost"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    (root / "src/shoal/disk.py").write_text(FILES["src/shoal/disk.py"])
    command = [sys.executable, str(SCRIPT), "--json", "--root", str(root), "--against", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_definitions_are_counted_wherever_they_stand(both: Any) -> None:
    rows = both["after"]
    counts = {name: rows[f"{name} types"]["value"] for name in ("message", "event", "command", "task")}
    assert counts == {"message": 2, "event": 1, "command": 0, "task": 2}
    assert rows["settings"] == {"value": 3, "items": [["plan", 2], ["", 1]]}
    assert rows["most attributes of a class"]["items"][0] == ["runtime.Plan", 3]
    assert ["core.messages.wire.Pong", 2] in rows["most fields of a data struct"]["items"]
    assert rows["worst cyclomatic complexity"]["items"][0] == ["runtime.Plan.choose", 3]
    assert rows["longest function (lines)"]["items"][0] == ["runtime.Plan.choose", 7]
    assert rows["test files over 500 lines"]["items"] == [["tests/test_long.py", 501]]
    lines = {name: text.count("\n") for name, text in FILES.items()}
    strict = sum(count for name, count in lines.items() if name.startswith(("src/shoal/core", "src/shoal/config")))
    assert rows["lines under strict types"]["value"] == strict


def test_cycles_through_functions_count_and_those_for_types_count_apart(both: Any) -> None:
    assert both["after"]["import cycles"]["items"] == [["disk <-> runtime", 2]]
    assert both["after"]["import cycles with TYPE_CHECKING"]["items"] == [["disk <-> link <-> runtime", 3]]


def test_a_commit_is_measured_beside_the_checkout(both: Any) -> None:
    assert both["before"]["import cycles"]["value"] == 0
    assert both["after"]["lines of src"]["value"] - both["before"]["lines of src"]["value"] == 2


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    """tools/structure.py as a module."""
    spec = importlib.util.spec_from_file_location("structure", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules["structure"] = script  # its dataclasses look for their module there
    spec.loader.exec_module(script)
    yield script
    del sys.modules["structure"]


@pytest.fixture(scope="module")
def project(script: Any) -> Any:
    return script.Package(ROOT)


def test_the_project_keeps_within_its_limits_but_for_what_is_named(script: Any, project: Any) -> None:
    rows = script.measure(project, [])
    names = {name: {place for place, _ in row.items} for name, row in rows.items()}
    assert not names[f"functions over complexity {script.COMPLEX}"]
    assert names["functions over it on purpose"] == script.KEPT_COMPLEX
    assert not names[f"classes over {script.MANY_ATTRIBUTES} attributes"]
    assert not names["import cycles with TYPE_CHECKING"] | names["import cycles"]
    assert names[f"src files over {script.LONG_FILE} lines"] == script.KEPT_LONG
    assert names["most modules in a folder"] == script.KEPT_FULL


def test_the_project_itself_is_counted_as_python_counts_it(project: Any) -> None:
    assert project.members("Message") == sorted(kind.__name__ for kind in typing.get_args(messages.Message))
    assert project.members("Task") == sorted(kind.__name__ for kind in typing.get_args(messages.Task))
    assert project.members("Event") == sorted(kind.__name__ for kind in messages.Event.__subclasses__())
    assert project.members("Command") == sorted(kind.__name__ for kind in messages.Command.__subclasses__())
    assert len(project.settings()) == leaves(config.Config())


def leaves(section: Any) -> int:
    values = [getattr(section, name) for name in section.__struct_fields__]
    return sum(leaves(value) if isinstance(value, msgspec.Struct) else 1 for value in values)

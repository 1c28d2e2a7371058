"""Recipes: each can be planned on its machines, every stage has a replica, and docs/recipes.md says what the planner predicts."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from shoal import config

ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def recipes() -> ModuleType:
    spec = importlib.util.spec_from_file_location("recipes", ROOT / "docs" / "recipes.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_recipe_has_its_machines_and_its_part_of_the_page() -> None:
    files = sorted(path.stem for path in (ROOT / "configs/recipes").glob("*.toml"))
    names = sorted(recipes().TITLES)
    assert files == sorted([*names, *(f"{name}-machines" for name in names)])
    for name in names:
        tree = config.load(ROOT / f"configs/recipes/{name}.toml")
        assert tree.run.name == name and (ROOT / tree.model.path / "config.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora-8B", "dpo-8B", "qlora-70B", "full-1.3B", "continued-3B"])
def test_a_recipe_is_planned_as_its_page_says(name: str) -> None:
    module = recipes()
    tree, plan, losses = module.planned(name)
    assert len(plan.seats) == tree.run.peers and all(len(stage.peers) > 1 for stage in plan.stages)
    assert plan.left_out == ()
    page = module.PAGE.read_text()
    assert_as_written(module.row(name, plan), page, f"| [{name}]")
    assert_as_written(module.rehearsal(name, plan), page, f"| {name} |")
    assert_as_written("\n".join(module.section(name, tree, plan, losses)), page, f"## {module.TITLES[name]}")


def assert_as_written(text: str, page: str, begins: str) -> None:
    """Word by word, numbers within 5 %: rounding may differ between machines."""
    at = page.index(begins)
    written = page[at:].splitlines()[: len(text.splitlines())]
    for planned, line in zip(text.splitlines(), written, strict=True):
        assert NUMBER.sub("N", planned) == NUMBER.sub("N", line), "run `make recipes`"
        for one, other in zip(NUMBER.findall(planned), NUMBER.findall(line), strict=True):
            values = [float(each.replace(",", "")) for each in (one, other)]
            assert values[0] == pytest.approx(values[1], rel=0.05), f"run `make recipes`: {planned}"

"""The laboratory of real networks and its surrogate, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks/wan"


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"wan_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[f"wan_{name}"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def lab() -> ModuleType:
    return _module("lab")


@pytest.fixture(scope="module")
def surrogate() -> ModuleType:
    return _module("surrogate")


@pytest.fixture
def real(lab: ModuleType) -> ModuleType:
    if lacking := lab.missing():
        pytest.skip(lacking)
    return lab

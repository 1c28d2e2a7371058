"""The laboratory of real networks, as a module."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks/wan"


@pytest.fixture(scope="module")
def lab() -> ModuleType:
    spec = importlib.util.spec_from_file_location("wan_lab", FOLDER / "lab.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["wan_lab"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def real(lab: ModuleType) -> ModuleType:
    if lacking := lab.missing():
        pytest.skip(lacking)
    return lab

"""`import shoal`: fast, typed, and clear about what it cannot use."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal import importing, launcher
from shoal.config import from_tree
from shoal.launcher import preflight
from shoal.model import stages
from shoal.runtime.data.dataset import open_dataset

MODULE = """
import torch
from torch import nn
def build(): return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16))
def widths(): return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 4), nn.Linear(4, 16))
def number(): return 3
def fails(): raise OSError("no disk")
class Bare(nn.Module):
    def forward(self, x): return x
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
def undrawn(): return nn.Sequential(nn.Embedding(16, 8), Bare())
def rows(): return [list(range(9))] * 4
def dicts(): return [{"input_ids": list(range(9))}] * 4
def stream(): return iter(rows())
def nothing(): return []
def short(): return [[1, 2]]
def floats(): return [[0.5] * 9]
def hugging():
    from transformers import LlamaConfig, LlamaForCausalLM
    return LlamaForCausalLM(LlamaConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=24, vocab_size=32))
def words(): return __name__
answer = 42
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A module of the user's, beside the directory in which Python was started."""
    name = f"own_{request.node.name.partition('[')[0][-30:]}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def a_config(**sections: dict[str, Any]) -> shoal.Config:
    tree: dict[str, dict[str, Any]] = {
        "run": {"peers": 3, "stages": 3},
        "data": {"sequence": 8},
        "train": {"batch": 8, "microbatch": 2},
    }
    return from_tree({name: tree.get(name, {}) | sections.get(name, {}) for name in {*tree, *sections}})


def test_importing_shoal_and_its_names_brings_no_torch() -> None:
    code = (
        "import sys, shoal; list(map(lambda name: getattr(shoal, name), shoal.__all__)); print('torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
    assert set(shoal.__all__) <= set(dir(shoal))
    with pytest.raises(AttributeError, match="no attribute 'runs'; it has Checkpoint"):
        shoal.runs  # noqa: B018
    assert launcher.__name__ == "shoal.launcher", "submodules are as they were"


@pytest.mark.slow
def test_mypy_sees_the_names(tmp_path: Path) -> None:
    (tmp_path / "use.py").write_text(
        "import shoal\nreveal_type(shoal.run('a.toml').steps[0].loss)\nshoal.plan(stages='2')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", str(tmp_path / "use.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"MYPYPATH": str(Path(shoal.__file__).parents[1])},
    )
    assert 'Revealed type is "float | None"' in done.stdout.replace("builtins.", ""), done.stdout
    assert '"stages" to "plan" has incompatible type "str"' in done.stdout


def local() -> Callable[[], int]:
    def inner() -> int:
        return 1

    return inner


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (lambda: 1, "cannot import a lambda; write the function to a file"),
        (local(), "which is inside another object"),
        (3, "a int is no function"),
    ],
)
def test_a_function_that_peers_cannot_import_is_refused(given: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        shoal.run(model=given)


def test_a_function_is_named_as_peers_import_it(module: str) -> None:
    function = importing.load(f"{module}:build", "model.factory")
    assert importing.reference_to(function, "model") == f"{module}:build"
    assert importing.locate(f"{module}:build", "model.factory") == Path.cwd()


def test_a_module_that_is_not_there_is_said_before_anything_starts() -> None:
    config = a_config(model={"factory": "no_such_module:build"})
    (fault,) = preflight.model(config)
    assert f"no module 'no_such_module' in {Path.cwd()}" in fault and "my_model:build" in fault


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("number", "returns a int; return an nn.Sequential"),
        ("fails", r"failed on the meta device: OSError\('no disk'\)"),
        ("answer", "answer is a int, not a function"),
        ("missing", "has no such name"),
        ("undrawn", r"1: Bare has parameters or buffers but no reset_parameters\(\)"),
        ("widths", "every cut needs .* with the same D"),
    ],
)
def test_a_model_that_cannot_be_used_is_refused(module: str, name: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        stages.check(a_config(model={"factory": f"{module}:{name}"}, run={"stages": 2 if name == "undrawn" else 3}))


def test_a_models_stages_are_the_whole_model(module: str) -> None:
    config = a_config(model={"factory": f"{module}:build"})
    stages.check(config)
    names = [name for stage in range(3) for name, _ in stages.build(config, stage).named_parameters()]
    assert names == ["0.weight", "1.weight", "1.bias", "2.weight", "2.bias"]


def test_a_hugging_face_model_of_ones_own_is_cut_as_its_family_is(module: str) -> None:
    config = a_config(model={"factory": f"{module}:hugging"}, run={"stages": 2})
    stages.check(config)
    assert sum(1 for name, _ in stages.build(config, 1).named_parameters() if "layers.1" in name) > 0


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("stream", "returns a list_iterator without __len__, .*return a map-style dataset"),
        ("nothing", "returns a list without samples"),
        ("short", r"sample 0 is a list of shape \(2,\) .* must be data.sequence \+ 1 = 9 token ids"),
        ("floats", "type float64; it must be"),
        ("number", "returns a int without __len__"),
        ("fails", r"failed: OSError\('no disk'\)"),
    ],
)
def test_a_dataset_that_cannot_be_used_is_refused(module: str, name: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        open_dataset(a_config(data={"source": "dataset", "factory": f"{module}:{name}"}))


def test_a_dataset_is_read_in_a_seeded_order_each_sample_once_an_epoch(module: str) -> None:
    first, again = (
        open_dataset(a_config(data={"source": "dataset", "factory": f"{module}:{name}"})) for name in ("rows", "dicts")
    )
    assert first.digest == again.digest
    assert first.sample(0).tolist() == again.sample(7).tolist() == list(range(9))


def test_settings_that_a_factory_makes_meaningless_are_refused() -> None:
    for section, fields in (
        ("model", {"factory": "a:b", "hidden_size": 64}),
        ("model", {"factory": "a.b"}),
        ("data", {"factory": "a:b"}),
        ("data", {"source": "dataset"}),
    ):
        with pytest.raises(ValueError, match=r"has no effect|names no function"):
            a_config(**{section: fields})


def test_a_directory_without_a_run_or_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run is there"):
        shoal.Run(tmp_path)
    with pytest.raises(ValueError, match=r"no checkpoint \(it has no training.json\)"):
        shoal.Checkpoint(tmp_path)


def test_a_simulation_returns_its_results() -> None:
    (result,) = shoal.simulate("calm", 3)
    assert result.ok and result.seed == 3 and result.committed > 0
    with pytest.raises(ValueError, match="no_such"):
        shoal.simulate("no_such")


def test_a_plan_of_emulated_peers_is_predicted() -> None:
    config = {
        "run": {"peers": 4, "stages": 2},
        "device": {"executor": "emulated", "emulated_s": 0.1},
        "network": {"delay_s": 0.01},
    }
    planned = shoal.plan(config)
    assert planned.predicted is not None and planned.predicted.step_s > 0
    forecast = shoal.forecast(config, hours=0.1, seeds=2)
    # The forecaster's plays draw delays that differ
    assert forecast.planned_step_s == pytest.approx(planned.predicted.step_s, rel=0.01)
    assert 0 < forecast.steps.p50 <= 360 / forecast.planned_step_s and forecast.deaths.p95 == 0
    with pytest.raises(ValueError, match="no machines"):
        shoal.plan({})

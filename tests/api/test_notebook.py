"""The example notebook runs as it stands, in a kernel of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_example_notebook_trains_ones_own_model_and_plots_its_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    for needed in ("ipykernel", "pandas"):
        pytest.importorskip(needed)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    notebook = nbformat.read(ROOT / "docs/examples/own_model.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs: list[Any] = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    text = "".join(output.get("text", "") for output in outputs)
    assert [f"step {number}: loss" in text for number in (10, 20, 30)] == [True] * 3
    assert "0 lost, balanced: True" in text
    assert any("image/png" in output.get("data", {}) for output in outputs), "the metrics are plotted"
    assert (tmp_path / "runs/own/summary.json").exists()

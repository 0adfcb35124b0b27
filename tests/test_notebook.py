"""The notebook, run from its first cell to its last in a folder of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.materials import imported
from tests.runs import ROOT

NOTEBOOK = ROOT / "notebooks" / "first_run.ipynb"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_notebook_runs_and_its_model_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    client = imported("nbclient")
    import nbformat  # which it depends on

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    monkeypatch.delenv("PJRT_NPROC")
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is kept without outputs"
    client.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = ["".join(output.get("text", "") + str(output.get("data", {}).get("text/plain", ""))
                     for output in cell.get("outputs", [])) for cell in notebook.cells]
    assert eval(shown[5].strip().splitlines()[-1]) == (60, "runs/notebook")
    assert shown[9].rstrip().endswith("80")
    assert "held-out set" in shown[11]
    assert "Decoder: " in shown[14]
    from maxtext.report.run_files import read_metrics

    losses = [line["train/CE loss"] for line in read_metrics(tmp_path / "runs/notebook/metrics.jsonl")
              if "train/CE loss" in line]
    assert len(losses) == 80
    assert losses[-1] < losses[0] - 1

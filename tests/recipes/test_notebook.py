"""The notebook of two islands: stored without outputs, and it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "recipes" / "notebooks" / "two_islands.ipynb"


def test_notebook_is_stored_without_outputs() -> None:
    """The notebook is stored without outputs, and has one cell of parameters."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert len({cell["id"] for cell in cells}) == len(cells)
    assert sum("parameters" in cell["metadata"].get("tags", []) for cell in code) == 1


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The notebook runs with fewer steps; everything else as it stands."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    book = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(book)
    at = next(
        i for i, cell in enumerate(book.cells) if "parameters" in cell.metadata.get("tags", [])
    )
    book.cells.insert(
        at + 1, nbformat.v4.new_code_cell(f"STEPS, OUTPUT = 16, Path({str(tmp_path / 'out')!r})")
    )
    client = nbclient.NotebookClient(
        book,
        timeout=1200,
        kernel_name="python3",
        resources={"metadata": {"path": str(NOTEBOOK.parent)}},
    )
    client.execute()
    shown = {cell.id: cell.outputs for cell in book.cells if cell.cell_type == "code"}
    assert any("image/png" in output.get("data", {}) for output in shown["plot"])
    numbers = "".join(output.get("text", "") for output in shown["numbers"])
    assert numbers.count("islands agree, bit for bit") == 3, numbers
    sent = {
        p: json.loads((tmp_path / "out" / p / "summary.json").read_text())["bytes_sent_per_island"]
        for p in ("full", "demo", "diloco")
    }
    assert sent["demo"] < sent["diloco"] < sent["full"]

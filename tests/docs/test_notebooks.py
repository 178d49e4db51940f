"""The notebooks of docs/ run from the first cell to the last, on small stand-in data."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from fedsilo.core.errors import FedsiloError

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "docs" / "notebooks").glob("*.ipynb"))

# What makes runs smaller here, wherever a notebook has it; the soak tests run them as they are
SMALLER = {
    '"split.silo-train-size": 200': '"split.silo-train-size": 20',
    '"split.silo-test-size": 60': '"split.silo-test-size": 20',
    '"rounds": 3': '"rounds": 2',
    '"rounds": 5': '"rounds": 2',
    '"rounds": 8': '"rounds": 1',
    '"dataset": "heart-synthetic"': '"dataset": "heart-synthetic", "rounds": 2',
    "[300:600]": "[80:160]",
    "[:300]": "[:80]",
}


def _opened(path: Path) -> dict[str, object]:
    nbformat = pytest.importorskip("nbformat", reason="no nbformat: install the extra 'test'")
    notebook: dict[str, object] = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def _code(path: Path) -> list[dict[str, Any]]:
    cells = _opened(path)["cells"]
    assert isinstance(cells, list)
    return [cell for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path: Path) -> None:
    code = _code(path)
    assert code
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)


def test_the_first_notebook_imports_nothing_but_fedsilo() -> None:
    path = NOTEBOOKS[0].with_name("first-run.ipynb")
    source = "\n".join(cell["source"] for cell in _code(path))
    assert re.findall(r"^\s*(?:import|from)\s.*", source, re.MULTILINE) == ["import fedsilo"]


def test_what_is_made_smaller_stands_in_a_notebook() -> None:
    cells = "\n".join(cell["source"] for path in NOTEBOOKS for cell in _code(path))
    assert [wanted for wanted in SMALLER if wanted not in cells] == []


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_cells_of_a_notebook_run_one_after_another(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict[str, object] = {"__name__": "cells"}
    for cell in _code(path):
        source = cell["source"]
        for wanted, fewer in SMALLER.items():
            source = source.replace(wanted, fewer)
        code = compile(source, str(path), "exec")
        if "raises-exception" not in cell["metadata"].get("tags", []):
            exec(code, names)
            continue
        # A user's mistake, which a notebook shows as one line
        with pytest.raises(FedsiloError) as caught:
            exec(code, names)
        assert len(caught.value._render_traceback_()) == 1
    assert list((tmp_path / "runs").iterdir())


@pytest.mark.soak
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="no nbclient: install the extra 'test'")
    pytest.importorskip("ipykernel", reason="no ipykernel: install the extra 'test'")
    repository = str(path.parents[2])
    monkeypatch.setenv("PYTHONPATH", repository + os.pathsep + os.environ.get("PYTHONPATH", ""))
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(_opened(path), timeout=600, resources=where).execute()
    assert list((tmp_path / "runs").iterdir())

"""The notebooks of the documentation are executed, and give what is written in them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.architecture.source import ROOT

pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
LIMIT_SECONDS = 300  # against hanging, not a measurement

pytestmark = pytest.mark.filterwarnings("ignore")  # what Jupyter says of its own


def said(notebook: Any) -> list[str]:
    """What each cell of code prints."""
    return [
        "".join(one.text for one in cell.outputs if one.output_type == "stream")
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_gives_what_it_shows(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nbformat
    from nbclient import NotebookClient

    programs = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv(
        "PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    )
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(path, as_version=4)
    shown = said(notebook)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=LIMIT_SECONDS, resources=resources).execute()
    if os.environ.get("WRITE_NOTEBOOKS"):
        nbformat.write(notebook, path)
    else:
        assert said(notebook) == shown
    frame = notebook.cells[-1].outputs[0].data["text/html"]
    assert frame.startswith("<iframe srcdoc=")

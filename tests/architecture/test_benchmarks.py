"""Every benchmark can be started, and its tables say on which processor they were made."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import benchmarks
import pytest

from tests.architecture.source import ROOT

FOLDER = ROOT / "benchmarks"
OF_TEXT = {"house", "imports"}
"""Folders that count lines of code and keys of configs, which no processor changes."""
FILES = [path for path in sorted(FOLDER.glob("*/*")) if path.parent.name not in OF_TEXT]
SCRIPTS = [path for path in FILES if path.suffix == ".py" and "__main__" in path.read_text()]
READMES = [path for path in FILES if path.name == "README.md"]


def _name(path: Path) -> str:
    return str(path.relative_to(FOLDER))


@pytest.mark.parametrize("path", SCRIPTS, ids=_name)
def test_every_script_names_the_processor(path: Path) -> None:
    text = path.read_text()
    assert "from benchmarks.machine import announce" in text
    assert "\n    announce()\n" in text


@pytest.mark.parametrize("path", READMES, ids=_name)
def test_every_readme_says_on_which_processor_its_tables_were_made(path: Path) -> None:
    text = path.read_text()
    assert "processor" in text or "AMD EPYC" in text


def test_every_module_can_be_imported() -> None:
    found = pkgutil.walk_packages(benchmarks.__path__, "benchmarks.")
    names = [module.name for module in found if not module.name.endswith("__main__")]
    assert len(names) > 90
    for name in names:
        importlib.import_module(name)

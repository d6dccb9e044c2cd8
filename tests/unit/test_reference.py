"""`module:function` by folder: the config's own comes first, also where ranks are threads."""

from __future__ import annotations

import importlib
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from plait import reference
from plait.errors import ModelError

TABLES = {"model": {"python": "users_part:name"}}


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two folders whose modules have one name and differ in what their function returns."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "users_part", raising=False)
    found = [tmp_path / "first", tmp_path / "second"]
    for folder in found:
        folder.mkdir()
        (folder / "users_part.py").write_text(f"def name():\n    return {folder.name!r}\n")
    return found


def loaded(folder: Path) -> str:
    reference.look_beside(folder / "run.toml", TABLES)
    return str(reference.load("users_part:name", ModelError)())


def test_a_namesake_beside_another_config_takes_the_place_of_the_first(folders: list[Path]) -> None:
    assert [loaded(folder) for folder in (*folders, folders[0])] == ["first", "second", "first"]


def test_imports_of_other_threads_do_not_disturb_it(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded(folders[0])

    def all_finders() -> None:
        raise RuntimeError("dictionary changed size during iteration")

    monkeypatch.setattr(importlib, "invalidate_caches", all_finders)
    assert loaded(folders[1]) == "second"


def test_threads_load_one_module(folders: list[Path]) -> None:
    loaded(folders[0])
    reference.look_beside(folders[1] / "run.toml", TABLES)
    with ThreadPoolExecutor(8) as threads:
        ranks = [threads.submit(reference.load, "users_part:name", ModelError) for _ in range(32)]
        functions = {rank.result() for rank in ranks}
    assert len(functions) == 1

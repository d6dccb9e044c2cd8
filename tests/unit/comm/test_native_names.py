"""Collectives are found by the names that torch has: 2.13 renamed two of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist

from plait.comm.backends import native

NEWER = ("all_gather_single", "reduce_scatter_single")


def loaded_again() -> ModuleType:
    spec = importlib.util.spec_from_file_location("native_again", Path(native.__file__))
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    return again


def test_an_older_torch_has_the_older_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for newer in NEWER:
        monkeypatch.delattr(dist, newer, raising=False)
    again = loaded_again()
    assert again._all_gather is dist.all_gather_into_tensor
    assert again._reduce_scatter is dist.reduce_scatter_tensor


def test_a_newer_torch_has_the_newer_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for newer in NEWER:
        monkeypatch.setattr(dist, newer, newer, raising=False)
    again = loaded_again()
    assert (again._all_gather, again._reduce_scatter) == NEWER

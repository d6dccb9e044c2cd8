"""A user's model by `module:function`, and every way in which that can be wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from plait.errors import ModelError
from plait.models import user

SOURCE = """
import torch
from torch import nn
CONSTANT = 3
TABLE = torch.arange(3.0)
def make_net():
    return nn.Linear(2, 3)
def number():
    return 3
def broken():
    raise KeyError("x")
"""


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_net.py").write_text(SOURCE)
    (tmp_path / "users_typo.py").write_text("import torhc_not_there\n")
    (tmp_path / "users_bug.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("users_net", "users_typo", "users_bug"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_tensors_of_its_module_have_values_where_the_model_has_none() -> None:
    with torch.device("meta"):
        assert user.make("users_net:make_net").weight.is_meta
    assert sys.modules["users_net"].TABLE.tolist() == [0.0, 1.0, 2.0]


def test_the_working_directory_is_searched() -> None:
    assert isinstance(user.make("users_net:make_net"), nn.Linear)


@pytest.mark.parametrize(
    ("python", "message"),
    [
        ("users_net", "not of the form 'module:function'"),
        ("users_nte:make_net", "there is no module 'users_nte'"),
        ("users_net.part:make_net", "there is no module 'users_net.part'"),
        ("users_typo:make_net", "'users_typo' imports 'torhc_not_there', which is not installed"),
        ("users_bug:make_net", "importing 'users_bug' failed: ZeroDivisionError"),
        ("users_net:make_nte", "has no 'make_nte'; did you mean 'make_net'?"),
        ("users_net:CONSTANT", "'CONSTANT' is a int, not a function"),
        ("users_net:number", "returned a int, not a torch.nn.Module"),
        ("users_net:broken", "failed: KeyError: 'x'"),
    ],
)
def test_errors(python: str, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        user.make(python)
    assert message in str(caught.value)

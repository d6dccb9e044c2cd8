"""Blocks as graphs: every axis that leaves a block alone, against one device. The tracing is torch's own; the code generator
of the default backend is left out here, as it takes a C++ compiler and minutes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from plait.comm import World
from plait.engine import compiling
from plait.errors import ModelError, NotAvailable
from tests.parity.harness import DEEP, FAMILIES, TOLERANCE, check

Run = Callable[..., list[Any]]


@pytest.mark.parametrize("plan", ["dp2:zero3 mb2 remat:full", "pp2:1f1b mb3"])
def test_equals_one_device(ranks: Run, plan: str) -> None:
    outcome = check(quietly(ranks), f"{plan} compile precision:float64", DEEP["gpt-deep"], compile_backend="aot_eager")
    assert outcome.largest <= TOLERANCE, outcome


def quietly(run: Run) -> Run:
    """The tracer looks at `.grad` of what is no leaf, and torch warns of that: warnings are no errors here."""
    return lambda n, fn, *args, **options: run(n, without_warnings, fn, *args, **options)


def without_warnings(world: World, fn: Callable[..., Any], *args: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fn(world, *args)


def test_refused_without_blocks_with_dropout_and_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="block by block"):
        compiling.apply(torch.nn.Linear(2, 2), [])
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5)), torch.nn.Linear(2, 2))
    with pytest.raises(ModelError, match=r"'0\.1' drops out 0\.5"):
        compiling.apply(model, ["0"], backend="eager")
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(NotAvailable, match=r"needs a C\+\+ compiler"):
        compiling.apply(FAMILIES["mlp"].model(), ["blocks.0"])

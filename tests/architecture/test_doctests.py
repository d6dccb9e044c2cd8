"""The examples in docstrings: each prints what it says."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import plait

ROOT = Path(plait.__file__).parent
WITH_EXAMPLES = sorted(path for path in ROOT.rglob("*.py") if ">>> " in path.read_text())


def test_there_are_examples() -> None:
    assert len(WITH_EXAMPLES) > 20


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_print_what_they_say(path: Path) -> None:
    name = ".".join(("plait", *path.relative_to(ROOT).with_suffix("").parts))
    module = importlib.import_module(name.removesuffix(".__init__"))
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed

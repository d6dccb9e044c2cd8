"""The functions of a file of a training step are those of its top level."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.errors import ConfigError
from plait.verify.outside.source import parse

INNER = """
def train_step(model, batch, loss):
    make = model
    return [update for update in batch]
"""


def test_a_name_inside_of_a_function_is_no_function_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "steps.py"
    file.write_text(INNER)
    with pytest.raises(ConfigError, match=r"make\(\)") as said:
        parse(str(file))
    assert "update" not in str(said.value)


def test_a_function_under_a_condition_is_one_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "steps.py"
    file.write_text(f"if True:\n    def make():\n        pass\n{INNER}")
    assert parse(f"{file}:train_step").second == "train_step"

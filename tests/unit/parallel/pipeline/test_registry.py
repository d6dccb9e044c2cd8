"""A schedule is two things: a module with its generator, and its row among the facts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import plait
from plait.errors import ScheduleError
from plait.parallel.pipeline.actions import Schedule
from plait.parallel.pipeline.schedules import SCHEDULES
from plait.parallel.pipeline.schedules.registry import GENERATORS, generates

GENERATOR = '''"""Late: GPipe whose backwards begin with the last micro-batch."""

from plait.parallel.pipeline.actions import Schedule, backward, forward, straight
from plait.parallel.pipeline.schedules.registry import generates


@generates("late")
def late(num_ranks: int, num_micro_batches: int) -> Schedule:
    def actions(stage: int):
        yield from (forward(stage, j) for j in range(num_micro_batches))
        yield from (backward(stage, j) for j in reversed(range(num_micro_batches)))

    ranks = tuple(tuple(actions(stage)) for stage in range(num_ranks))
    return Schedule("late", straight(num_ranks), num_micro_batches, ranks)
'''
ROW = '        "late": ScheduleFacts(live=_every_micro_batch),\n'
FIRST_ROW = '        "naive": ScheduleFacts('
CONFIG = """
[model]
name = "mlp"
in_features = 64
hidden_size = 8
num_hidden_layers = 4
out_features = 10
[data]
name = "digits"
[train]
steps = 1
global_batch = 4
optimizer = "sgd"
lr = 0.1
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package with the schedule `late`: one new module and one new line."""
    source = Path(plait.__file__).parent
    copy = tmp_path / "plait"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "parallel/pipeline/schedules/late.py").write_text(GENERATOR)
    facts = copy / "plan/facts.py"
    text = facts.read_text()
    assert text.count(FIRST_ROW) == 1
    facts.write_text(text.replace(FIRST_ROW, ROW + FIRST_ROW))
    return copy


def answer(package: Path, *arguments: str) -> dict[str, object]:
    """The JSON of a verb of that package; exit 0 or the test fails."""
    run = subprocess.run(
        [sys.executable, "-m", "plait", *arguments, "--json"],
        cwd=package.parent,
        env={**os.environ, "PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    result: dict[str, object] = json.loads(run.stdout)
    return result


def test_a_generator_and_a_row_are_all_that_a_new_schedule_needs(package: Path) -> None:
    (package.parent / "tiny.toml").write_text(CONFIG)
    drawn = answer(package, "schedule", "late", "--stages", "2", "--microbatches", "3")
    assert drawn["bubble_fraction"] == pytest.approx(1 / 4)
    plan = "pp2:late mb4"
    guess = answer(package, "estimate", "tiny.toml", "--plan", plan, "--cluster", "h100x2")
    assert guess["plan"] == plan
    proof = answer(package, "verify", "tiny.toml", "--plan", plan, "--steps", "1")
    assert proof["ok"] is True


def test_a_name_has_one_generator() -> None:
    def other(num_ranks: int, num_micro_batches: int) -> Schedule:
        raise AssertionError

    with pytest.raises(ScheduleError, match=r"two generators are called 'gpipe': .*gpipe\.gpipe"):
        generates("gpipe")(other)
    assert GENERATORS["gpipe"] is SCHEDULES["gpipe"].generate


def test_a_generator_without_a_row_is_named(package: Path) -> None:
    facts = package / "plan/facts.py"
    facts.write_text(facts.read_text().replace(ROW, ""))
    run = subprocess.run(
        [sys.executable, "-c", "import plait.parallel.pipeline.schedules"],
        env={**os.environ, "PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "late has one of them only" in run.stderr

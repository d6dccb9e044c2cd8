"""Disturbances end with the bits of a calm run, or in one sentence.

Ten of them run here; `python -m tests.fault.disturbed` runs them all.
"""

from __future__ import annotations

import pytest

from tests.fault.disturbances import CASES
from tests.fault.disturbed import Judge

SAMPLE = (
    "launcher killed, then --resume auto",
    "rank 0",
    "before the first step",
    "stopped",
    "used up",
    "replan auto",
    "SIGTERM to everybody",
    "muon, tensor parallel",
    "experts in a pipeline",
    "too many processes",
)


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    return Judge(tmp_path_factory.mktemp("disturbed"))


def test_no_two_disturbances_have_one_name() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)


@pytest.mark.long
@pytest.mark.parametrize("name", SAMPLE)
def test_a_disturbed_run_ends_well(name: str, judge: Judge) -> None:
    case = next(case for case in CASES if case.name == name)
    wrong, said = judge.judge(case)
    assert not wrong, said

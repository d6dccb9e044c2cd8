"""Every disturbance ends with the bits of a calm run, or in one sentence."""

from __future__ import annotations

import pytest

from tests.fault.disturbances import CASES
from tests.fault.disturbed import Disturbance, Judge


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    return Judge(tmp_path_factory.mktemp("disturbed"))


def test_no_two_disturbances_have_one_name() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_disturbed_run_ends_well(case: Disturbance, judge: Judge) -> None:
    wrong, said = judge.judge(case)
    assert not wrong, said

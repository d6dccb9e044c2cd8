"""Every file of the source has tests that run it, and the answer names files that are there."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.architecture.source import PACKAGE, each_room, tree
from tests.which import FAR, PROOFS, TESTS, nearest, proof_of

# Names of packages, and the entry that `python -m plait` runs, have no behaviour of their own.
FORWARDING = (ast.Import, ast.ImportFrom, ast.Assign, ast.Expr, ast.If)


def _has_code(path: Path) -> bool:
    return not all(isinstance(node, FORWARDING) for node in tree(path).body)


@each_room
def test_a_file_has_a_test_within_reach(path: Path) -> None:
    if not _has_code(path):
        return
    tests, distance = nearest(path)
    assert tests, f"no test reaches it within {FAR} imports"
    assert distance <= FAR
    assert all(test.exists() for test in tests)


def test_every_proof_is_there_and_is_of_a_room() -> None:
    missing = {
        room: proof
        for room, proof in PROOFS.items()
        if not (PACKAGE / room).is_dir() or not (TESTS / proof).is_file()
    }
    assert not missing


def test_the_nearest_test_and_the_innermost_proof_are_named() -> None:
    guard, distance = nearest(PACKAGE / "engine" / "guard.py")
    assert (guard[0], distance) == (TESTS / "unit" / "engine" / "test_guard.py", 0)
    doctor, _ = nearest(PACKAGE / "cli" / "doctor.py")
    assert any(test.is_relative_to(TESTS / "fault") for test in doctor), "tests that speak it"
    assert proof_of(PACKAGE / "parallel" / "data" / "zero3.py") == (
        TESTS / "parity" / "test_data_parallel.py"
    )
    schedules = PACKAGE / "parallel" / "pipeline" / "schedules"
    assert proof_of(schedules / "gpipe.py") == TESTS / "golden" / "test_schedules.py"

"""Which tests run a file of the source? `python -m tests.which src/plait/ROOM/FILE.py` says it.

The nearest come first: a test of the file's name, and tests that import it or speak its verb.
A file that no test imports is reached through the modules that import it. The proof of its room
comes last: the table of plans that a change there may break.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

from tests.architecture.source import PACKAGE, ROOT, files, module
from tests.conftest import LONG

MOST = 5  # tests that are named for one file
FAR = 4  # imports between a test and a file that it still tests
TESTS = ROOT / "tests"
VERBS = PACKAGE / "cli"
SPEAKERS = {TESTS / "cli", TESTS / "unit" / "cli", TESTS / "fault"}  # their tests call verbs
PLAIN = re.compile(r"^\s*import ((?:plait|tests)[\w.]*)$", re.MULTILINE)
FROM = re.compile(r"^\s*from ((?:plait|tests)[\w.]*) import (\([^)]*\)|.*)$", re.MULTILINE)
NAME = re.compile(r"(\w+)(?: as \w+)?")
COMMENT = re.compile(r"#.*")
DOOR = re.compile(r"\bplait\.(\w+)")
# Folders whose modules are loaded by their names, by the file here.
LOADERS = {"parallel/pipeline/schedules": "__init__.py"}
# The test that holds a room equal to one device, counted or alive. The longest folder counts.
PROOFS = {
    "checkpoint": "parity/test_resume.py",
    "comm": "comm/test_operations.py",
    "comm/shm": "comm/test_process_group.py",
    "datasets": "parity/test_packing.py",
    "doctor": "fault/test_hangs_of_a_run.py",
    "engine": "parity/test_composition.py",
    "engine/state": "parity/test_resume.py",
    "launcher": "fault/test_launch.py",
    "loops": "loops/test_scripts.py",
    "mesh": "parity/test_composition.py",
    "models": "parity/test_hybrid.py",
    "outer": "parity/test_async_server.py",
    "outer/federated": "federated/test_simulation.py",
    "parallel/context": "parity/test_context_parallel.py",
    "parallel/data": "parity/test_data_parallel.py",
    "parallel/expert": "parity/test_expert_parallel.py",
    "parallel/pipeline": "parity/test_pipeline.py",
    "parallel/pipeline/schedules": "golden/test_schedules.py",
    "parallel/tensor": "parity/test_tensor_parallel.py",
    "predict/cost": "parity/test_predicted_traffic.py",
    "run": "fault/test_interrupted.py",
    "verify": "parity/test_planted.py",
    "verify/outside": "parity/test_outside.py",
}


@cache
def modules() -> dict[str, Path]:
    """Every module of the source, and every file of tests, by its dotted name."""
    ours = {module(path): path for path in files()}
    return ours | {_dotted(path): path for path in sorted(TESTS.rglob("*.py"))}


def _dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imported(path: Path) -> frozenset[str]:
    """The modules that define what a file imports."""
    homes = {home(package, name) for package, name in _imports(path) if package in modules()}
    homes |= {home("plait", name) for name in DOOR.findall(path.read_text())}
    if path.name in LOADERS.values() and _folder(path) in LOADERS:
        homes |= {module(beside) for beside in path.parent.glob("*.py") if beside != path}
    return frozenset(homes)


@cache
def _imports(path: Path) -> tuple[tuple[str, str], ...]:
    """(package, name) of every import, lazy ones included: text, since trees take seconds."""
    text = path.read_text()
    pairs = [(package, "") for package in PLAIN.findall(text)]
    for package, names in FROM.findall(text):
        pairs += [(package, name) for name in NAME.findall(COMMENT.sub("", names))]
    return tuple(pairs)


@cache
def home(package: str, name: str) -> str:
    """The module that defines a name: `plait.plan.plan` for `Plan` of `plait.plan`."""
    if f"{package}.{name}" in modules():
        return f"{package}.{name}"
    for source, given in _imports(modules()[package]):
        if given == name and source in modules() and source != package:
            return home(source, name)
    return package


def _folder(path: Path) -> str:
    """The folder of a module within the source."""
    return path.parent.relative_to(PACKAGE).as_posix() if PACKAGE in path.parents else ""


@cache
def importers() -> dict[str, frozenset[Path]]:
    """The files that import each module."""
    users: dict[str, set[Path]] = {name: set() for name in modules()}
    for path in modules().values():
        for name in imported(path):
            users[name].add(path)
    return {name: frozenset(paths) for name, paths in users.items()}


def nearest(path: Path) -> tuple[list[Path], int]:
    """The tests that run a module of the source, the nearest first, and how far they are.

    The distance is 0 for a test of its name or verb, else the number of imports between them.
    """
    names = _named(path)
    if names:
        return sorted(names), 0
    seen = ring = {path}
    for distance in range(1, FAR + 1):
        ring = {user for step in ring for user in importers()[_name(step)]} - seen
        seen = seen | ring
        tests = {user for user in ring if user.name.startswith("test_")}
        if tests:
            return sorted(tests, key=lambda test: _rank(test, path)), distance
    return [], FAR + 1


def _name(path: Path) -> str:
    return module(path) if PACKAGE in path.parents else _dotted(path)


def _named(path: Path) -> set[Path]:
    """Tests of the file's name in the folder of its room, and tests that speak its verb."""
    room = TESTS / "unit" / _folder(path) if _folder(path) != "." else TESTS
    named = set(room.rglob(f"test_{path.stem}.py"))
    if path.parent == VERBS:
        verb = re.compile(rf"""["' ]{path.stem.replace("_", "-")}["' ]""")
        spoken = {test for test, text in _texts().items() if verb.search(text)}
        of_verbs = {test for test in spoken if test.parent in SPEAKERS}
        named |= of_verbs or spoken
    return named


def _rank(test: Path, path: Path) -> tuple[bool, bool, int, Path]:
    """Tests of the room before others, those that import little before those that import all."""
    room = path.relative_to(PACKAGE).parts[0]
    unit = TESTS / "unit"
    return unit / room not in test.parents, unit not in test.parents, len(imported(test)), test


@cache
def _texts() -> dict[Path, str]:
    """The text of every file of tests."""
    return {test: test.read_text() for test in TESTS.rglob("test_*.py")}


def _is_long(test: Path) -> bool:
    return test.relative_to(ROOT).as_posix() in LONG


def proof_of(path: Path) -> Path | None:
    """The test of many plans, of the innermost folder that has one."""
    for folder in (path.relative_to(PACKAGE).parent, *path.relative_to(PACKAGE).parents):
        if folder.as_posix() in PROOFS:
            return TESTS / PROOFS[folder.as_posix()]
    return None


def main(arguments: list[str]) -> int:
    """Print a command of pytest for each file."""
    for argument in arguments:
        path = Path(argument).resolve()
        if path not in files():
            print(f"{argument} is no module of src/plait", file=sys.stderr)
            return 2
        tests, _ = nearest(path)
        proof = proof_of(path)
        chosen = [*tests[:MOST], *([proof] if proof and proof not in tests[:MOST] else [])]
        names = " ".join(str(test.relative_to(ROOT)) for test in chosen)
        more = f"  # and {len(tests) - MOST} more" if len(tests) > MOST else ""
        whole = '-m "" ' if any(_is_long(test) for test in chosen) else ""
        print(f"python -m pytest {whole}{names}{more}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The import law: who may know whom. A room imports itself, and the rooms that its line names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import PACKAGE, files, imports, module, room

WORDS = {"errors", "plan", "cluster", "config", "mesh", "trace"}
STRATEGIES = {"data", "tensor", "context", "expert", "pipeline", "checkpoint"}
GROUND = {"patterns", "paths", "torch_internals"}
ENGINE = {
    *WORDS,
    *GROUND,
    "comm",
    *STRATEGIES,
    "products",
    "origin",
    "reference",
    "models",
    "datasets",
}
PLANNING = {
    *WORDS,
    "toml",
    "comm",
    "pipeline",
}  # their pure parts: see test_what_plans_needs_no_torch

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "plan": {"errors"},
    "toml": {"errors"},
    "cluster": {"errors", "toml"},
    "config": {"errors", "toml", "plan", "cluster", "reference"},
    "mesh": {"errors", "plan"},
    "trace": {"errors", "plan", "mesh"},
    "paths": set(),
    "patterns": set(),  # names of modules
    "torch_internals": set(),  # the private functions of torch
    "comm": {*WORDS, "paths", "torch_internals"} - {"config"},
    **dict.fromkeys(STRATEGIES, {*WORDS, *GROUND, "comm"} - {"config"}),
    "expert": {*WORDS, "comm", "models"}
    - {"config"},  # it fills the seams that a router and its experts leave open
    **dict.fromkeys(
        ("pipeline", "tensor"), {*WORDS, *GROUND, "comm", "products", "origin"} - {"config"}
    ),
    "products": {
        "errors",
        "cluster",
        "paths",
        "torch_internals",
    },  # which library multiplies, by a measured table
    "reference": {"errors"},  # "module:function" of a config
    "origin": {"errors"},  # the module and the line that an error came from
    "models": {"errors", "patterns", "products", "reference"},
    "datasets": {"errors", "reference"},
    "launcher": {"errors", "comm"},  # of comm, the roster of ranks that come and go
    "outer": {*WORDS, "comm", "data"} - {"config"},
    "engine": {*ENGINE, "outer"},
    "verify": {*ENGINE, "outer", "engine", "launcher"},
    "federated": {*ENGINE, "outer", "engine", "launcher", "verify"},
    "cost": {
        *PLANNING,
        *GROUND,
        "models",
        "datasets",
        "reference",
    },  # made on the meta device, where a config names code
    "planner": {*PLANNING, "cost"},
    "cli": {"", "toml", *ENGINE, "engine", "launcher", "verify", "federated", "cost", "planner"},
}
DOORS = {"", "__main__"}

NEEDS_NO_TORCH = [
    "plait",
    "plait.errors",
    "plait.plan",
    "plait.cluster",
    "plait.config",
    "plait.mesh",
    "plait.trace",
    "plait.comm",
    "plait.comm.transitions",
    "plait.comm.ledger",
    "plait.launcher",
    "plait.pipeline",
    "plait.cost",
    "plait.planner",
    "plait.cli",
    *(
        f"plait.cli.{verb}"
        for verb in (
            "plan",
            "estimate",
            "schedule",
            "train",
            "compare",
            "verify",
            "probe",
            "report",
            "federated",
        )
    ),
]


@pytest.mark.parametrize("path", files(), ids=module)
def test_a_room_imports_only_what_it_may(path: Path) -> None:
    own = room(module(path))
    if own in DOORS:
        return
    assert own in MAY_IMPORT, f"a new room, '{own}': give it a line in MAY_IMPORT"
    for name, line in imports(path):
        if name.split(".")[0] == "plait":
            other = room(name)
            if other == own:
                continue
            assert other in MAY_IMPORT[own], (
                f"{path.relative_to(PACKAGE)}:{line}: '{own}' must not import '{name}'"
            )


def test_models_and_datasets_know_nothing_but_torch_and_what_numbers_need() -> None:
    allowed = {
        "torch",
        "numpy",
        "sklearn",
        "plait",
        "transformers",
        "safetensors",
        "typing_extensions",
        *sys.stdlib_module_names,
    }
    for path in files():
        if room(module(path)) in {"models", "datasets"}:
            for name, line in imports(path):
                assert name.split(".")[0] in allowed, (
                    f"{path.relative_to(PACKAGE)}:{line}: imports {name}"
                )


def test_what_plans_needs_no_torch() -> None:
    """One process imports them one after another and stops at the first that loads torch."""
    existing = [name for name in NEEDS_NO_TORCH if _exists(name)]
    script = (
        "import importlib, sys\n"
        f"for name in {existing!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, f'importing {name} loads torch'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_the_door_loads_nothing_heavy() -> None:
    script = "import plait, sys; print(sorted({'torch', 'numpy', 'pydantic', 'rich', 'sklearn'} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def _exists(name: str) -> bool:
    path = PACKAGE.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()

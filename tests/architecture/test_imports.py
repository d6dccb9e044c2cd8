"""The import law: who may know whom. A room imports itself, and the rooms that its line names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.architecture.source import PACKAGE, each_room, files, imports, module, room

WORDS = {"errors", "plan", "cluster", "config", "mesh", "trace", "doctor"}
SPLITS = {f"parallel.{name}" for name in ("data", "tensor", "context", "expert", "pipeline")}
STRATEGIES = {*SPLITS, "checkpoint"}
FLOOR = {
    *WORDS,
    "batch_trees",
    "forwards",
    "divided_views",
    "dropout_calls",
    "held",
    "uncopied",
    "paths",
    "products",
    "origin",
    "reference",
    "patterns",
    "torch_internals",
    "random_state",
    "regions",
    "stateless",
    "systems",
}
ENGINE = {*FLOOR, "cache_folder", "comm", *STRATEGIES, "models", "datasets", "outer"}
RUN = {*ENGINE, "engine", "launcher"}
PLANNING = {
    *WORDS,
    "toml",
    "comm",
    "parallel.pipeline",
    "patterns",
    "torch_internals",
    "random_state",
    "stateless",
}  # see test_what_plans_needs_no_torch
LOWER = FLOOR - {"config", "reference"}

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "values": set(),  # names of types; every room may import them
    "batch_trees": {"errors"},  # what a batch holds, in whatever holds it
    "forwards": {"torch_internals"},  # what a module of a model runs, and what its copies do
    "held": set(),  # tensors inside of objects of any kind
    "dropout_calls": set(),  # which calls of torch drop numbers at random
    "divided_views": {"forwards"},  # what a forward views, on a rank that has a part of it
    "plan": {"errors"},
    "toml": {"errors"},
    "paths": set(),  # limits behind which large tensors take other ways
    "patterns": set(),  # names of modules with wildcards
    "random_state": {"held"},  # who draws, one thread after another
    "regions": {"torch_internals"},  # what a forward recomputes by its own code
    "stateless": set(),  # a module with other tensors than its own
    "systems": {"errors"},  # where ranks can run
    "torch_internals": {"imports"},  # private functions of torch
    "imports": set(),  # what to do once a module is loaded
    "reference": {"errors"},  # "module:function" of a config
    "origin": {"errors", "torch_internals"},  # the module and line that an error came from
    "cache_folder": set(),  # where this machine keeps measurements and tokens
    "cluster": {"errors", "toml", "cache_folder"},
    "config": {"errors", "toml", "plan", "cluster", "reference"},
    "interop": {"errors", "toml", "plan"},  # configs of other frameworks
    "jobs": {"errors"},  # scripts for queues and clusters
    "mesh": {"errors", "plan"},
    "trace": {"errors", "plan", "mesh"},
    "uncopied": {"errors"},  # what a rank keeps, and no copy of it
    "doctor": {"errors", "uncopied"},  # what ranks do, read from outside; knows no torch
    "comm": LOWER - {"products", "origin"},
    "products": LOWER - {"config", "trace", "mesh", "origin"},  # which library multiplies
    **{name: {*LOWER, "comm"} for name in STRATEGIES},
    "parallel.expert": {*LOWER, "comm", "models"},  # it fills the seams that a router leaves open
    "models": {
        "forwards",
        "divided_views",
        "dropout_calls",
        "errors",
        "products",
        "reference",
        "patterns",
        "torch_internals",
        "random_state",
    },
    "datasets": {"errors", "reference", "cache_folder"},
    "launcher": {
        "errors",
        "comm",
        "doctor",
        "imports",
        "systems",
    },  # of comm, the rendezvous of ranks that come and go
    "outer": {*LOWER, "comm", "parallel.data"},
    "engine": ENGINE,
    "run": {*RUN, "toml", "predict.cost"},  # a report sets predictions beside measurements
    "loops": {*ENGINE, "engine"},  # the training loops of other libraries
    "explain": {*ENGINE, "engine", "toml"},  # small runs on simulated ranks, written down
    "verify": {*RUN, "run"},
    "pytest_plugin": {"verify"},  # found by pytest where plait is installed
    "outer.federated": {*RUN, "run", "verify"},
    # models are made on the meta device, where a config names code
    "predict.cost": {
        *PLANNING,
        "models",
        "datasets",
        "reference",
        "products",
        "batch_trees",
        "forwards",
    },
    "predict.planner": {*PLANNING, "predict.cost"},
    "predict.probe": {*RUN, "run", "predict.cost"},
    "explore": {"errors", "toml", "predict.cost"},  # a page; the verbs answer it
    "cli": {
        "",
        "toml",
        "interop",
        "jobs",
        "explain",
        "explore",
        *RUN,
        "run",
        "verify",
        "outer.federated",
    }
    | {"predict.cost", "predict.planner", "predict.probe"},
    # old addresses of two rooms
    "context": {"parallel.context"},
    "cost": {"predict.cost"},
}
DOORS = {"", "__main__", "parallel", "predict"}

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
    "plait.parallel.pipeline",
    "plait.predict.cost",
    "plait.predict.planner",
    "plait.interop",
    "plait.cli",
    *(
        f"plait.cli.{verb}"
        for verb in (
            "plan",
            "estimate",
            "calibrate",
            "schedule",
            "explain",
            "train",
            "compare",
            "verify",
            "probe",
            "report",
            "doctor",
            "status",
            "federated",
            "config",
            "explore",
        )
    ),
    *(f"plait.explore.{name}" for name in ("html", "known", "question", "server")),
]


@each_room
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
            assert other == "values" or other in MAY_IMPORT[own], (
                f"{path.relative_to(PACKAGE)}:{line}: '{own}' must not import '{name}'"
            )


def test_models_and_datasets_know_nothing_but_torch_and_what_numbers_need() -> None:
    allowed = {
        "torch",
        "numpy",
        "sklearn",
        "pyarrow",
        "datasets",
        "tokenizers",
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
    script = (
        "import plait, sys; print(sorted({'torch', 'numpy', 'pydantic', 'rich', 'sklearn'} & "
        "sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def _exists(name: str) -> bool:
    path = PACKAGE.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()

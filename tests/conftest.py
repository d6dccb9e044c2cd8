"""Fixtures for all tests: `ranks` runs a function on real Gloo ranks, from a pool of processes that
is started once.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch.distributed as dist
from hypothesis import settings

from plait.torch_internals import without_talk_of_kernels
from tests.helpers.pool import Pool, start_server

without_talk_of_kernels()
settings.register_profile("plait", deadline=None)  # a shared machine may be slow at any moment
settings.load_profile("plait")


ROOT = Path(__file__).parents[1]

# Files whose tests start whole runs, or walk long tables: `python -m pytest -m long` runs them.
LONG = frozenset(
    {
        "tests/browser/test_static_page.py",
        "tests/cli/test_commands.py",
        "tests/cli/test_data.py",
        "tests/cli/test_live.py",
        "tests/cli/test_remat_auto.py",
        "tests/cli/test_slurm.py",
        "tests/comm/test_hosts.py",
        "tests/comm/test_operations.py",
        "tests/docs/test_notebooks.py",
        "tests/docs/test_tutorials.py",
        "tests/fault/test_checkpoint_damage.py",
        "tests/fault/test_coming_and_going.py",
        "tests/fault/test_commands.py",
        "tests/fault/test_hangs_of_a_run.py",
        "tests/fault/test_interrupted.py",
        "tests/fault/test_killed_behind.py",
        "tests/fault/test_kills.py",
        "tests/fault/test_launch.py",
        "tests/fault/test_logs.py",
        "tests/fault/test_new_plans.py",
        "tests/fault/test_planted.py",
        "tests/fault/test_removed_folder.py",
        "tests/fault/test_sequences.py",
        "tests/fault/test_signals_of_a_run.py",
        "tests/fault/test_sockets.py",
        "tests/federated/test_client_daemon.py",
        "tests/federated/test_deployment.py",
        "tests/federated/test_flower.py",
        "tests/federated/test_simulation.py",
        "tests/fuzz/test_fuzz.py",
        "tests/loops/test_accelerate.py",
        "tests/loops/test_fabric.py",
        "tests/loops/test_lightning.py",
        "tests/loops/test_scripts.py",
        "tests/loops/test_transformers.py",
        "tests/loops/test_trl.py",
        "tests/parity/test_adapters.py",
        "tests/parity/test_all_planted.py",
        "tests/parity/test_async_server.py",
        "tests/parity/test_asynchronous.py",
        "tests/parity/test_coded_base.py",
        "tests/parity/test_compile.py",
        "tests/parity/test_composition.py",
        "tests/parity/test_evaluate.py",
        "tests/parity/test_expert_adapters.py",
        "tests/parity/test_expert_parallel.py",
        "tests/parity/test_generator.py",
        "tests/parity/test_gradients_in_pieces.py",
        "tests/parity/test_hybrid.py",
        "tests/parity/test_keep_gathered.py",
        "tests/parity/test_kinds_of_modules.py",
        "tests/parity/test_linear_products.py",
        "tests/parity/test_local.py",
        "tests/parity/test_modules_as_they_are.py",
        "tests/parity/test_modules_of_strangers.py",
        "tests/parity/test_mutations.py",
        "tests/parity/test_new_errors.py",
        "tests/parity/test_offload.py",
        "tests/parity/test_optimizers.py",
        "tests/parity/test_outside.py",
        "tests/parity/test_outside_frameworks.py",
        "tests/parity/test_packing.py",
        "tests/parity/test_pipeline_accounts.py",
        "tests/parity/test_pipeline_hugging_face.py",
        "tests/parity/test_precision.py",
        "tests/parity/test_predicted_traffic.py",
        "tests/parity/test_pytest_plugin.py",
        "tests/parity/test_recompute.py",
        "tests/parity/test_recompute_by_block.py",
        "tests/parity/test_resume.py",
        "tests/parity/test_router_reference.py",
        "tests/parity/test_shares.py",
        "tests/parity/test_tensor_parallel.py",
        "tests/parity/test_verify.py",
        "tests/parity/test_verify_float32_parts.py",
        "tests/parity/test_verify_strangers.py",
        "tests/parity/test_weights.py",
        "tests/parity/test_whole_atlas.py",
        "tests/parity/test_whole_features.py",
        "tests/parity/test_whole_tensors.py",
        "tests/test_examples.py",
        "tests/unit/comm/shm/test_memory.py",
        "tests/unit/comm/test_through_host.py",
        "tests/unit/datasets/test_order.py",
        "tests/unit/datasets/test_packing.py",
        "tests/unit/interop/test_import.py",
        "tests/unit/interop/test_keys.py",
        "tests/unit/launcher/test_start_up.py",
        "tests/unit/models/test_census.py",
        "tests/unit/models/test_fno.py",
        "tests/unit/parallel/context/test_handing.py",
        "tests/unit/parallel/context/test_pictures.py",
        "tests/unit/parallel/pipeline/test_bench.py",
        "tests/unit/parallel/pipeline/test_registry.py",
        "tests/unit/parallel/tensor/test_linear.py",
        "tests/unit/parallel/tensor/test_panels.py",
        "tests/unit/predict/planner/test_choose.py",
        "tests/unit/predict/planner/test_kept.py",
        "tests/unit/predict/planner/test_mixed.py",
        "tests/unit/predict/planner/test_refine.py",
        "tests/unit/predict/probe/test_keeping.py",
        "tests/unit/run/test_kept.py",
        "tests/unit/verify/reference/test_rounding.py",
        "tests/unit/verify/test_computed_in_float32.py",
    }
)

MOST_WORKERS = 4

# Rooms whose unit tests take seconds, and the laws: `python -m pytest -m quick`.
QUICK = ("tests/architecture/", "tests/golden/", "tests/unit/")
NOT_QUICK = (
    "tests/architecture/test_documents.py",
    "tests/unit/comm/",
    "tests/unit/cli/test_roles.py",
    "tests/unit/doctor/test_lines.py",
    "tests/unit/engine/",
    "tests/unit/explain/",
    "tests/unit/interop/",
    "tests/unit/models/",
    "tests/unit/parallel/context/",
    "tests/unit/parallel/tensor/",
    "tests/unit/predict/",
    "tests/unit/products/",
    "tests/unit/verify/",
)


def is_quick(where: str) -> bool:
    """Whether the tests of a file are among the quick ones."""
    return where not in LONG and where.startswith(QUICK) and not where.startswith(NOT_QUICK)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: a worker for each core, of four at most, as each loads torch and starts ranks."""
    return min(os.cpu_count() or 1, MOST_WORKERS)


def pytest_configure(config: pytest.Config) -> None:
    """Let a worker of `-n` have the main module of pytest, which launched ranks need not import.

    Its own has no file, and functions of such a module travel to ranks by value.
    """
    if hasattr(config, "workerinput"):
        main = sys.modules["__main__"]
        main.__spec__ = importlib.util.find_spec("pytest.__main__")
        main.__file__ = pytest.__file__


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files without quick tests unread under `-m quick`: imports take longer than they."""
    if config.getoption("markexpr") != "quick" or collection_path.suffix != ".py":
        return None
    return None if is_quick(collection_path.relative_to(ROOT).as_posix()) else True


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--part 2/3`: of the tests that are chosen, a third. The parts have every test once."""
    words = "run part K of N parts of the tests"
    parser.addoption("--part", metavar="K/N", type=part, help=words)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None]:
    """Mark every test; where a part is asked for, keep its tests alone once all are chosen."""
    _mark(items)
    yield
    wanted = config.getoption("part")
    if wanted is None:
        return
    kept = part_of([item.nodeid for item in items], *wanted)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in items if item.nodeid in kept]


def part(text: str) -> tuple[int, int]:
    """K and N of "K/N". Raises `argparse.ArgumentTypeError` for words that are no part."""
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"a part is K/N, with K from 1 to N, as 2/3: not {text!r}")
    return int(index), int(count)


def part_of(names: Sequence[str], index: int, count: int) -> set[str]:
    """The tests of part `index` of `count`, from 1. A test's part depends on its name alone."""
    return {name for name in names if zlib.crc32(name.encode()) % count == index - 1}


def _mark(items: Sequence[pytest.Item]) -> None:
    """Mark every test as long, quick, or neither, by its file."""
    for item in items:
        if ROOT not in item.path.parents:  # a session that a test has started elsewhere
            continue
        where = item.path.relative_to(ROOT).as_posix()
        if where in LONG:
            item.add_marker("long")
        elif is_quick(where):
            item.add_marker("quick")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the server of the pool first: a launcher in a test would have it load less."""
    if any("ranks" in getattr(item, "fixturenames", ()) for item in session.items):
        start_server()


def pytest_sessionstart() -> None:
    """A session that is asked to end takes down what its tests have started, as one that is
    interrupted does. A shell's background job ignores SIGINT; commands that tests start must not.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt(signal.Signals(number).name)

    signal.signal(signal.SIGTERM, interrupt)


@pytest.fixture(scope="module", autouse=True)
def _without_a_group() -> Iterator[None]:
    """Close the process group that a file's tests leave in this process: the next may make one."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def ranks(rank_pool: Pool) -> Callable[..., list[Any]]:
    """`ranks(n, fn, *args, plan="dp2")`: the results of `fn(world, *args)` on n ranks, by rank."""
    return rank_pool.run

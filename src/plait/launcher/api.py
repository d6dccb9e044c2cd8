"""The entry: `launch` starts the ranks or joins those that are there.

This is the one place that reads torchrun's environment variables, so that no engine, strategy or
model ever does.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from numbers import Integral
from typing import TypeVar

from plait.errors import PlaitError, WorldSizeError
from plait.launcher.allocator import keep_freed_memory

T = TypeVar("T")

_WORLD_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LAST_PORT = 65535
_MOST_RANKS = 1 << 24


@dataclass(frozen=True)
class JoinedWorld:
    """This process's place in a world that others started (torchrun, or `launch` itself)."""

    rank: int
    world_size: int
    local_rank: int


def joined_world(environment: Mapping[str, str] | None = None) -> JoinedWorld | None:
    """The world that this process belongs to by torchrun's variables; None when it belongs to
    none.

    Raises:
        WorldSizeError: a variable is no number in its range, or nobody says where ranks meet.
    """
    variables = os.environ if environment is None else environment
    missing = [name for name in _WORLD_VARIABLES if name not in variables]
    if missing:
        _check_alone(variables, missing)
        return None
    world_size = _number(variables, "WORLD_SIZE", 1, _MOST_RANKS)
    rank = _number(variables, "RANK", 0, world_size - 1)
    _number(variables, "MASTER_PORT", 0, _LAST_PORT)
    local_rank = rank
    if "LOCAL_RANK" in variables:
        local_rank = _number(variables, "LOCAL_RANK", 0, world_size - 1)
    return JoinedWorld(rank, world_size, local_rank)


def _check_alone(variables: Mapping[str, str], missing: Sequence[str]) -> None:
    """Refuse to be alone where a rank among several is told. Each would train the whole model."""
    if "RANK" not in variables or variables.get("WORLD_SIZE", "1") == "1":
        return
    raise WorldSizeError(
        f"RANK is {variables['RANK']} and WORLD_SIZE is {variables['WORLD_SIZE']}, but "
        f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set, so the ranks "
        "cannot meet; set the address and a free port of the first machine on all of them, or "
        "unset RANK and WORLD_SIZE"
    )


def _number(variables: Mapping[str, str], name: str, least: int, most: int) -> int:
    """The whole number of a variable that torchrun or a batch script has set."""
    told = variables[name]
    try:
        number = int(told)
    except ValueError:
        number = least - 1
    if not least <= number <= most:
        raise WorldSizeError(
            f"the variable {name} is {told!r}, which is no whole number from {least} to {most}; "
            "torchrun sets it, or the script that starts the ranks"
        )
    return number


def is_restart(environment: Mapping[str, str] | None = None) -> bool:
    """Whether torchrun has started this process again, after a world of the same run has failed."""
    variables = os.environ if environment is None else environment
    return variables.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0")


def run_id(environment: Mapping[str, str] | None = None) -> str | None:
    """The name that torchrun's `--rdzv-id` gives this run, on all of its machines; None without."""
    variables = os.environ if environment is None else environment
    name = variables.get("TORCHELASTIC_RUN_ID", "none")
    return None if name in ("", "none") else name


def launch(
    main: Callable[..., T],
    *args: object,
    nproc: int | None = None,
    monitor_seconds: float = 0.05,
    restarts: int = 0,
) -> list[T]:
    """Run `main(*args)` in `nproc` local ranks and return their results, rank by rank.

    `main` and `args` travel by pickle, so `main` is a function at the top level of a module. Where
    the main module has no file (an interpreter, a notebook, `python -c`) they travel by value. So
    does what is in the `__main__.py` of a package. Each rank finds torchrun's variables (RANK,
    WORLD_SIZE, MASTER_ADDR ...) and computes with cores // nproc threads unless OMP_NUM_THREADS is
    set. Inside a running world (torchrun, or a rank of `launch`) nothing is started. `main(*args)`
    runs here, and the list holds this rank's own result.

    Args:
        main: what every rank calls.
        args: its arguments, alike on every rank.
        nproc: the number of ranks; needed outside of a running world.
        monitor_seconds: between two looks at whether a rank has died.
        restarts: how often in all a rank is started again that dies (a signal, a lost connection).
            The others go on meanwhile. It is for plans of loosely coupled ranks (`local`,
            `async-server`). A rank that is lost for good has no result.

    Raises:
        PlaitError: the first rank to fail ends the run, and the others are stopped within seconds.
            Its error is raised here as the same class with the same message.
        RankFailed: a rank failed otherwise. The message has its signal or exit code, and its
            traceback's end.
        WorldSizeError: `nproc` is missing, no whole number, below 1, or another than the ranks of
            the running world.
    """
    if nproc is not None and not isinstance(nproc, Integral):
        raise WorldSizeError(
            f"nproc must be a whole number of ranks, as in launch(main, nproc=2), not {nproc!r}"
        )
    if not callable(main):
        raise PlaitError(f"launch needs a function, as in launch(main, nproc=2), not {main!r:.60}")
    world = joined_world()
    if world is not None:
        if nproc is not None and nproc != world.world_size:
            raise WorldSizeError(
                f"{nproc} ranks are asked for, but this process is rank {world.rank} of a world of "
                f"{world.world_size}; "
                f"start it with torchrun --nproc-per-node so that the world has {nproc} ranks"
            )
        keep_freed_memory()
        return [main(*args)]
    if nproc is None or nproc < 1:
        raise WorldSizeError(
            "launch needs the number of ranks to start, 1 or more: launch(main, nproc=2), not "
            f"{nproc}"
        )
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise PlaitError(
            "plait.launch was called while a rank imports the main script; put the call under `if "
            "__name__ == '__main__':`"
        )
    from plait.launcher.by_value import by_value, lacks_file, main_hidden, needs_main, unpickled

    if lacks_file() or needs_main(_pickled(main, args)):
        with main_hidden():
            return unpickled(_run(by_value(main, args), (), nproc, monitor_seconds, restarts))
    return _run(main, args, nproc, monitor_seconds, restarts)


def _run(
    main: Callable[..., T],
    args: tuple[object, ...],
    nproc: int,
    monitor_seconds: float,
    restarts: int,
) -> list[T]:
    if restarts:
        from plait.launcher.supervisor import supervise  # imports torch

        found = supervise(main, args, nproc, restarts)
        return [found[rank] for rank in sorted(found)]

    from plait.launcher.agent import run_ranks  # imports torch

    results = run_ranks(main, args, nproc, monitor_seconds)
    return [results[rank] for rank in range(nproc)]


def _pickled(main: Callable[..., object], args: tuple[object, ...]) -> bytes:
    """The bytes for a new process. Functions that have none are refused before any is started."""
    try:
        return bytes(ForkingPickler.dumps((main, args)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise PlaitError(
            f"'{getattr(main, '__qualname__', main)}' and its arguments cannot be sent to a new "
            f"process ({error}); "
            "launch a function defined at the top level of a module, with plain arguments"
        ) from error

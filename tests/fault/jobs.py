"""What ranks do in the tests of this folder: functions that a new process can import."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import tempfile
import time
from typing import NoReturn

from plait import launch
from plait.errors import NonFiniteLoss

FOREVER_SECONDS = 120.0


def own_rank(factor: int = 1) -> int:
    return factor * int(os.environ["RANK"])


def heap_given_back() -> int:
    """Bytes by which the heap shrinks when what lies at its end is freed: 60 MB in three pieces."""
    library = ctypes.CDLL(None)
    library.malloc.restype = library.sbrk.restype = ctypes.c_void_p
    library.malloc.argtypes, library.free.argtypes, library.sbrk.argtypes = (
        [ctypes.c_size_t],
        [ctypes.c_void_p],
        [ctypes.c_long],
    )
    library.free(
        library.malloc(24 << 20)
    )  # from then on such pieces are of the heap, whoever has chosen what
    pieces = [library.malloc(20 << 20) for _ in range(3)]
    end: int = library.sbrk(0)
    for piece in reversed(pieces):
        library.free(piece)
    return max(0, end - int(library.sbrk(0)))


def freed_neighbours_are_one_piece() -> bool:
    """Whether 28 MB for a tensor take the memory of two freed pieces of 15 MB that lay side by
    side. No other piece of that size is free in a new rank.
    """
    library = ctypes.CDLL(None)
    library.aligned_alloc.restype = ctypes.c_void_p
    library.aligned_alloc.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    pieces = [library.aligned_alloc(64, 15 << 20) for _ in range(4)]
    library.free(pieces[1])
    library.free(pieces[2])
    return bool(library.aligned_alloc(64, 28 << 20) == pieces[1])


def own_threads() -> int:
    import torch

    return torch.get_num_threads()


def variable(name: str) -> str | None:
    return os.environ.get(name)


def fail(kind: str) -> NoReturn:
    """Rank 1 fails in the given way while rank 0 waits for it in a collective."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    value = torch.ones(1)
    dist.all_reduce(value)
    if dist.get_rank() == 1:
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "known":
            raise NonFiniteLoss("the loss became nan at step 7")
        if kind == "bug":
            raise ZeroDivisionError("by zero")
        if kind == "exit":
            sys.exit(0)
        os._exit(3)
    dist.all_reduce(value)
    time.sleep(FOREVER_SECONDS)
    raise AssertionError("rank 0 was not stopped")


def first_fails() -> None:
    """Rank 0 fails in a way that no restart cures; the others live."""
    if os.environ["RANK"] == "0":
        raise NonFiniteLoss("the loss became nan at step 7")
    time.sleep(FOREVER_SECONDS)


def hang_up(launcher: int) -> int:
    """What a terminal that is closed does to the launcher."""
    os.kill(launcher, signal.SIGHUP)
    return own_rank()


def say_pid_and_wait() -> None:
    os.write(
        sys.stdout.fileno(), f"{os.getpid()}\n".encode()
    )  # one write: ranks share the pipe, and print makes two
    time.sleep(FOREVER_SECONDS)


def sum_ranks() -> float:
    """What a user's own function does with torch's process groups."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    value = torch.ones(1)
    dist.all_reduce(value)
    dist.destroy_process_group()
    return float(value)


def stops_early() -> float:
    """The sums of ranks of which one makes a step less."""
    import torch

    from plait.comm import init
    from plait.mesh import Mesh

    world = init(Mesh(dp=2), timeout_seconds=60)
    axis = world.axis("dp")
    total = torch.ones(1)
    for _ in range(3 - world.rank):
        axis.all_reduce(total).wait()
    return float(total)


def restart_a_rank() -> None:
    """A rank of local SGD is killed and started again."""
    from tests.fault import coming_and_going

    plan = "dp2:local,every1 precision:float64"
    with tempfile.TemporaryDirectory() as folder:
        launch(coming_and_going.local, plan, folder, {}, nproc=2, restarts=1)


if __name__ == "__main__":
    if "restart" in sys.argv:
        restart_a_rank()
    elif "sum" in sys.argv:
        launch(sum_ranks, nproc=2)
    elif "freed" in sys.argv:
        print(launch(freed_neighbours_are_one_piece, nproc=1))
    else:
        launch(say_pid_and_wait, nproc=2)

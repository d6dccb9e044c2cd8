"""Let a rank keep the memory that it frees, and use it again.

A training step takes and frees the same hundreds of megabytes each time. The C library returns the
end of its heap to the system and gets it again page by page. Each page is zeroed in a fault of its
own: 3 to 35 % of a step on a processor. The peak is the same: what is kept was needed, and is taken
again.

A tensor begins at a multiple of 64 bytes, so glibc cuts it out of a larger block. The remainder,
48 to 96 bytes, goes into a list of small blocks (`tcache` or a fast bin). While it is there, glibc
does not join the freed tensors on both sides of it. So a larger tensor needs new memory. Without
the lists glibc joins them. It reads `NO_SMALL_LISTS` when a process starts, so the server gets it
from which ranks are forked.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator, Mapping

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3  # of <malloc.h>
LARGEST_KEPT_BYTES = (
    32 << 20
)  # the most that glibc takes; larger pieces are mapped and given back one by one
TUNABLES = "GLIBC_TUNABLES"
CHOICES = (TUNABLES, "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
NO_SMALL_LISTS = "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"
"""The value of `GLIBC_TUNABLES` that plait gives."""


def keep_freed_memory(environment: Mapping[str, str] | None = None) -> bool:
    """Have this process keep the memory that it frees; the result is whether it does.

    It does under glibc, unless the environment (of this process) chooses otherwise.
    """
    chosen = os.environ if environment is None else environment
    if not sys.platform.startswith("linux") or any(name in chosen for name in CHOICES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES) and mallopt(M_TRIM_THRESHOLD, -1))


@contextlib.contextmanager
def no_small_lists() -> Iterator[None]:
    """Processes that start in this block keep no lists of small pieces, unless the environment
    chooses otherwise. Each of them calls `forget_tunables`.
    """
    if any(name in os.environ for name in CHOICES):
        yield
        return
    os.environ[TUNABLES] = NO_SMALL_LISTS
    try:
        yield
    finally:
        forget_tunables()


def forget_tunables() -> None:
    """Remove `NO_SMALL_LISTS` from the environment. What is left there is a user's own choice."""
    if os.environ.get(TUNABLES) == NO_SMALL_LISTS:
        del os.environ[TUNABLES]

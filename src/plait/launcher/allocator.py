"""Let a rank keep the memory that it frees.

A training step takes and frees the same hundreds of megabytes each time. The C library returns the
end of its heap to the system and gets it again page by page. Each page is zeroed in a fault of its
own: 3 to 35 % of a step on a processor. The peak is the same: what is kept was needed, and is taken
again.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3  # of <malloc.h>
LARGEST_KEPT_BYTES = (
    32 << 20
)  # the most that glibc takes; larger pieces are mapped and given back one by one
CHOICES = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def keep_freed_memory(environment: Mapping[str, str] | None = None) -> bool:
    """Whether this process does so from here on: under glibc, unless the environment (of this
    process) chooses otherwise.
    """
    chosen = os.environ if environment is None else environment
    if not sys.platform.startswith("linux") or any(name in chosen for name in CHOICES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES) and mallopt(M_TRIM_THRESHOLD, -1))

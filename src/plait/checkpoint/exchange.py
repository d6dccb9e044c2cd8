"""Two names of the file system change places at once, where the system can do that.

Linux has it as renameat2(2) with RENAME_EXCHANGE, macOS as renamex_np(2) with RENAME_SWAP. Python's
`os.rename` has neither.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_HERE = -100  # AT_FDCWD: a path begins at the working directory
_EXCHANGE = 2


def exchange(one: Path, other: Path) -> bool:
    """Let two files or folders of one file system change names; False where that is not possible.

    After False both names stand for what they stood for.
    """
    if os.name != "posix":
        return False
    library = ctypes.CDLL(None)
    names = os.fsencode(one), os.fsencode(other)
    swap = getattr(library, "renamex_np", None)
    if swap is not None:
        return bool(swap(*names, _EXCHANGE) == 0)
    swap = getattr(library, "renameat2", None)
    return swap is not None and swap(_HERE, names[0], _HERE, names[1], _EXCHANGE) == 0

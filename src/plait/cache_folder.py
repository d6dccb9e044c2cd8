"""The folder of what this machine keeps for later runs: measurements and tokens."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`plait` in `$XDG_CACHE_HOME` where that is an absolute path, else `~/.cache/plait`.

    A user without a home, as in a container, has `/` for one.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if base.is_absolute():
        return base / "plait"
    try:
        return Path("~/.cache/plait").expanduser()
    except RuntimeError:
        return Path("/.cache/plait")

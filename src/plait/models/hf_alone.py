"""The library makes one model at a time: while it does, torch's default type is the model's.

That type is the process's. Of two ranks that are threads, one would restore what the other has set.
"""

from __future__ import annotations

import threading
from typing import Any

_MAKING = threading.RLock()


def from_config(family: Any, settings: Any) -> Any:
    """The model that a class of the library makes of its config."""
    with _MAKING:
        return family.from_config(settings)

"""`plait`, with steps that take a while until a file says otherwise.

So ranks can be lost and return in the middle of a short run.

`PACE` is the file; `PACE_SECONDS` the least time of a step until it is there.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from plait.cli.entry import main
from plait.engine.engine import Engine

if __name__ == "__main__":
    hurry = Path(os.environ["PACE"])
    seconds = float(os.environ["PACE_SECONDS"])
    step = Engine.step

    def slow(engine: Engine, *args: Any, **kwargs: Any) -> Any:
        if not hurry.exists():
            time.sleep(seconds)
        return step(engine, *args, **kwargs)

    Engine.step = slow  # type: ignore[method-assign]
    sys.exit(main())

"""`plait`, with steps that take a while until a file says otherwise.

So ranks can be lost and return in the middle of a short run, or at its end.

`PACE` is the file; `PACE_SECONDS` the least time of a step until it is there. `PACE_END`, where it
is given, is a file for which ranks wait once their last checkpoint is saved. With `MACHINE_OF_RANK`
every rank takes itself for a machine of its own.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from plait.cli import command
from plait.engine.engine import Engine
from plait.run import replica_replay
from plait.run.checkpoints import Checkpoints
from tests.fault.stacks import answer_signals

if __name__ == "__main__":
    answer_signals()
    hurry = Path(os.environ["PACE"])
    seconds = float(os.environ["PACE_SECONDS"])
    last = os.environ.get("PACE_END", "")
    step = Engine.step
    on_end = Checkpoints.on_end

    def slow(engine: Engine, *args: Any, **kwargs: Any) -> Any:
        if not hurry.exists():
            time.sleep(seconds)
        return step(engine, *args, **kwargs)

    def waits(hook: Checkpoints) -> None:
        on_end(hook)
        while last and not Path(last).exists():
            time.sleep(0.05)

    Engine.step = slow  # type: ignore[method-assign]
    Checkpoints.on_end = waits  # type: ignore[method-assign]
    if "MACHINE_OF_RANK" in os.environ:
        replica_replay.machine = lambda: f"machine {os.environ['RANK']}"
    command()

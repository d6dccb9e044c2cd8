"""A process of a run that is kept alive has loaded what a generation needs before it meets."""

from __future__ import annotations

import subprocess
import sys

ASKED = """
import gc, sys
from plait.run import kept

class Seat:
    goes_on = True
    def meet(self, note):
        loaded = [name in sys.modules for name in ("plait.run.assemble", "plait.run.checkpoints")]
        print(loaded, gc.get_freeze_count() > 10_000)

kept.run(Seat(), None)
"""


def test_modules_are_loaded_before_the_meeting_and_are_no_garbage() -> None:
    done = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "[True, True] True"

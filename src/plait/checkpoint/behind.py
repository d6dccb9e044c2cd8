"""A save behind the run's back: a thread of each rank writes, and nobody waits for it.

All ranks have agreed on the save, and each has copied its shards (`write.prepare`). From there on
no rank sends another anything, since training uses the connections meanwhile. A rank leaves the
record of its file beside it; the first rank waits for all records, and publishes.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from plait.checkpoint.folder import write_text_atomic
from plait.checkpoint.write import Prepared, WriteFailure, attempt, complete, write_own_file
from plait.values import JsonObject

LOOK_SECONDS = 0.02
SILENT_SECONDS = 600.0


class BackgroundSave:
    """One save under way. `failure` says why it came to nothing; on the first rank for all."""

    def __init__(self, prepared: Prepared, then: Callable[[], None]) -> None:
        """`then` is called on the first rank, once the checkpoint is published."""
        self.failure: str | None = None
        held = [
            replace(shard, values=shard.values.detach().to("cpu", copy=True))
            for shard in prepared.held
        ]
        self._prepared = replace(prepared, held=held)
        self._then = then
        self._thread = threading.Thread(target=self._run, name="plait-checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when this rank has done its part; the first one when the save is published."""
        self._thread.join()

    def _run(self) -> None:
        try:
            self._write()
        except Exception as error:  # the run goes on without this checkpoint
            self.failure = f"{error}" or type(error).__name__
            shutil.rmtree(self._prepared.temporary, ignore_errors=True)  # the others see it

    def _write(self) -> None:
        prepared = self._prepared
        own = attempt(write_own_file, prepared)
        told = asdict(own) if isinstance(own, WriteFailure) else {"written": own}
        write_text_atomic(self._note(prepared.rank), json.dumps(told))
        if prepared.rank == 0:
            complete(prepared, [self._word_of(rank) for rank in range(prepared.world_size)])
            self._then()

    def _note(self, rank: int) -> Path:
        return self._prepared.temporary / f"rank-{rank:05d}.written"

    def _word_of(self, rank: int) -> JsonObject:
        """The record of a rank's file. Raises `OSError` where there will be none."""
        note = self._note(rank)
        end = time.monotonic() + SILENT_SECONDS
        while not note.exists():
            if not self._prepared.temporary.exists() or time.monotonic() > end:
                raise OSError(f"rank {rank} has written nothing")
            time.sleep(LOOK_SECONDS)
        told = json.loads(note.read_text())
        note.unlink()
        if "written" not in told:
            raise OSError(f"rank {rank}: {told['reason']}")
        record: JsonObject = told["written"]
        return record


def set_aside(folder: Path) -> None:
    """Remove saves that an earlier generation of the same run has left under way.

    They lose their name first, so that none of them is published meanwhile.
    """
    for left in sorted(folder.glob("step-*.tmp-*")):
        gone = left.with_name(f"{left.name}0")
        try:
            left.rename(gone)
        except OSError:
            continue
        shutil.rmtree(gone, ignore_errors=True)

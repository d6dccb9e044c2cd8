"""A save behind the run's back: a thread of each rank writes, and nobody waits for it.

All ranks have agreed on the save (`write.prepare`). From there on no rank sends another anything,
since training uses the connections meanwhile. A rank copies its shards, writes them, and leaves the
record of its file beside it. The first rank waits for all records, and publishes.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from plait.checkpoint.folder import write_text_atomic
from plait.checkpoint.write import Prepared, WriteFailure, attempt, complete, write_own_file
from plait.mesh import Shard
from plait.values import JsonObject

Form = tuple[torch.dtype, int]
LOOK_SECONDS = 0.02
SILENT_SECONDS = 600.0


class BackgroundSave:
    """One save under way, which begins with a copy of the shards.

    Attributes:
        failure: why it came to nothing; on the first rank for all.
        processor_seconds: of the thread, once it has ended.
    """

    def __init__(
        self, prepared: Prepared, then: Callable[[], None], room: Room | None = None
    ) -> None:
        """`then` is called on the first rank, once the checkpoint is published. `room` is where the
        copy lies.
        """
        self.failure: str | None = None
        self.processor_seconds = 0.0
        self._prepared = prepared
        self._room = room or Room()
        self._is_copied = threading.Event()
        self._then = then
        self._thread = threading.Thread(target=self._run, name="plait-checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when this rank has done its part; the first one when the save is published."""
        self._thread.join()

    def settle(self) -> None:
        """Return when the shards are copied, and the state may change."""
        self._is_copied.wait()

    def _run(self) -> None:
        try:
            self._write()
        except Exception as error:  # the run goes on without this checkpoint
            self.failure = f"{error}" or type(error).__name__
            shutil.rmtree(self._prepared.temporary, ignore_errors=True)  # the others see it
        finally:
            self._is_copied.set()
            self.processor_seconds = time.thread_time()

    def _write(self) -> None:
        held = self._room.copy(self._prepared.held)
        self._is_copied.set()
        prepared = self._prepared = replace(self._prepared, held=held)
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


class Room:
    """Memory on the host for the copies of a run's saves, one after the other."""

    def __init__(self) -> None:
        self._forms: list[Form] = []
        self._values: list[Tensor] = []

    def copy(self, shards: Sequence[Shard]) -> list[Shard]:
        """Copies of these shards, in the memory of those before where they are alike."""
        forms = [(shard.values.dtype, shard.numel) for shard in shards]
        if forms != self._forms:
            self._values = [torch.empty(numel, dtype=dtype) for dtype, numel in forms]
            self._forms = forms
        if shards:
            with torch.no_grad():
                torch._foreach_copy_(self._values, [shard.values for shard in shards])
        return [
            replace(shard, values=values)
            for shard, values in zip(shards, self._values, strict=True)
        ]


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

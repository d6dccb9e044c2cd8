"""A save behind the run's back: a thread of each rank copies and writes, and no step waits for it.

The thread is there before the first save. The start of a thread waits for its first turn. That
takes milliseconds where all processors are at work.

No rank sends another anything, since training uses the connections meanwhile. Ranks agree by small
files in the folder of the save, whose name all of them know beforehand. Each leaves the list of its
shards. The first answers with the token, publishes when all have written, and removes these files.

A save that fails on one rank ends on all: in place of its folder there is a `tombstone`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

from plait.checkpoint.agreement import Agreement, Entries
from plait.checkpoint.room import Room, SideStream
from plait.checkpoint.write import (
    Prepared,
    WriteFailure,
    attempt,
    check_meta,
    complete,
    reason_of,
    token_of_save,
    write_own_file,
)
from plait.mesh import Shard
from plait.values import JsonObject

Task = Callable[[], None]
LOOK_SECONDS = 0.02
SILENT_SECONDS = 600.0
TOKEN = "token"
GIVEN_UP = "the save was given up"
NICE = 10  # of a thread that writes, above that of its process


class _Elsewhere(OSError):
    """The save has ended for a reason that is not this rank's."""


@dataclass(frozen=True)
class Wanted:
    """A save as one rank is asked for it. `random` is that of all its ranks, and of no other."""

    final: Path
    random: str
    shards: list[Shard]
    meta: JsonObject
    rank: int
    world_size: int

    @property
    def temporary(self) -> Path:
        """The folder that it is written into."""
        return self.final.with_name(f"{self.final.name}.tmp-{self.random}")


class SaveMemory:
    """The knowledge, the memory and the thread that the saves of one engine share, one after the
    other.

    A save is given up once no one else holds its `SaveMemory`, and then the thread ends. `side`
    copies what lies on a device.
    """

    def __init__(self, side: SideStream | None = None) -> None:
        self.agreement = Agreement()
        self.room = Room(side)
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        weakref.finalize(self, self._tasks.put, None).atexit = False
        thread = threading.Thread(
            target=_work_through, args=(self._tasks,), name="plait-checkpoint", daemon=True
        )
        thread.start()

    def do(self, task: Task) -> None:
        """Have the thread do it, after what it was given before."""
        self._tasks.put(task)


def _work_through(tasks: SimpleQueue[Task | None]) -> None:
    """Do one task after the other, until there is `None`."""
    while (task := tasks.get()) is not None:
        task()
        del task  # it holds a save, which may not be wanted any more


class BackgroundSave:
    """One save under way, which begins with a copy of the shards.

    Attributes:
        failure: why it came to nothing; on the first rank for all.
        is_own: whether this rank is why, and not another.
        processor_seconds: of its threads, once it has ended.
    """

    def __init__(self, wanted: Wanted, then: Callable[[], None], memory: SaveMemory) -> None:
        """`then` is called on the first rank, once the checkpoint is published."""
        self.failure: str | None = None
        self.is_own = False
        self.processor_seconds = 0.0
        self._wanted = wanted
        self._agreement = memory.agreement
        self._room = memory.room
        self._owner = weakref.ref(memory)
        self._polite = Polite()
        self._is_copied = threading.Event()
        self._is_over = threading.Event()
        self._then = then
        self._room.mark()
        memory.do(self._run)

    @property
    def checkpoint(self) -> Path:
        """The folder that it is to become."""
        return self._wanted.final

    def wait(self) -> None:
        """Return when this rank has done its part; the first one when the save is published."""
        self._is_over.wait()

    def wait_for_copy(self) -> None:
        """Return when the shards are copied, and the state may change."""
        self._is_copied.wait()

    def _run(self) -> None:
        began = time.thread_time()
        try:
            self._write()
        except Exception as error:  # the run goes on without this checkpoint
            given_up = tombstone(self._wanted.temporary).exists()
            self.is_own = not given_up and not isinstance(error, _Elsewhere)
            lost = given_up and isinstance(error, FileNotFoundError)
            self.failure = GIVEN_UP if lost else reason_of(error)
            self._agreement.forget()
            bury(self._wanted.temporary)  # the others see it
        finally:
            self._is_copied.set()
            self.processor_seconds = time.thread_time() - began + self._polite.seconds
            self._is_over.set()

    def _write(self) -> None:
        wanted = self._wanted
        held, entries = self._agreement.look_at(wanted.shards)
        held = self._room.copy(held)
        self._is_copied.set()
        self._make_folder()
        prepared = self._agreed(held, entries)
        own = attempt(write_own_file, prepared, self._polite)
        told = asdict(own) if isinstance(own, WriteFailure) else {"written": own}
        self._leave("written", wanted.rank, json.dumps(told))
        if wanted.rank == 0:
            records = [self._record_of(rank) for rank in range(wanted.world_size)]
            self._note(TOKEN, 0).unlink()  # all have read it who have written
            complete(prepared, records)
            self._then()

    def _make_folder(self) -> None:
        """Make the folder, unless another rank has, and remove what killed saves have left."""
        wanted = self._wanted
        self._stop_if_over()
        wanted.temporary.mkdir(parents=True, exist_ok=True)
        own = (wanted.temporary, tombstone(wanted.temporary))
        if wanted.rank == 0:
            for left in wanted.final.parent.glob(f"{wanted.final.name}.tmp-*"):
                if left not in own:
                    shutil.rmtree(left, ignore_errors=True)

    def _agreed(self, held: list[Shard], entries: Entries) -> Prepared:
        """The save on which all ranks have agreed."""
        token = self._token(entries)
        wanted = self._wanted
        return Prepared(
            wanted.final,
            wanted.temporary,
            token,
            held,
            wanted.meta,
            self._agreement.tensors,
            wanted.rank,
            wanted.world_size,
        )

    def _token(self, entries: Entries) -> str:
        """The token, which the first rank makes of all lists. A known token is not sent again."""
        save = self._wanted
        known = self._agreement
        told = None if known.holds(entries) else entries
        self._leave("held", save.rank, json.dumps(told))
        if save.rank:
            token = self._await(TOKEN, 0).read_text()
            known.keep(entries)
            return token
        ranks = range(save.world_size)
        known.learn(0, [json.loads(self._take("held", rank)) for rank in ranks])
        check_meta(save.meta)
        token = token_of_save(save.random, save.meta, known)
        self._leave(TOKEN, 0, token)
        return token

    def _record_of(self, rank: int) -> JsonObject:
        """The record of a rank's file. Raises `OSError` where there will be none."""
        told = json.loads(self._take("written", rank))
        if "written" not in told:
            raise OSError(f"rank {rank}: {told['reason']}")
        record: JsonObject = told["written"]
        return record

    def _note(self, what: str, rank: int) -> Path:
        return self._wanted.temporary / f"rank-{rank:05d}.{what}"

    def _leave(self, what: str, rank: int, text: str) -> None:
        """Leave a file for the others, whole or not at all."""
        part = self._note(f"{what}.part", rank)
        part.write_text(text)
        part.replace(self._note(what, rank))

    def _take(self, what: str, rank: int) -> str:
        """The text of a file that a rank leaves, which is removed."""
        note = self._await(what, rank)
        text = note.read_text()
        note.unlink()
        return text

    def _await(self, what: str, rank: int) -> Path:
        """A file that a rank leaves. Raises `OSError` where there will be none."""
        note = self._note(what, rank)
        end = time.monotonic() + SILENT_SECONDS
        while not note.exists():
            if not self._wanted.temporary.exists() or time.monotonic() > end:
                raise _Elsewhere(f"rank {rank} has written nothing")
            self._stop_if_over()
            time.sleep(LOOK_SECONDS)
        return note

    def _stop_if_over(self) -> None:
        """Raise `OSError` where the save has failed on another rank, or is given up."""
        if self._owner() is None or tombstone(self._wanted.temporary).exists():
            raise _Elsewhere(GIVEN_UP)


def tombstone(temporary: Path) -> Path:
    """The name of a save's folder once the save has failed; it is swept as any other."""
    return temporary.with_name(f"{temporary.name}0")


def bury(temporary: Path) -> None:
    """Let a save be known to have failed; nothing of its files stays."""
    grave = tombstone(temporary)
    with contextlib.suppress(OSError):
        temporary.rename(grave)
    for left in (temporary, grave):
        shutil.rmtree(left, ignore_errors=True)
    with contextlib.suppress(OSError):
        grave.mkdir()


class Polite:
    """Does something in a thread that leaves the processors to training, where the system can.

    Only work that leaves the interpreter alone is for it. A thread that waits for the interpreter
    would wait for this thread's turn.

    Attributes:
        seconds: of processor time, in all.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, act: Callable[[], None]) -> None:
        """Return when it is done. Raises its error."""
        errors: list[Exception] = []
        thread = threading.Thread(target=self._live, args=(act, errors), name="plait-write")
        thread.daemon = True
        thread.start()
        thread.join()
        if errors:
            raise errors[0]

    def _live(self, act: Callable[[], None], errors: list[Exception]) -> None:
        if sys.platform == "linux":  # others know no priority of a thread
            own = os.getpriority(os.PRIO_PROCESS, 0)
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), own + NICE)
        try:
            act()
        except Exception as error:  # it is raised where it is waited for
            errors.append(error)
        self.seconds += time.thread_time()


def remove_tombstones(folder: Path) -> None:
    """Remove what saves that failed have left, once no rank saves any more."""
    for grave in folder.glob("step-*.tmp-*"):
        with contextlib.suppress(OSError):
            grave.rmdir()  # one that holds something is no tombstone


def set_aside(folder: Path) -> None:
    """Remove saves that an earlier generation of the same run has left under way.

    They lose their name first, so that none of them is published meanwhile.
    """
    for left in sorted(folder.glob("step-*.tmp-*")):
        gone = tombstone(left)
        with contextlib.suppress(OSError):
            left.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)

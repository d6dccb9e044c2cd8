"""Files that a launch leaves on the machine, named after it: a temporary folder and semaphores of
Python's queues.

A launch that ends takes both away, however its ranks end. A group of processes that is killed as a
whole cannot. The next launch sweeps what belongs to processes that are gone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from plait.launcher.processes import is_alive

PREFIX = "plait-launch"
SHARED_MEMORY = Path("/dev/shm")
_OWNER = re.compile(rf"(?:sem\.)?{PREFIX}-(\d+)-(\d+)-.*")


@contextlib.contextmanager
def leftovers() -> Iterator[Path]:
    """A folder for one launch, gone at its end; what is left of launches that were killed goes
    first.
    """
    sweep(Path(tempfile.gettempdir()), SHARED_MEMORY)
    own = f"{PREFIX}-{namespace()}-{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix=f"{own}-") as folder, _semaphores_named(own):
        yield Path(folder)


def sweep(*folders: Path) -> None:
    """Remove from the folders what launches of this user left whose process is gone. Those of other
    containers, whose processes cannot be seen from here, stay.
    """
    for folder in folders:
        for path in folder.glob(f"*{PREFIX}-*"):
            owner = _OWNER.fullmatch(path.name)
            if owner is None or int(owner[1]) != namespace() or is_alive(int(owner[2])):
                continue
            with contextlib.suppress(OSError):
                if path.lstat().st_uid != os.getuid():
                    continue
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()


def namespace() -> int:
    """The number of the namespace in which this machine numbers its processes; 0 where it has
    one.
    """
    with contextlib.suppress(OSError):
        return Path("/proc/self/ns/pid").stat().st_ino
    return 0


@contextlib.contextmanager
def _semaphores_named(name: str) -> Iterator[None]:
    """Have multiprocessing name its semaphores so."""
    config = getattr(multiprocessing.current_process(), "_config", {})
    before = config.get("semprefix")
    config["semprefix"] = f"/{name}"
    try:
        yield
    finally:
        if before is None:
            del config["semprefix"]
        else:
            config["semprefix"] = before

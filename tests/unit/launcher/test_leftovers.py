"""What a killed launch left is swept by the next one, and nobody else's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from plait.launcher.leftovers import PREFIX, namespace, sweep


def test_only_what_belongs_to_the_dead_is_swept(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    dead = process.pid
    gone = [f"{PREFIX}-{namespace()}-{dead}-a", f"sem.{PREFIX}-{namespace()}-{dead}-b"]
    kept = [
        f"{PREFIX}-{namespace()}-{os.getpid()}-a",
        f"{PREFIX}-{namespace() + 1}-{dead}-a",
        f"other-{namespace()}-{dead}-a",
        f"{PREFIX}-notes",
    ]
    for name in [gone[0], *kept]:
        (tmp_path / name / "inner").mkdir(parents=True)
    (tmp_path / gone[1]).touch()
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


NAMES = """
import multiprocessing, os
from plait.launcher.leftovers import PREFIX, namespace, leftovers

with leftovers() as folder:
    semaphore = multiprocessing.get_context("forkserver").Semaphore(1)
    name = str(semaphore._semlock.name)
    assert folder.name.startswith(f"{PREFIX}-{namespace()}-{os.getpid()}-"), folder
    assert name.startswith(f"/{PREFIX}-{namespace()}-{os.getpid()}-"), name
    del semaphore
assert not folder.exists()
"""


def test_semaphores_and_folders_carry_the_name_of_their_owner() -> None:
    """In an interpreter of its own: a library that is loaded here may name semaphores itself."""
    done = subprocess.run(
        [sys.executable, "-c", NAMES], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr

"""Run in a process of its own: kill a save after its first, second, ... effect on the disk, and
look at what is left.

    python -m tests.fault.killed_saves FOLDER same|next

Every save runs in a forked child that dies without cleaning up. Prints one line of JSON for each:
the name of the effect at which it died (null: it lived), and the value that a load finds
afterwards.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from plait.checkpoint import Checkpoint, Shard, save

OLD = 1.0
NEW = 2.0


def save_value(directory: Path, value: float) -> None:
    save(
        directory,
        [Shard.whole("w", torch.full((1000,), value)), Shard.whole("s", torch.tensor(value))],
        {"value": value},
    )


def die_at(count: int, report: int) -> None:
    """Let this process die just before its `count`-th effect on the disk."""
    left = [count]

    def deadly(name: str, effect: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                os.write(report, name.encode())
                os._exit(9)
            return effect(*args, **kwargs)

        return call

    os.fsync = deadly("fsync", os.fsync)
    Path.rename = deadly("rename", Path.rename)  # type: ignore[method-assign]
    Path.replace = deadly("replace", Path.replace)  # type: ignore[method-assign]
    Path.mkdir = deadly("mkdir", Path.mkdir)  # type: ignore[method-assign]
    Path.open = deadly("open", Path.open)  # type: ignore[assignment, method-assign]
    shutil.rmtree = deadly("rmtree", shutil.rmtree)  # type: ignore[assignment]


def main(folder: Path, case: str) -> None:
    target = folder / ("step-1" if case == "same" else "step-2")
    effect: str | None = ""
    count = 0
    while effect is not None:
        shutil.rmtree(folder, ignore_errors=True)
        save_value(folder / "step-1", OLD)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            die_at(count, writer)
            save_value(target, NEW)
            os._exit(0)
        os.close(writer)
        effect = os.read(reader, 100).decode() or None
        os.close(reader)
        os.waitpid(child, 0)
        checkpoint = Checkpoint.open(folder)
        checkpoint.verify()
        found = {
            checkpoint.meta["value"],
            checkpoint.tensor("s").item(),
            *checkpoint.tensor("w").tolist(),
        }
        by_name = Checkpoint.open(folder / "step-1").meta["value"]
        assert by_name == (checkpoint.meta["value"] if case == "same" else OLD)
        save_value(target, NEW + 1)  # the next save works, whatever was left, and clears it
        after = Checkpoint.open(folder).meta["value"]
        left = sorted(path.name for path in folder.iterdir() if not path.name.endswith(".tmp"))
        print(json.dumps({"effect": effect, "found": sorted(found), "after": after, "left": left}))
        count += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

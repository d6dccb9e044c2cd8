"""Where checkpoints lie, and how something becomes visible at once or not at all. Knows no torch.

    checkpoints/
      latest                       text: the name of the newest checkpoint of this run
      step-00000100/
        checkpoint.json            written last: what is listed here is whole
        rank-00000-of-00002.safetensors ...
      step-00000200.tmp-1f3a.../   a save that is under way, or was killed

`latest` decides, not the largest number: a run that was taken up again at step 100 continues beside
older, larger steps.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import zlib
from pathlib import Path

from plait.checkpoint.rules import first_fault
from plait.checkpoint.token import fits
from plait.errors import CheckpointError
from plait.values import JsonObject

FORMAT = 1
INDEX = "checkpoint.json"
LATEST = "latest"
_LONGEST_NAME = 64
_STEP = re.compile(r"step-(\d+)")
_LEFT = re.compile(r"(step-\d+)\.(tmp|old)-[0-9a-f]+")


def step_number(directory: Path) -> int | None:
    """The number in the name of a checkpoint of a run; None for any other name."""
    match = _STEP.fullmatch(directory.name)
    return int(match[1]) if match else None


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text_atomic(path: Path, text: str) -> None:
    """Write a small file that holds either its old text or the new one, whenever the process is
    killed.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


def write_index(directory: Path, index: JsonObject) -> None:
    """Write `checkpoint.json` with its own checksum inside: the inverse of `read_index`."""
    whole = {"format": FORMAT, "checksum": _checksum(index), **index}
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in whole.items()]
    write_text_atomic(directory / INDEX, "{\n" + ",\n".join(lines) + "\n}\n")


def read_index(directory: Path) -> JsonObject:
    """Read `checkpoint.json`.

    Raises:
        CheckpointError: it is not there, not readable, of another format version, damaged, or holds
            values that no save writes.
    """
    path = directory / INDEX
    try:
        whole = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory} is no checkpoint: it has no {INDEX}{cure(directory)}"
        ) from None
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}){cure(directory)}") from error
    if not isinstance(whole, dict) or "format" not in whole:
        raise CheckpointError(f"{path} is not plait's{cure(directory)}")
    if (found := whole.pop("format")) != FORMAT:
        cause = f"{path} has format {found} and this version of plait reads format {FORMAT}"
        raise CheckpointError(f"{cause}; load it with the version that wrote it")
    if whole.pop("checksum", None) != _checksum(whole):
        raise CheckpointError(
            f"{path} is damaged: its checksum is not that of its text{cure(directory)}"
        )
    if fault := first_fault(whole, step_number(directory)):
        raise CheckpointError(f"{path} cannot be right: {fault}{cure(directory)}")
    if not fits(whole):
        cause = f"{path} was changed after it was saved: its token is not that of its text"
        raise CheckpointError(f"{cause}{cure(directory)}")
    return whole


def _checksum(index: JsonObject) -> str:
    return f"{zlib.crc32(json.dumps(index, sort_keys=True).encode()):08x}"


def previous(directory: Path) -> Path | None:
    """The checkpoint before this one in the same folder whose files are all there; None if there is
    none.
    """
    own = step_number(directory)
    if own is None:
        return None
    earlier = [path for path in _steps(directory.parent) if (step_number(path) or 0) < own]
    return next((path for path in reversed(earlier) if is_whole(path)), None)


def cure(directory: Path) -> str:
    """The end of a message about a damaged checkpoint: which one to load in its place."""
    earlier = previous(directory)
    return (
        f"; the checkpoint before it is {earlier}: load that one"
        if earlier
        else "; there is no checkpoint before it"
    )


def is_whole(directory: Path) -> bool:
    """Whether every file is there with its size. Contents are checked when they are read."""
    try:
        whole = json.loads((directory / INDEX).read_bytes())
        return all(
            (directory / file["name"]).stat().st_size == file["size_bytes"]
            for file in whole["files"]
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _steps(folder: Path) -> list[Path]:
    """The checkpoints of a folder, by step."""
    found = [
        path for path in folder.glob("step-*") if step_number(path) is not None and path.is_dir()
    ]
    return sorted(found, key=lambda path: step_number(path) or 0)


def resolve(path: str | Path) -> Path:
    """The checkpoint that is meant by a run's folder, by its `checkpoints` folder, or by the
    checkpoint itself.

    Contents are judged by `Checkpoint.open`. A damaged latest checkpoint is an error to see, not a
    reason to train on from an older one.

    Raises:
        CheckpointError: there is none.
    """
    path = Path(path)
    if (path / INDEX).is_file():
        return path
    if aside := _set_aside(path):
        return aside
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if (folder / LATEST).is_file():
        named = folder / _latest_name(folder / LATEST)
        if (
            named.is_dir() and named.parent == folder
        ):  # damaged or not: the error that follows says what else there is
            return named
        if aside := _set_aside(named):
            return aside
    if newest := next(
        (step for step in reversed(_steps(folder)) if (step / INDEX).is_file()), None
    ):
        return newest
    if step_number(path) is not None and path.is_dir():
        raise CheckpointError(f"{path} is no checkpoint: it has no {INDEX}{cure(path)}")
    fault = "holds no checkpoint" if path.is_dir() else "is no folder"
    raise CheckpointError(
        f"{path} {fault}; name a folder that plait train --out has filled, or one of its steps"
    )


def _latest_name(path: Path) -> str:
    """The step's name in a `latest`; nothing where it holds none (it was damaged)."""
    name = path.read_bytes().decode("utf-8", "replace").strip()
    return name if _STEP.fullmatch(name) and len(name) < _LONGEST_NAME else ""


def newest_whole(path: str | Path) -> Path:
    """The newest checkpoint whose files are all there, of a run's folder.

    The result is that of `resolve`, unless a copy or a killed machine left that one in parts. Then
    it is the one before. Errors: `CheckpointError` where there is none.
    """
    newest = resolve(path)
    if is_whole(newest):
        return newest
    earlier = previous(newest)
    if earlier is None:
        raise CheckpointError(f"{newest} is not whole, and there is no checkpoint before it")
    return earlier


def newest_in_parts(path: str | Path) -> Path | None:
    """The newest checkpoint of a run's folder, where one of its files is missing or too short.

    None where it is whole, or there is none.
    """
    try:
        newest = resolve(path)
    except CheckpointError:
        return None
    return None if is_whole(newest) else newest


def keep_newest(folder: Path, count: int) -> None:
    """Remove whole checkpoints of a run's `checkpoints`, the oldest saves first, until `count` are
    left.
    """
    whole = [path for path in _steps(folder) if is_whole(path)]
    whole.sort(key=lambda path: ((path / INDEX).stat().st_mtime_ns, step_number(path) or 0))
    for path in whole[: max(0, len(whole) - count)]:
        gone = path.with_name(f"{path.name}.old-0")  # at once, so that no reader sees a half
        with contextlib.suppress(OSError):
            path.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


def _set_aside(directory: Path) -> Path | None:
    """The old checkpoint of this name, if a save was killed between moving it away and taking its
    place.
    """
    if directory.exists():
        return None
    return next(
        (path for path in directory.parent.glob(f"{directory.name}.old-*") if is_whole(path)), None
    )


def sweep(run: Path, before: float) -> list[str]:
    """Remove what killed saves have left in a run's folder; returns the names of what is gone.

    For the run that holds the folder's lock since `before`: what has changed later is another's. An
    old checkpoint stays as long as nothing has taken its place.
    """
    removed = []
    for left in sorted((run / "checkpoints").glob("step-*")):
        match = _LEFT.fullmatch(left.name)
        if match is None or not left.is_dir() or _last_change(left) >= before:
            continue
        if match[2] == "old" and not is_whole(left.with_name(match[1])):
            continue
        shutil.rmtree(left, ignore_errors=True)
        if not left.exists():
            removed.append(left.name)
    return removed


def _last_change(directory: Path) -> float:
    """When a file of it was written last, in seconds of the file system."""
    moments = [directory.stat().st_mtime]
    for path in directory.iterdir():
        with contextlib.suppress(OSError):
            moments.append(path.stat().st_mtime)
    return max(moments)

"""The health of a run: what its ranks do, how far it is, what is wrong; of its folder alone.

A run that goes on, one that was killed and one that has ended are read alike.
"""

from __future__ import annotations

import json
import socket
import statistics
from pathlib import Path
from typing import Final

from plait.checkpoint.folder import newest_whole, step_number
from plait.doctor import findings
from plait.doctor.findings import RunFinding
from plait.doctor.flight import Phase, record_path
from plait.doctor.record import RankSnapshot, Records, now
from plait.errors import CheckpointError, ConfigError, PlaitError
from plait.plan import Plan
from plait.run.counted import counted_unit
from plait.run.rank_errors import rank_errors
from plait.run.rundir import RunFolder
from plait.toml import parse_json, read_toml
from plait.values import JsonObject

RECENT: Final = 20


def findings_of(path: Path) -> JsonObject:
    """The keys of `plait doctor --json`. Errors: `ConfigError` for what is no folder of a run."""
    folder = _folder(path)
    views = Records(folder.doctor).views()
    state = state_of(folder, views)
    here = [view for view in views.values() if view.host == socket.gethostname()]
    metrics = metrics_so_far(folder)
    found = _findings(folder, views)
    is_told = state != "ended" or any(one["kind"] == "hang" for one in found)
    return {
        "run": str(path),
        "state": state,
        "step": _steps_done(folder, views, metrics),
        "steps": _train_key(folder, "steps"),
        "findings": found,
        "errors": [] if is_told else rank_errors(folder, here),
        "ranks": [_rank(view) for view in views.values()],
        "ranks_without_record": _without_record(folder, views),
    }


def status_of(path: Path) -> JsonObject:
    """The keys of `plait status --json`. Errors: `ConfigError` for what is no folder of a run."""
    folder = _folder(path)
    views = Records(folder.doctor).views()
    metrics = metrics_so_far(folder)
    seconds = _numbers(metrics, "seconds")
    tokens = _numbers(metrics, "tokens")
    middle = statistics.median(seconds) if seconds else None
    return {
        "run": str(path),
        "state": state_of(folder, views),
        "plan": _text(folder.plan),
        "step": _steps_done(folder, views, metrics),
        "steps": _train_key(folder, "steps"),
        "loss": metrics[-1].get("loss") if metrics else None,
        "step_seconds": middle,
        "tokens_per_second": sum(tokens) / sum(seconds) if seconds else None,
        "unit": counted_unit(tokens, _train_key(folder, "global_batch") or 0),
        "ranks": [_rank(view) for view in views.values()],
        "last_checkpoint": _checkpoint(path),
        "findings": len(_findings(folder, views)),
    }


def _findings(folder: RunFolder, views: dict[int, RankSnapshot]) -> list[JsonObject]:
    """The findings of the run, and one for each rank whose flight record cannot be read."""
    unread = [
        RunFinding(
            "corruption",
            rank,
            None,
            f"flight record {record_path(folder.doctor, rank)}",
            "it cannot be read, or its names cannot; what this rank did is unknown"
            if record_path(folder.doctor, rank).exists()
            else "it was here, and is gone; what this rank did is unknown",
        ).as_dict()
        for rank in sorted(_traces(folder) - views.keys())
    ]
    return [*findings.read(folder.doctor), *unread, *_lost_metrics(folder, views)]


def _lost_metrics(folder: RunFolder, views: dict[int, RankSnapshot]) -> list[JsonObject]:
    """A finding where a checkpoint holds steps of which `metrics.jsonl` has no line."""
    saved = _checkpoint(folder.path)
    is_alive = any(_is_alive(view) for view in views.values())
    if is_alive or saved is None or not saved["step"] or metrics_so_far(folder):
        return []
    cause = (
        f"it has no line that can be read, and {saved['path']} holds {saved['step']} steps; loss "
        "and speed of these are lost, and the checkpoint is not"
    )
    return [RunFinding("corruption", None, None, str(folder.metrics), cause).as_dict()]


def _steps_done(
    folder: RunFolder, views: dict[int, RankSnapshot], metrics: list[JsonObject]
) -> int:
    """The last step of the metrics; where these are lost, that of the checkpoint or a rank."""
    if metrics:
        return int(metrics[-1]["step"])
    known = [view.last_step for view in views.values()]
    saved = None if any(_is_alive(view) for view in views.values()) else _checkpoint(folder.path)
    return max([saved["step"] or 0 if saved else 0, *known])


def _traces(folder: RunFolder) -> set[int]:
    """The ranks that have left a file in this folder. Those of other machines may have theirs in
    another folder of this name.
    """
    size = _world_size(folder)
    logs = {rank for rank in range(size) if folder.log(rank).exists()}
    records = [path.stem.removeprefix("rank-") for path in folder.doctor.glob("rank-*.*")]
    kept = {int(name) for name in records if name.isdecimal()}
    return kept | logs if kept else set()


def _without_record(folder: RunFolder, views: dict[int, RankSnapshot]) -> list[int]:
    """The ranks of the plan of which nothing is here, where there is something of others."""
    size = _world_size(folder) if views else 0
    return sorted(set(range(size)) - _traces(folder))


def _world_size(folder: RunFolder) -> int:
    """The ranks of the run's plan; 0 where the folder does not tell."""
    text = _text(folder.plan)
    try:
        return Plan.parse(text).world_size if text else 0
    except PlaitError:
        return 0


def state_of(folder: RunFolder, views: dict[int, RankSnapshot]) -> str:
    """`running`, `finished`, `ended` for a run that stopped before its last step, or `unknown`
    where its ranks are on another machine.
    """
    alive = [_is_alive(view) for view in views.values()]
    if any(alive):
        return "running"
    steps = _train_key(folder, "steps")
    metrics = metrics_so_far(folder)
    done = _steps_done(folder, views, metrics)
    whole = steps is not None and done >= steps
    if whole and folder.summary.exists():
        return "finished"
    return "unknown" if None in alive else "ended"


def _rank(view: RankSnapshot) -> JsonObject:
    alive = _is_alive(view)
    return {
        "rank": view.rank,
        "pid": view.pid,
        "host": view.host,
        "alive": alive,
        "step": view.last_step,
        "doing": view.doing(),
        "seconds": max(0.0, now() - view.moved) if alive else None,
    }


def _is_alive(view: RankSnapshot) -> bool | None:
    """Whether the rank runs; None for one of another machine, whose processes are not seen here."""
    if view.host == socket.gethostname():
        return bool(view.process_state())
    return False if view.phase is Phase.DONE else None


def _folder(path: Path) -> RunFolder:
    folder = RunFolder(path)
    if not folder.plan.is_file() and not folder.doctor.is_dir():
        raise ConfigError(f"{path} is no folder of a run; plait train --out DIR makes one")
    return folder


def metrics_so_far(folder: RunFolder) -> list[JsonObject]:
    """The steps of `metrics.jsonl` that can be read."""
    metrics = []
    for line in (_text(folder.metrics) or "").splitlines():
        try:
            one = parse_json(line)
        except ValueError:
            continue
        if isinstance(one, dict) and isinstance(one.get("step"), int):
            metrics.append(one)
    return metrics


def _numbers(metrics: list[JsonObject], key: str) -> list[float]:
    """The numbers of one key in the last steps."""
    values = [one.get(key) for one in metrics[-RECENT:]]
    return [value for value in values if isinstance(value, int | float) and value]


def _train_key(folder: RunFolder, key: str) -> int | None:
    """A whole number of the config's [train]."""
    try:
        value = read_toml(folder.config, ConfigError).get("train", {}).get(key)
    except (ConfigError, AttributeError):
        return None
    return value if isinstance(value, int) else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def _checkpoint(path: Path) -> JsonObject | None:
    try:
        found = newest_whole(path)
    except (CheckpointError, OSError, json.JSONDecodeError):
        return None
    return {"path": str(found), "step": step_number(found)}

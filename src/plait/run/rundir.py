"""The folder of a run: which file lies where, and which folder a new or a resumed run may use.

    config.toml, plan.txt        what was asked for (and schedule.txt, a schedule of the user's own)
    products.json                which library multiplies what (see `engine.choosing`)
    metrics.jsonl                one object a step
    eval.jsonl                   one object an evaluation
    checkpoints/step-00000100/   the state after that step
    best/                        the state of the best evaluation
    summary.json, trace.json     written at the end
    run-id.txt, restarts.jsonl   torchrun's name of the run, and its restarts and rollbacks
    doctor/                      the ranks' flight records, and findings.jsonl
    logs/rank-0.txt, profile/    what each rank wrote; its step under torch's profiler
    .lock                        held by the process that runs (see `runlock`)

Knows no torch: the launcher prepares the folder before any rank exists, so a refusal costs
milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from plait.checkpoint.folder import LATEST, newest_whole, resolve
from plait.doctor.findings import FILE as FINDINGS
from plait.engine.runlock import LOCK
from plait.errors import WRITE_ELSEWHERE, CheckpointError, ConfigError, PlanError
from plait.plan import Plan

BEST = "best"


@dataclass(frozen=True)
class RunFolder:
    """The paths inside one run's folder."""

    path: Path

    @staticmethod
    def of(checkpoint: Path) -> RunFolder:
        """The folder of the run that has saved a checkpoint: a step of it, or its best weights."""
        place = checkpoint
        if len(place.parts) < 3 or ".." in place.parts:  # relative to a folder inside the run
            place = checkpoint.resolve()
        return RunFolder(place.parent if place.name == BEST else place.parent.parent)

    @property
    def config(self) -> Path:
        """The config as it was used, overrides included."""
        return self.path / "config.toml"

    @property
    def plan(self) -> Path:
        """The plan's canonical text."""
        return self.path / "plan.txt"

    @property
    def plan_text(self) -> str | None:
        """The plan of the run that is there, empty where a kill cut it off.

        None without a plan, and where the file is none of plait's.
        """
        try:
            text = self.plan.read_text(encoding="utf-8").strip()
            if text:
                Plan.parse(text)
        except (OSError, UnicodeDecodeError, PlanError):
            return None
        return text

    @property
    def schedule(self) -> Path:
        """The user's own schedule, where the config names one."""
        return self.path / "schedule.txt"

    @property
    def products(self) -> Path:
        """The table of products that the run began with, so that a resumed one multiplies alike."""
        return self.path / "products.json"

    @property
    def metrics(self) -> Path:
        """One JSON object a step: step, loss, grad_norm, tokens, seconds."""
        return self.path / "metrics.jsonl"

    @property
    def evaluations(self) -> Path:
        """One JSON object an evaluation: step, loss, perplexity, accuracy, samples."""
        return self.path / "eval.jsonl"

    @property
    def best(self) -> Path:
        """The checkpoint of the best evaluation, with `eval.keep_best`."""
        return self.path / BEST

    @property
    def run_id(self) -> Path:
        """The name by which torchrun knows the run."""
        return self.path / "run-id.txt"

    @property
    def restarts(self) -> Path:
        """One JSON object for each time that torchrun has started the run again."""
        return self.path / "restarts.jsonl"

    @property
    def summary(self) -> Path:
        """The object that `plait train --json` prints."""
        return self.path / "summary.json"

    @property
    def trace(self) -> Path:
        """The last steps of all ranks, for Perfetto."""
        return self.path / "trace.json"

    @property
    def doctor(self) -> Path:
        """The flight records of the ranks, and the findings."""
        return self.path / "doctor"

    @property
    def files(self) -> tuple[Path, ...]:
        """The files beside the folders."""
        asked = (self.config, self.plan, self.schedule, self.products, self.run_id)
        return (*asked, self.metrics, self.evaluations, self.restarts, self.summary, self.trace)

    def log(self, rank: int) -> Path:
        """The log of a rank: its stdout and stderr."""
        return self.path / "logs" / f"rank-{rank}.txt"

    def profile(self, rank: int) -> Path:
        """The trace of a rank's step that torch's profiler has recorded."""
        return self.path / "profile" / f"rank-{rank}.json"

    def checkpoint(self, step: int) -> Path:
        """Where the state after `step` is saved."""
        return self.path / "checkpoints" / f"step-{step:08d}"

    def remove_if_empty(self) -> None:
        """A run that failed before its first step leaves nothing behind, and its name is free
        again.
        """
        names = {one.name for one in self.path.iterdir()} if self.path.is_dir() else {""}
        if names <= {"doctor", "logs", LOCK} and not (self.doctor / FINDINGS).exists():
            for name in ("doctor", "logs"):
                shutil.rmtree(self.path / name, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.path.rmdir()

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is one to continue from."""
        try:
            resolve(self.path)
        except CheckpointError:
            return False
        return True

    @property
    def has_whole_checkpoint(self) -> bool:
        """Whether there is one whose files are all there."""
        try:
            newest_whole(self.path)
        except CheckpointError:
            return False
        return True


def new_run(out: Path | None, name: str, root: Path = Path("runs")) -> RunFolder:
    """A folder for a new run: `out`, or `runs/<name>-<time>`. Errors: `ConfigError` when it is
    taken or not writable.
    """
    path = out if out is not None else _unused(root / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    folder = RunFolder(path)
    if path.is_dir() and any(one.name != LOCK for one in path.iterdir()):
        cure = "choose another --out"
        if folder.has_checkpoint:
            cure += f", or continue what is there with --resume {path}"
        elif folder.plan_text is not None:
            cure += ", or start the run that is there over with --resume auto"
        else:
            cure += "; it holds no run that --resume could continue"
        raise ConfigError(f"{path} is not empty; {cure}")
    _make_writable(path)
    return folder


def resumed_run(
    source: Path | None, out: Path | None, name: str, root: Path = Path("runs")
) -> tuple[RunFolder, Path]:
    """The folder to continue in and the checkpoint to start from.

    `source` is a run's folder or one of its checkpoints. None and `latest` mean `out`, or the
    latest run of this name that has a checkpoint. With both, `source` is read and `out`, a new
    folder, is written. Errors: `CheckpointError` when there is nothing to resume from.
    """
    if source is not None and is_word(source, LATEST):
        source = None
    read = source or out or _latest(root, name)
    if read is None:
        raise CheckpointError(
            f"there is no run of '{name}' with a checkpoint in {root}/; name its folder: --resume "
            "DIR"
        )
    checkpoint = resolve(read) if source is not None else newest_whole(read)
    if source is not None and out is not None and out.resolve() != read.resolve():
        return new_run(out, name), checkpoint
    folder = RunFolder.of(checkpoint)
    _make_writable(folder.path)
    return folder, checkpoint


def auto_source(out: Path | None, name: str, root: Path = Path("runs")) -> Path | None:
    """The run that `--resume auto` continues: `out`, or the latest of this name. None where it has
    no whole checkpoint, which means a fresh start.
    """
    read = out or _latest(root, name)
    return read if read is not None and RunFolder(read).has_whole_checkpoint else None


def fresh_run(out: Path | None, name: str, root: Path = Path("runs")) -> RunFolder:
    """The folder of a run that may have begun before: what it left without a checkpoint is started
    over. Errors: `ConfigError` for a folder that holds something else.
    """
    if out is None or RunFolder(out).plan_text is None:
        return new_run(out, name, root)
    _make_writable(out)
    return RunFolder(out)


def latest_run(root: Path = Path("runs")) -> Path:
    """`plait report latest`: the run of any name that was written to last. Errors: `ConfigError`
    when there is none.
    """
    runs = [path for path in root.glob("*") if RunFolder(path).plan.is_file()]
    found = max(runs, key=_written_at, default=None)
    if found is None:
        raise ConfigError(f"there is no run in {root}/; plait train CONFIG makes one")
    return found


def is_word(path: Path, word: str) -> bool:
    """Whether a word stands where a folder could; a folder of that name needs its whole path."""
    return str(path) == word


def _latest(root: Path, name: str) -> Path | None:
    runs = [path for path in root.glob(f"{name}-*") if RunFolder(path).has_checkpoint]
    return max(runs, key=_written_at, default=None)


def _written_at(run: Path) -> float:
    """The time of a run's last writing. It is that of the newest file, as the folder only tells
    when a name was added.
    """
    folder = RunFolder(run)
    times = [one.stat().st_mtime for one in (folder.metrics, folder.plan, run) if one.exists()]
    return max(times)


def _unused(path: Path) -> Path:
    candidate = path
    number = 2
    while candidate.exists():
        candidate = path.with_name(f"{path.name}-{number}")
        number = number + 1
    return candidate


def _make_writable(path: Path) -> None:
    if not path.is_dir() and os.path.lexists(path):
        what = "a file"
        if path.is_symlink() and not path.exists():
            what = f"a symbolic link to {path.readlink()}, which is not there"
        raise ConfigError(f"the run's folder {path} is {what}; choose another --out")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the run's folder {path} cannot be made: {error.strerror or error}; "
            f"{WRITE_ELSEWHERE}, with --out"
        ) from error
    folder = RunFolder(path)
    latest = path / "checkpoints" / LATEST
    for file in (*folder.files, latest):
        if file.is_dir():
            raise ConfigError(f"{file} is a folder, and a run writes a file there; move it away")
    parts = (folder.doctor, path / "logs", path / "checkpoints")
    inside = (one for one in parts if one.exists())
    for one in (path, *inside):
        if not one.is_dir() or not os.access(one, os.W_OK | os.X_OK):
            raise ConfigError(
                f"the run's folder {one} takes no files; {WRITE_ELSEWHERE}, with --out"
            )

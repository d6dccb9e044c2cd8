"""Evaluation: loss, perplexity and accuracy of a data set over the whole mesh, under any plan.

The sums of all ranks are added and divided once, so that a plan cannot change the answer. Samples
come in the order of the data set, each exactly once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

from torch import Tensor

from plait.checkpoint.folder import read_index
from plait.datasets.loader import InOrder
from plait.datasets.sample_set import SampleSet
from plait.doctor.findings import say
from plait.engine.engine import Engine
from plait.engine.loss import MetricSum
from plait.errors import CheckpointError, RunError
from plait.models.losses import correct_classes
from plait.run.hooks import Hook, RunStart, StepDone
from plait.run.json_lines import rows_of
from plait.run.rundir import RunFolder
from plait.values import JsonObject, JsonValue


@dataclass(frozen=True)
class Evaluation:
    """The answer of `plait evaluate`.

    Attributes:
        loss: the mean over all counted tokens or samples.
        perplexity: exp(loss), for targets that are sequences of tokens; else None.
        accuracy: the part of right classes, for one label a sample; else None.
        samples: the samples that were evaluated.
    """

    loss: float
    perplexity: float | None
    accuracy: float | None
    samples: int

    def as_dict(self) -> JsonObject:
        """The fields as plain data."""
        return asdict(self)


def evaluate(
    engine: Engine,
    batches: InOrder,
    tell: Callable[[int, float], None] = lambda num, loss: None,
    leaves_off: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Evaluate an engine's model on a data set. Collective; nothing is updated.

    `tell` hears after each batch how many samples are done, and their loss. There is no answer
    where `leaves_off` says, alike on every rank, that the next batch is not to be evaluated.
    """
    has_labels, has_tokens = _kind_of(batches.dataset)
    functions = [correct_classes] if has_labels else []
    sums: list[MetricSum] | None = None
    for number, batch in enumerate(batches, 1):
        if leaves_off():
            return None
        measured = engine.measure(batch, functions)
        before = sums or [MetricSum(0.0, 0.0)] * len(measured)
        sums = [one + other for one, other in zip(before, measured, strict=True)]
        tell(min(number * batches.global_batch, batches.num_samples), sums[0].mean)
    assert sums is not None  # a data set has a sample
    loss = sums[0].mean
    perplexity = None
    if has_tokens:
        perplexity = math.exp(loss) if loss < math.log(1e300) else math.inf
    accuracy = sums[1].mean if has_labels else None
    return Evaluation(loss, perplexity, accuracy, batches.num_samples)


def _kind_of(dataset: SampleSet) -> tuple[bool, bool]:
    """Whether a target is one class, and whether it is a sequence of tokens."""
    import torch

    target = dataset[0][1]
    if isinstance(target, bool) or not isinstance(target, (int, Tensor)):
        return False, False
    tensor = torch.as_tensor(target)
    if tensor.is_floating_point() or tensor.is_complex():
        return False, False
    return tensor.dim() == 0, tensor.dim() >= 1


class Evaluations(Hook):
    """`[eval]`: evaluate every `every` steps, keep the best weights, end when they get no better.

    All ranks call it. Rank 0 writes a line of `eval.jsonl` for each evaluation. One that a signal
    cuts short is left off, and made when the run goes on.

    Attributes:
        ends: whether `patience` evaluations in a row were no better than the best.
        last: the newest evaluation.
        is_left_off: whether a signal came before the newest was whole.
    """

    def __init__(
        self,
        batches: InOrder,
        every: int,
        folder: RunFolder | None,
        *,
        keep_best: bool = False,
        patience: int | None = None,
        leaves_off: Callable[[], bool] = lambda: False,
    ) -> None:
        self.batches = batches
        self.every = every
        self.folder = folder
        self.keep_best = keep_best
        self.patience = patience
        self.ends = False
        self.last: Evaluation | None = None
        self._last_step = 0
        self.is_left_off = False
        self._leaves_off = leaves_off
        self._best = math.inf
        self._best_step = 0
        self._kept = math.inf
        self._worse = 0

    def newest(self) -> tuple[int, JsonObject] | None:
        """The step and the numbers of the newest evaluation."""
        return None if self.last is None else (self._last_step, self.last.as_dict())

    def on_start(self, start: RunStart) -> None:
        """Learn what is evaluated, and what a run that is continued has reached.

        Its last step is evaluated here, where that was due and a signal came before.
        """
        self._start = start
        self._go_on_after(start.first_step - 1)
        if self._step and self._is_due(self._step):
            self._evaluate()

    def on_rollback(self, step: int) -> None:
        """Forget the evaluations of steps that are done again."""
        if self._last_step > step:
            self.last = None
        if step < self._step:
            self._go_on_after(step)

    def _go_on_after(self, step: int) -> None:
        """Take up the evaluations until a step. Collective."""
        start = self._start
        self._step = step
        self._best = math.inf
        self._best_step = 0
        self._worse = 0
        self.ends = False
        world = start.engine.world
        rows: list[JsonObject] = []
        if self.folder is not None and world.rank == 0:
            rows = [row for row in read_rows(self.folder) if row["step"] <= self._step]
            write_rows(self.folder, rows)
        kept_step = self._kept_step() if world.rank == 0 else None
        rows, kept_step = world.axis("world").gather_objects((rows, kept_step))[0]
        kept = [row["loss"] for row in rows if row["step"] == kept_step]
        self._kept = math.inf if not kept or kept[0] is None else kept[0]
        if kept_step is not None and kept_step > step and world.rank == 0:
            say(
                f"best/ is of step {kept_step}, and the run goes on after step {step}: the next "
                "evaluation takes its place"
            )
        for row in rows:
            self._judge(int(row["step"]), row["loss"])
        told = [int(row["step"]) for row in rows]
        self._evaluated = step if self.folder is None else max(told, default=0)

    def needs_state(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0

    def on_step(self, done: StepDone) -> None:
        """Evaluate when it is time to."""
        self._step = done.step
        if self._is_due(done.step):
            self._evaluate()

    def on_end(self) -> None:
        """Evaluate the last step unless that has just happened, or a signal ends the run."""
        last = self._start.last_step
        if self._step > self._evaluated and self._step == last:
            self._evaluate()
        if self.ends and self._step < last and self._start.engine.world.rank == 0:
            found = f"no better evaluation since step {self._best_step}"
            if not self._best_step:
                found = "no evaluation has a finite loss"
            say(
                f"{found} ([eval] patience = {self.patience}); the run ends after step "
                f"{self._step} of {last}"
            )

    def _is_due(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0 and step > self._evaluated

    def _evaluate(self) -> None:
        engine = self._start.engine
        evaluation = evaluate(engine, self.batches, leaves_off=self._leaves_off)
        self.is_left_off = evaluation is None
        if evaluation is None:
            return
        self.last = evaluation
        self._last_step = self._step
        self._evaluated = self._step
        loss = evaluation.loss
        self._judge(self._step, loss)
        if self.folder is None:
            return
        if self.keep_best and loss < self._kept:
            # Before the row: a run that is killed in between makes the evaluation again.
            engine.save(self.folder.best, loader=self._start.loader.state_dict())
            self._kept = loss
        if engine.world.rank == 0:
            append_row(self.folder, {"step": self._step, **evaluation.as_dict()})

    def _kept_step(self) -> int | None:
        """The step whose weights are in `best/`; None where none are kept."""
        if not self.keep_best or self.folder is None or not self.folder.best.is_dir():
            return None
        try:
            return int(read_index(self.folder.best)["meta"]["step"])
        except (CheckpointError, LookupError, TypeError, ValueError):
            return None

    def _judge(self, step: int, loss: float | None) -> None:
        """Take in the loss of one more evaluation; None for one that is no finite number."""
        if loss is not None and loss < self._best:
            self._best = loss
            self._best_step = step
            self._worse = 0
            self.ends = False
            return
        self._worse += 1
        self.ends = self.patience is not None and self._worse >= self.patience


def read_rows(folder: RunFolder | None) -> list[JsonObject]:
    """The evaluations of a run so far; lines that a crash has cut are left out."""
    if folder is None or not folder.evaluations.is_file():
        return []
    rows = rows_of(folder.evaluations)
    return [row for row in rows if isinstance(row.get("step"), int) and "loss" in row]


def write_rows(folder: RunFolder, rows: list[JsonObject]) -> None:
    """Write `eval.jsonl` again; without rows there is no file."""
    if not rows:
        folder.evaluations.unlink(missing_ok=True)
        return
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    folder.evaluations.write_text(text, encoding="utf-8")


def append_row(folder: RunFolder, row: JsonObject) -> None:
    """Add an evaluation to `eval.jsonl`. Errors: `RunError` when it cannot be written."""
    standard = {key: _finite(value) for key, value in row.items()}
    try:
        with folder.evaluations.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(standard)}\n")
    except OSError as error:
        raise RunError(f"{folder.evaluations} cannot be written: {error.strerror}") from error


def _finite(value: JsonValue) -> JsonValue:
    """The value, or None for a number that JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value

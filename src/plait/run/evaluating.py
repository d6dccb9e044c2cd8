"""The evaluation of a checkpoint or of initial weights, as its ranks see it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from plait.values import JsonObject

if TYPE_CHECKING:
    from plait.config import Config

WHOLE = "; this is the whole data set, and --batches N (or eval.batches) takes less of it"


@dataclass(frozen=True)
class EvaluateJob:
    """The evaluation that ranks do. `batches` None takes those of `[eval]`, else the whole set."""

    config: Config
    plan: str
    checkpoint: Path | None = None
    batches: int | None = None


def run(job: EvaluateJob) -> JsonObject:
    """Evaluate, and return the object of `plait evaluate --json`. Collective."""
    from plait.engine.build import join_world
    from plait.engine.explain import explained, memory_error
    from plait.plan import Plan
    from plait.run.assemble import assemble, make_eval_batches
    from plait.run.evaluation import evaluate
    from plait.run.logs import terminal_of
    from plait.run.progress import EvaluatedLines

    plan = Plan.parse(job.plan)
    world = join_world(plan, backend=job.config.cluster.backend)
    with explained(memory_error(world.rank, "building the model")):
        training = assemble(job.config, plan, world)
    if job.checkpoint is not None:
        training.engine.load(job.checkpoint)
    batches = make_eval_batches(job.config, *world.worker, batches=job.batches)
    tell: Callable[[int, float], None] = _silent
    if world.rank == 0:
        is_whole = job.batches is None and job.config.eval.batches is None
        tell = EvaluatedLines(
            batches.num_samples, terminal_of(sys.stderr), remark=WHOLE if is_whole else ""
        )
    evaluation = evaluate(training.engine, batches, tell)
    assert evaluation is not None  # nothing tells it to leave off
    result = {
        **evaluation.as_dict(),
        "step": training.engine.step_index,
        "plan": job.plan,
        "checkpoint": None if job.checkpoint is None else str(job.checkpoint),
    }
    world.close()
    return result


def _silent(num_done: int, loss: float) -> None:
    """Say nothing: rank 0 does."""

"""Both sides of the proof of an asynchronous pipeline. A run is one observation: between steps its
stages are not in step.

The comparison is of the mean of the steps' losses and the parameters after the flush. The whole
change of each parameter stands for its gradient. The reference is `delayed`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from torch import Tensor, nn

from plait.batch_trees import joined
from plait.engine.engine import Engine
from plait.errors import PlanError
from plait.mesh import Mesh, Shard
from plait.parallel.pipeline import schedules
from plait.parallel.pipeline.weights import stage_weights
from plait.plan import Plan
from plait.plan.facts import SCHEDULES
from plait.values import PyTree
from plait.verify.problem import Problem
from plait.verify.record.observation import Observation, Record
from plait.verify.record.observe import RankRecord, RankStep, join, parameters_of
from plait.verify.reference.batches import Batch
from plait.verify.reference.delayed import run_delayed
from plait.verify.reference.one_device import Slice

SKIPPED = {
    "clipping": "its stages update by themselves, so there is no global norm",
    "tied": "its stages update by themselves, so a weight cannot be on two of them",
    "dropout": "a micro-batch of several data ranks has several seeds, and the reference runs it "
    "at once",
}


def is_asynchronous(plan: Plan) -> bool:
    """Whether steps of the plan overlap."""
    return SCHEDULES[plan.pp.schedule].asynchronous and plan.pp.size > 1


def record_stream(engine: Engine, batches: Iterable[PyTree], steps: int) -> RankRecord:
    """Train `steps` steps and flush; the run as one step. Collective."""
    start = parameters_of(engine)
    results = [engine.step(batch, trace=False) for batch in islice(batches, steps)]
    engine.flush()
    final = parameters_of(engine)
    wanted = {name for name, param in engine.holding.params.items() if param.requires_grad}
    change = [
        replace(before, values=before.values - after.values)
        for before, after in zip(start, final, strict=True)
        if before.name in wanted
    ]
    loss = sum(result.loss for result in results) / len(results)
    count = sum(result.count for result in results)
    return RankRecord(start, [RankStep(loss, 0.0, count, change, final, [])])


def join_stream(records: Sequence[RankRecord]) -> Record:
    """One record from those of all ranks; there is no norm."""
    joined = join(records)
    return Record(joined.start, [replace(seen, grad_norm=None) for seen in joined.steps])


def reference_stream(
    problem: Problem,
    plan: Plan,
    model: nn.Module,
    batches: Sequence[Batch],
    records: Sequence[RankRecord],
) -> Record:
    """One device under the rule of the plan's schedule. Which stage holds what is read from the
    ranks' records.

    Raises:
        PlanError: the stages do not have each parameter once.
    """
    mesh = Mesh.of(plan)
    cut = problem.slices(plan)
    schedule = schedules.make(
        plan.pp.schedule, plan.pp.size, plan.micro_batches, num_steps=len(batches)
    )
    names = [_names(records[mesh.rank_at(pp=stage)].start) for stage in range(plan.pp.size)]
    if sorted(name for stage in names for name in stage) != sorted(
        name for name, _ in model.named_parameters()
    ):
        raise PlanError("the stages together do not hold every parameter once")
    stream = [_micro_batches(cut(step, batch)) for step, batch in enumerate(batches)]
    recipe = problem.recipe()
    begun = _values(model)
    record = run_delayed(
        model, stream, recipe, list(zip(names, stage_weights(schedule), strict=True))
    )
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    change = {name: begun[name] - value for name, value in record.params.items() if name in trained}
    loss = sum(record.losses) / len(record.losses)
    grads: Mapping[str, Tensor | None] = {name: change.get(name) for name in record.params}
    return Record(begun, [Observation(loss, grads, record.params, count=record.num_tokens)])


def _names(shards: Sequence[Shard]) -> list[str]:
    return list(dict.fromkeys(shard.name for shard in shards))


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def _micro_batches(parts: Sequence[Slice]) -> list[Batch]:
    """Micro-batch j of all data ranks, as one."""
    found: list[Batch] = []
    for number in sorted({part.micro_batch for part in parts}):
        shares = [part.batch for part in parts if part.micro_batch == number]
        found.append(joined(shares))
    return found

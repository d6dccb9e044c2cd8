"""torch's pipelining: schedules, uneven micro-batches, tied weights and what a stage may hold."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    SplitPoint,
    pipeline,
)

from atlas.features import models
from atlas.features.feature import Feature
from atlas.features.models import make_deep

PACKAGE = "torch"
TITLE = "torch pipelining"
CPU = torch.device("cpu")


def parts_of(model):
    """Four stages: blocks, the last with the head."""
    blocks = list(model.blocks)
    return [*blocks[:3], torch.nn.Sequential(blocks[3], model.head)]


def loop(schedule, **options):
    """Two stages a rank, dealt out in turn."""

    def prepare(model):
        rank = dist.get_rank()
        return several(model, [rank, rank + 2], schedule, options)

    return prepare


def bend(schedule, **options):
    """Two stages a rank, in a V."""

    def prepare(model):
        rank = dist.get_rank()
        return several(model, [rank, 3 - rank], schedule, options)

    return prepare


def several(model, numbers, schedule, options):
    parts = parts_of(model)
    stages = [PipelineStage(parts[number], number, 4, CPU) for number in numbers]
    own = [one for number in numbers for one in parts[number].parameters()]
    made = schedule(stages, 4, loss_fn=F.cross_entropy, **options)
    return made, torch.optim.AdamW(own, lr=1e-2, eps=1e-5), 3 in numbers


def single(schedule, wrap=lambda part: part, micro_batches=4):
    """One stage a rank."""

    def prepare(model):
        rank = dist.get_rank()
        parts = parts_of(model)
        part = wrap(torch.nn.Sequential(*parts[2 * rank : 2 * rank + 2]))
        stage = PipelineStage(part, rank, 2, CPU)
        made = schedule(stage, micro_batches, loss_fn=F.cross_entropy)
        return made, torch.optim.AdamW(part.parameters(), lr=1e-2, eps=1e-5), rank == 1

    return prepare


def traced(split):
    """A traced model."""

    def prepare(model):
        example = torch.zeros(2, 6, dtype=torch.int64)
        pipe = pipeline(model, mb_args=(example,), split_spec={split: SplitPoint.BEGINNING})
        rank = dist.get_rank()
        stage = pipe.build_stage(rank, CPU)
        schedule = Schedule1F1B(stage, 4, loss_fn=models.token_loss)
        own = list(stage.submod.parameters())
        return schedule, torch.optim.AdamW(own, lr=1e-2, eps=1e-5), rank == 1

    return prepare


def called(schedule, batch, ends):
    inputs = batch[:1] if dist.get_rank() == 0 else ()
    targets = {"target": batch[1], "losses": []} if ends else {}
    schedule.step(*inputs, **targets)


def step(state, batch, loss):
    schedule, optimizer, ends = state
    optimizer.zero_grad()
    called(schedule, batch, ends)
    optimizer.step()


def evaluated_between(state, batch, loss):
    """An evaluation between two steps."""
    schedule, optimizer, ends = state
    optimizer.zero_grad()
    inputs = batch[:1] if dist.get_rank() == 0 else ()
    targets = {"target": batch[1], "losses": []} if ends else {}
    schedule.eval(*inputs, **targets)
    called(schedule, batch, ends)
    optimizer.step()


SCHEDULES = (
    (ScheduleInterleaved1F1B, loop),
    (ScheduleLoopedBFS, loop),
    (ScheduleInterleavedZeroBubble, loop),
    (ScheduleZBVZeroBubble, bend),
    (ScheduleDualPipeV, bend),
)
FEATURES = [
    Feature("GPipe", make_deep, single(ScheduleGPipe), step),
    Feature("1F1B", make_deep, single(Schedule1F1B), step),
    Feature("1F1B, an evaluation between", make_deep, single(Schedule1F1B), evaluated_between),
    *(
        Feature(kind.__name__.removeprefix("Schedule"), make_deep, place(kind), step)
        for kind, place in SCHEDULES
    ),
    Feature("a traced model", models.make_tokens, traced("blocks.1"), step),
    Feature(
        "a traced model, tied weights", models.make_tied, traced("blocks.1"), step, expected=""
    ),
]

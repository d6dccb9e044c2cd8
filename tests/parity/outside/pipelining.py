"""torch's pipelining: a traced model in two stages under 1F1B, and gradients of two calls added."""

import torch
import torch.distributed as dist
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline

from tests.parity.outside import net

make = net.make


def prepare(model):
    split = {"blocks.1": SplitPoint.BEGINNING}
    example = torch.zeros(2, 8, dtype=torch.float64)
    pipe = pipeline(model, mb_args=(example,), split_spec=split)
    stage = pipe.build_stage(dist.get_rank(), torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=torch.nn.functional.cross_entropy)
    return schedule, torch.optim.AdamW(stage.submod.parameters(), lr=1e-2)


def call(schedule, batch):
    losses = []
    if dist.get_rank() == 0:
        schedule.step(batch[0])
    else:
        schedule.step(target=batch[1], losses=losses)
    return torch.stack(losses).mean() if losses else None


def train_step(state, batch, loss):
    schedule, optimizer = state
    optimizer.zero_grad()
    value = call(schedule, batch)
    optimizer.step()
    return value


def accumulated(state, batch, loss):
    schedule, optimizer = state
    optimizer.zero_grad()
    call(schedule, batch)
    call(schedule, batch)
    optimizer.step()

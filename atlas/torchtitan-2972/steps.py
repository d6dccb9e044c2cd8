"""A pipeline whose loss is a sum, divided by the valid tokens before the backward or after it."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

MICRO_BATCHES = 2


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def summed(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def make():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 5)]
    batches = []
    for _ in range(2):
        targets = torch.randint(0, 5, (4, 6))
        targets[0, 2:] = -100
        batches.append((torch.randn(4, 6, 8), targets))
    return torch.nn.Sequential(*layers), batches, cross_entropy


def prepare(model):
    example = torch.zeros(2, 6, 8, dtype=torch.float64)
    pipe = pipeline(model, mb_args=(example,), split_spec={"2": SplitPoint.BEGINNING})
    stage = pipe.build_stage(dist.get_rank(), torch.device("cpu"))
    return stage, torch.optim.SGD(stage.submod.parameters(), lr=0.001)


def update(state, batch, loss):
    stage, optimizer = state
    optimizer.zero_grad()
    schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=loss, scale_grads=False)
    losses = []
    if dist.get_rank() == 0:
        schedule.step(batch[0])
    else:
        schedule.step(target=batch[1], losses=losses)
    optimizer.step()
    return torch.stack(losses).sum() if losses else None


def broken(state, batch, loss):
    value = update(state, batch, summed)
    return None if value is None else value / (batch[1] != -100).sum()


def fixed(state, batch, loss):
    tokens = (batch[1] != -100).sum()
    return update(state, batch, lambda logits, targets: summed(logits, targets) / tokens)

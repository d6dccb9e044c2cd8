"""Two calls of a pipeline schedule for one update: the second scales what the first has summed."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline

CALLS = 2
MICRO_BATCHES = 4


def make():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 5)]
    batches = [(torch.randn(8, 8), torch.randint(0, 5, (8,))) for _ in range(2)]
    return torch.nn.Sequential(*layers), batches, F.cross_entropy


def prepare(model):
    example = torch.zeros(1, 8, dtype=torch.float64)
    pipe = pipeline(model, mb_args=(example,), split_spec={"2": SplitPoint.BEGINNING})
    stage = pipe.build_stage(dist.get_rank(), torch.device("cpu"))
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
    return stage, optimizer


def update(state, batch, schedule):
    _, optimizer = state
    optimizer.zero_grad()
    for part in range(CALLS):
        inputs, targets = (tensor.chunk(CALLS)[part] for tensor in batch)
        if dist.get_rank() == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=[])
    optimizer.step()


def broken(state, batch, loss):
    def rescaled(output, target):
        return loss(output, target) / CALLS

    update(state, batch, Schedule1F1B(state[0], MICRO_BATCHES, loss_fn=rescaled))


def fixed(state, batch, loss):
    def rescaled(output, target):
        return loss(output, target) / CALLS / MICRO_BATCHES

    schedule = Schedule1F1B(state[0], MICRO_BATCHES, loss_fn=rescaled, scale_grads=False)
    update(state, batch, schedule)

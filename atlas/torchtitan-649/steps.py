"""A pipeline whose stages clip by torch's function, which sees one stage's gradients."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

LIMIT = 0.1


def make():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 5)]
    batches = [(torch.randn(8, 8), torch.randint(0, 5, (8,))) for _ in range(2)]
    return torch.nn.Sequential(*layers), batches, F.cross_entropy


def prepare(model):
    example = torch.zeros(4, 8, dtype=torch.float64)
    pipe = pipeline(model, mb_args=(example,), split_spec={"2": SplitPoint.BEGINNING})
    stage = pipe.build_stage(dist.get_rank(), torch.device("cpu"))
    return stage, torch.optim.SGD(stage.submod.parameters(), lr=0.1)


def update(state, batch, loss, clip):
    stage, optimizer = state
    optimizer.zero_grad()
    schedule = ScheduleGPipe(stage, 2, loss_fn=loss)
    if dist.get_rank() == 0:
        schedule.step(batch[0])
    else:
        schedule.step(target=batch[1], losses=[])
    clip(list(stage.submod.parameters()))
    optimizer.step()


def of_one_stage(parameters):
    torch.nn.utils.clip_grad_norm_(parameters, LIMIT)


def of_all_stages(parameters):
    square = torch.nn.utils.get_total_norm([one.grad for one in parameters]) ** 2
    dist.all_reduce(square)
    torch.nn.utils.clip_grads_with_norm_(parameters, LIMIT, square.sqrt())


def broken(state, batch, loss):
    update(state, batch, loss, of_one_stage)


def fixed(state, batch, loss):
    update(state, batch, loss, of_all_stages)

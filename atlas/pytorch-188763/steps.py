"""A pipeline of two stages with batch norms, whose shapes are inferred with or without a trace."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

MICRO_BATCHES = 4


def make():
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8)]
    batches = [(torch.randn(16, 8), torch.randn(16, 8)) for _ in range(2)]
    return nn.Sequential(*layers), batches, F.mse_loss


class Part(nn.Module):
    """Some layers of the model, under the names that they have there."""

    def __init__(self, model, first, last):
        super().__init__()
        for name, layer in list(model.named_children())[first:last]:
            self.add_module(name, layer)

    def forward(self, x):
        for layer in self.children():
            x = layer(x)
        return x


def prepare(model):
    rank = dist.get_rank()
    part = Part(model, 2 * rank, 2 * rank + 2)
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=F.mse_loss)
    return part, schedule, torch.optim.SGD(part.parameters(), lr=0.1)


def broken(state, batch, loss):
    _, schedule, optimizer = state
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        schedule.step(batch[0])
    else:
        schedule.step(target=batch[1], losses=[])
    optimizer.step()


def fixed(state, batch, loss):
    part, schedule, _ = state
    infer = schedule._initialize_stage

    def without_a_trace(*args, **kwargs):
        kept = [buffer.clone() for buffer in part.buffers()]
        infer(*args, **kwargs)
        for buffer, value in zip(part.buffers(), kept, strict=True):
            buffer.copy_(value)

    schedule._initialize_stage = without_a_trace
    broken(state, batch, loss)
    schedule._initialize_stage = infer

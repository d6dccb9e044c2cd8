"""A model in DDP that is called past it."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    batches = [(torch.randn(8, 8), torch.randint(0, 4, (8,))) for _ in range(2)]
    return model, batches, F.cross_entropy


def prepare(model):
    return DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1)


def update(state, batch, loss, reduces):
    model, optimizer = state
    optimizer.zero_grad()
    inputs, targets = (part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch)
    loss(model.module(inputs), targets).backward()
    for parameter in model.parameters():
        if reduces:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    optimizer.step()


def broken(state, batch, loss):
    update(state, batch, loss, reduces=False)


def fixed(state, batch, loss):
    update(state, batch, loss, reduces=True)

"""Gradient accumulation under DDP whose last micro-batch is inside `no_sync`."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

ACCUMULATE = 2


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    batches = [(torch.randn(8, 8), torch.randint(0, 4, (8,))) for _ in range(2)]
    return model, batches, F.cross_entropy


def prepare(model):
    model = DistributedDataParallel(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def update(state, batch, loss, offset):
    model, optimizer = state
    optimizer.zero_grad()
    inputs, targets = (part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch)
    for index in range(ACCUMULATE):
        sync = (index + offset) % ACCUMULATE == 0
        with contextlib.nullcontext() if sync else model.no_sync():
            value = loss(model(inputs.chunk(ACCUMULATE)[index]), targets.chunk(ACCUMULATE)[index])
            (value / ACCUMULATE).backward()
    optimizer.step()


def broken(state, batch, loss):
    update(state, batch, loss, offset=0)


def fixed(state, batch, loss):
    update(state, batch, loss, offset=1)

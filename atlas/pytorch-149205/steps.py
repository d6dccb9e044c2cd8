"""FSDP2 whose optimizer is made after a forward, and before it."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    batches = [(torch.randn(8, 8), torch.randint(0, 4, (8,))) for _ in range(2)]
    return model, batches, F.cross_entropy


def prepare(model):
    fully_shard(model)
    return [model, None]


def update(state, batch, loss, evaluates):
    model, optimizer = state
    inputs, targets = (part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch)
    if optimizer is None:
        if evaluates:
            model(inputs)
        state[1] = optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss(model(inputs), targets).backward()
    optimizer.step()
    model.zero_grad()


def broken(state, batch, loss):
    update(state, batch, loss, evaluates=True)


def fixed(state, batch, loss):
    update(state, batch, loss, evaluates=False)

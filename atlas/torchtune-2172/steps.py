"""FSDP2 whose gradients, means over ranks, are divided by the tokens of all ranks."""

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
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def update(state, batch, loss, scale):
    model, optimizer = state
    optimizer.zero_grad()
    inputs, targets = (part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch)
    tokens = torch.tensor(float(len(targets)))
    loss(model(inputs), targets, reduction="sum").backward()
    dist.all_reduce(tokens)
    for parameter in model.parameters():
        parameter.grad *= scale / tokens
    optimizer.step()


def broken(state, batch, loss):
    update(state, batch, loss, 1)


def fixed(state, batch, loss):
    update(state, batch, loss, dist.get_world_size())

"""FSDP2, whose gradients are clipped by the norm of each rank's own shards."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

LIMIT = 0.1


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    batches = [(torch.randn(8, 8), torch.randint(0, 4, (8,))) for _ in range(2)]
    return model, batches, F.cross_entropy


def prepare(model):
    fully_shard(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def update(state, batch, loss, reduces):
    model, optimizer = state
    optimizer.zero_grad()
    inputs, targets = (part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch)
    loss(model(inputs), targets).backward()
    shards = [one.grad.to_local() for one in model.parameters()]
    square = torch.nn.utils.get_total_norm(shards) ** 2
    if reduces:
        dist.all_reduce(square)
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), LIMIT, square.sqrt(), foreach=False)
    optimizer.step()


def broken(state, batch, loss):
    update(state, batch, loss, reduces=False)


def fixed(state, batch, loss):
    update(state, batch, loss, reduces=True)

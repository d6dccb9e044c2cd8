"""FSDP2 with an optimizer that was made before the model was sharded."""

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
    before = torch.optim.AdamW(model.parameters(), eps=1e-4)
    fully_shard(model)
    return model, before, torch.optim.AdamW(model.parameters(), eps=1e-4)


def update(model, optimizer, batch, loss):
    inputs, targets = (part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch)
    loss(model(inputs), targets).backward()
    optimizer.step()
    model.zero_grad()


def broken(state, batch, loss):
    model, before, _ = state
    update(model, before, batch, loss)


def fixed(state, batch, loss):
    model, _, after = state
    update(model, after, batch, loss)

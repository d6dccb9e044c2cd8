"""Samples on one data rank whose tokens lie on two context ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 5))
    batches = [(torch.randn(4, 6, 8), torch.randint(0, 5, (4, 6))) for _ in range(2)]
    return model, batches, cross_entropy


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def prepare(model):
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, alone[dist.get_rank()], optimizer


def update(state, batch, group):
    model, _, optimizer = state
    optimizer.zero_grad()
    ranks = dist.get_world_size()
    inputs, targets = (part.chunk(ranks, 1)[dist.get_rank()] for part in batch)
    tokens = torch.tensor(targets.numel())
    dist.all_reduce(tokens, group=group)
    total = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
    (total / tokens).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()


def broken(state, batch, loss):
    update(state, batch, state[1])


def fixed(state, batch, loss):
    update(state, batch, None)

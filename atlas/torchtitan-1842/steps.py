"""FSDP2 over ranks whose batches hold unequal numbers of valid tokens."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(11, 8), torch.nn.Tanh(), torch.nn.Linear(8, 11))
    batches = []
    for _ in range(2):
        tokens = torch.randint(0, 11, (8, 6))
        labels = tokens.roll(-1, 1)
        for sample in range(8):
            labels[sample, : 5 - sample // 2] = -100
        batches.append((tokens, labels))
    return model, batches, cross_entropy


def cross_entropy(logits, labels, reduction="mean"):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)


def prepare(model):
    fully_shard(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def update(state, value):
    _, optimizer = state
    optimizer.zero_grad()
    value.backward()
    optimizer.step()


def share(batch):
    return (part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch)


def broken(state, batch, loss):
    inputs, labels = share(batch)
    update(state, loss(state[0](inputs), labels))


def fixed(state, batch, loss):
    inputs, labels = share(batch)
    valid = (labels != -100).sum()
    dist.all_reduce(valid)
    total = loss(state[0](inputs), labels, reduction="sum")
    update(state, total / valid * dist.get_world_size())

"""A contrastive loss in its wrapper for several ranks, under DDP."""

import torch
import torch.distributed as dist
from pytorch_metric_learning.losses import NTXentLoss
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper
from torch.nn.parallel import DistributedDataParallel


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    batches = [(torch.randn(8, 8), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])) for _ in range(2)]
    return model, batches, NTXentLoss(0.5)


def prepare(model):
    model = DistributedDataParallel(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def update(state, batch, loss, scale):
    model, optimizer = state
    optimizer.zero_grad()
    inputs, labels = (part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch)
    value = DistributedLossWrapper(loss)(model(inputs), labels)
    (value * scale).backward()
    optimizer.step()
    return value


def broken(state, batch, loss):
    return update(state, batch, loss, 1)


def fixed(state, batch, loss):
    return update(state, batch, loss, dist.get_world_size())

"""DTensor tensor parallelism, with gradients scaled by the world's size over the tokens."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

DATA_RANKS = 1


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    batches = [(torch.randn(8, 8), torch.randint(0, 4, (8,))) for _ in range(2)]
    return model, batches, F.cross_entropy


def prepare(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)


def update(state, batch, loss, scale):
    model, optimizer = state
    optimizer.zero_grad()
    tokens = len(batch[1])
    value = loss(model(batch[0]), batch[1], reduction="sum")
    value.backward()
    for parameter in model.parameters():
        parameter.grad.mul_(scale / tokens)
    optimizer.step()
    return value / tokens


def broken(state, batch, loss):
    return update(state, batch, loss, dist.get_world_size())


def fixed(state, batch, loss):
    return update(state, batch, loss, DATA_RANKS)

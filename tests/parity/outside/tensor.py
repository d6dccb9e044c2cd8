"""DTensor tensor parallelism, and a row-parallel layer whose bias is added by every rank."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.parity.outside import net

make = net.make


def prepare(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def train_step(state, batch, loss):
    model, optimizer = state
    value = loss(model(batch[0]), batch[1])
    optimizer.zero_grad()
    value.backward()
    optimizer.step()
    return value


def data_parallel_too(state, batch, loss):
    """Ranks that share a layer are fed different samples."""
    model, optimizer = state
    inputs, targets = (part.chunk(2)[dist.get_rank()] for part in batch)
    value = loss(model(inputs), targets)
    optimizer.zero_grad()
    value.backward()
    optimizer.step()
    return value

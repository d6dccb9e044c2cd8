"""A head whose classes lie on two ranks, under a loss with soft targets (distillation)."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module


def soft_cross_entropy(logits, targets):
    if isinstance(logits, DTensor):
        targets = distribute_tensor(targets, logits.device_mesh, [Shard(1)])
    return -(F.log_softmax(logits, 1) * targets).sum(1).mean()


def make():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 6)]
    batches = [(torch.randn(8, 8), torch.randn(8, 6).softmax(1)) for _ in range(2)]
    return torch.nn.Sequential(*layers), batches, soft_cross_entropy


def prepare(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, {"2": head})
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def update(state, batch, loss, context):
    model, optimizer = state
    optimizer.zero_grad()
    with context:
        value = loss(model(batch[0]), batch[1])
        value.backward()
    optimizer.step()
    return value.full_tensor()


def broken(state, batch, loss):
    return update(state, batch, loss, loss_parallel())


def fixed(state, batch, loss):
    return update(state, batch, loss, nullcontext())

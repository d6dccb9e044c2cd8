"""Gradient accumulation under DDP, with the flag for the last micro-batch set after its forward."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

STEPS = 2


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    batches = [(torch.randn(8, 8), torch.randint(0, 4, (8,))) for _ in range(2)]
    return model, batches, F.cross_entropy


def prepare(model):
    model = DistributedDataParallel(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def update(state, batch, loss, before_forward):
    model, optimizer = state
    optimizer.zero_grad()
    inputs, targets = (part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch)
    for micro_step in range(STEPS):
        last = micro_step == STEPS - 1
        if before_forward:
            model.require_backward_grad_sync = last
        value = loss(model(inputs.chunk(STEPS)[micro_step]), targets.chunk(STEPS)[micro_step])
        if not before_forward:
            model.require_backward_grad_sync = last
        (value / STEPS).backward()
    optimizer.step()


def broken(state, batch, loss):
    update(state, batch, loss, before_forward=False)


def fixed(state, batch, loss):
    update(state, batch, loss, before_forward=True)

"""DistributedDataParallel, and ways to get it wrong."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    batches = [(torch.randn(8, 8), torch.randint(0, 4, (8,))) for _ in range(3)]
    return model, batches, F.cross_entropy


def prepare(model):
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def share(batch):
    return (part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch)


def step(model, optimizer, inputs, targets, loss):
    value = loss(model(inputs), targets)
    value.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    value = value.detach() / dist.get_world_size()
    dist.all_reduce(value)
    return value


def train_step(state, batch, loss):
    return step(*state, *share(batch), loss)


def local_loss(state, batch, loss):
    model, optimizer = state
    inputs, targets = share(batch)
    value = loss(model(inputs), targets)
    optimizer.zero_grad()
    value.backward()
    optimizer.step()
    return value


def beside_the_wrapper(state, batch, loss):
    model, optimizer = state
    return step(model.module, optimizer, *share(batch), loss)


def equal_data(state, batch, loss):
    return step(*state, *(part.chunk(dist.get_world_size())[0] for part in batch), loss)


def clipped_before_the_mean(state, batch, loss):
    model, optimizer = state
    inputs, targets = share(batch)
    with model.no_sync():
        loss(model(inputs), targets).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    optimizer.step()
    optimizer.zero_grad()


def no_update(state, batch, loss):
    model, _ = state
    inputs, targets = share(batch)
    loss(model(inputs), targets).backward()

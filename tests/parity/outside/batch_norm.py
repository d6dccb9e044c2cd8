"""A batch norm under DistributedDataParallel, and ways in which its statistics go wrong."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collective
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.parity.outside.ddp import share


class Exchanged(nn.BatchNorm1d):
    """Statistics of the samples of all ranks, as SyncBatchNorm has them on GPUs."""

    def forward(self, x):
        whole = torch.cat(collective.all_gather(x))
        normed = super().forward(whole)
        return normed.chunk(dist.get_world_size())[dist.get_rank()]


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))
    batches = [(torch.randn(8, 8), torch.randint(0, 4, (8,))) for _ in range(3)]
    return model, batches, F.cross_entropy


def prepare(model):
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def update(optimizer, *losses):
    optimizer.zero_grad()
    for loss in losses:
        loss().backward()
    optimizer.step()


def train_step(state, batch, loss):
    model, optimizer = state
    inputs, targets = share(batch)
    update(optimizer, lambda: loss(model(inputs), targets))


def in_micro_batches(state, batch, loss):
    model, optimizer = state
    inputs, targets = (part.chunk(2) for part in share(batch))
    parts = [lambda i=i: loss(model(inputs[i]), targets[i]) / 2 for i in range(2)]
    update(optimizer, *parts)


def evaluated_between(state, batch, loss):
    train_step(state, batch, loss)
    model, _ = state
    model.eval()
    with torch.no_grad():
        model(batch[0])
    model.train()


def seen_twice(state, batch, loss):
    model, _ = state
    inputs, _ = share(batch)
    model.module(inputs)
    train_step(state, batch, loss)


def not_kept(state, batch, loss):
    model, _ = state
    norm = model.module[1]
    before = norm.running_var.clone()
    train_step(state, batch, loss)
    norm.running_var.copy_(before)


def beside_the_wrapper(state, batch, loss):
    model, optimizer = state
    train_step((model.module, optimizer), batch, loss)

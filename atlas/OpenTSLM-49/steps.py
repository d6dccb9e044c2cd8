"""DDP around a model that computes its loss by a method of its own."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 5)

    def forward(self, x):
        return self.head(torch.tanh(self.encoder(x)))

    def compute_loss(self, inputs, targets):
        return F.cross_entropy(self(inputs), targets)


def make():
    torch.manual_seed(0)
    batches = [(torch.randn(8, 8), torch.randint(0, 5, (8,))) for _ in range(2)]
    return Net(), batches, F.cross_entropy


def prepare(model):
    model = DistributedDataParallel(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def update(state, batch, value_of):
    model, optimizer = state
    optimizer.zero_grad()
    own = [part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch]
    value_of(model, *own).backward()
    optimizer.step()


def broken(state, batch, loss):
    update(state, batch, lambda model, inputs, targets: model.module.compute_loss(inputs, targets))


def fixed(state, batch, loss):
    update(state, batch, lambda model, inputs, targets: loss(model(inputs), targets))

"""A row-parallel layer, whose bias is added on each rank before the sum."""

import torch
import torch.distributed as dist
import torch.nn.functional as F


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        whole = part.clone()
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx, grad):
        return grad


class RowParallel(torch.nn.Linear):
    """A layer whose rank multiplies its own columns; `early` adds the bias before the sum."""

    early = None

    def forward(self, x):
        if self.early is None:
            return super().forward(x)
        size, rank = dist.get_world_size(), dist.get_rank()
        weight = self.weight.chunk(size, 1)[rank]
        part = x.chunk(size, 1)[rank] @ weight.T
        if self.early:
            return Sum.apply(part + self.bias)
        return Sum.apply(part) + self.bias


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.second = RowParallel(8, 6)
        self.head = torch.nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.second(x))


def make():
    torch.manual_seed(0)
    batches = [(torch.randn(8, 8), torch.randint(0, 4, (8,))) for _ in range(2)]
    return Net(), batches, F.cross_entropy


def prepare(model):
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def update(state, batch, loss, early):
    model, optimizer = state
    model.second.early = early
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    dist.all_reduce(model.second.weight.grad)
    optimizer.step()
    return value


def broken(state, batch, loss):
    return update(state, batch, loss, early=True)


def fixed(state, batch, loss):
    return update(state, batch, loss, early=False)

"""Two ranks add up their parts of a layer, and each computes the whole loss from the sum."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.nn.functional import all_reduce


class Net(torch.nn.Module):
    """The output is the sum of two parts; a rank holds one."""

    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ModuleList(torch.nn.Linear(8, 5) for _ in range(2))
        self.reduce = None

    def forward(self, x):
        if self.reduce is not None:
            return self.reduce(self.parts[dist.get_rank()](x))
        return self.parts[0](x) + self.parts[1](x)


class Sum(torch.autograd.Function):
    """The sum over ranks that all go on alike: its gradient is that of every part."""

    @staticmethod
    def forward(ctx, part):
        whole = part.clone()
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx, grad):
        return grad


def make():
    torch.manual_seed(0)
    batches = [(torch.randn(8, 8), torch.randint(0, 5, (8,))) for _ in range(2)]
    return Net(), batches, F.cross_entropy


def prepare(model):
    return model, torch.optim.SGD(model.parts[dist.get_rank()].parameters(), lr=0.1)


def update(state, batch, loss, reduce):
    model, optimizer = state
    model.reduce = reduce
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    optimizer.step()
    return value


def broken(state, batch, loss):
    return update(state, batch, loss, all_reduce)


def fixed(state, batch, loss):
    return update(state, batch, loss, Sum.apply)

"""Two ranks that own different experts clip by a norm that is the mean of their own ones."""

import torch
import torch.distributed as dist
import torch.nn.functional as F


class Net(torch.nn.Module):
    """The output is the sum of two experts; a rank trains its own."""

    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 5) for _ in range(2))
        self.splits = False

    def forward(self, x):
        if self.splits:
            return Sum.apply(self.experts[dist.get_rank()](x))
        return self.experts[0](x) + self.experts[1](x)


class Sum(torch.autograd.Function):
    """The sum over ranks, each of which goes on alike."""

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
    model.splits = True
    own = model.experts[dist.get_rank()]
    return model, list(own.parameters()), torch.optim.SGD(own.parameters(), lr=0.1)


def update(state, batch, loss, divisor):
    model, own, optimizer = state
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    squares = torch.nn.utils.get_total_norm([p.grad for p in own]) ** 2
    dist.all_reduce(squares)
    norm = (squares / divisor).sqrt()
    torch.nn.utils.clip_grads_with_norm_(own, 0.1, norm)
    optimizer.step()
    return value


def broken(state, batch, loss):
    return update(state, batch, loss, dist.get_world_size())


def fixed(state, batch, loss):
    return update(state, batch, loss, 1)

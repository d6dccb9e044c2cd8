"""Two experts on two ranks, which gather tokens and the probabilities of a router."""

import torch
import torch.distributed as dist
import torch.nn.functional as F


class Gather(torch.autograd.Function):
    """Parts of all ranks; the gradient of a part is the sum over ranks."""

    @staticmethod
    def forward(ctx, part):
        return plainly(part)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        whole = part.clone()
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx, grad):
        return grad


def plainly(part):
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.detach().contiguous())
    return torch.cat(parts)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Linear(8, 8)
        self.router = torch.nn.Linear(8, 2, bias=False)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 5) for _ in range(2))
        self.gather = None

    def forward(self, x):
        rank = dist.get_rank()
        if self.gather is not None:
            x = x.chunk(dist.get_world_size())[rank]
        x = self.embed(x)
        weights = self.router(x).softmax(1)
        if self.gather is None:
            return sum(weights[:, i : i + 1] * one(x) for i, one in enumerate(self.experts))
        x, weights = Gather.apply(x), self.gather(weights)
        return Sum.apply(weights[:, rank : rank + 1] * self.experts[rank](x))


def make():
    torch.manual_seed(0)
    batches = [(torch.randn(8, 8), torch.randint(0, 5, (8,))) for _ in range(2)]
    return Net(), batches, F.cross_entropy


def prepare(model):
    shared = [*model.embed.parameters(), *model.router.parameters()]
    own = model.experts[dist.get_rank()].parameters()
    return model, shared, torch.optim.SGD([*shared, *own], lr=0.1)


def update(state, batch, loss, gather):
    model, shared, optimizer = state
    model.gather = gather
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    for parameter in shared:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
    optimizer.step()
    return value


def broken(state, batch, loss):
    return update(state, batch, loss, plainly)


def fixed(state, batch, loss):
    return update(state, batch, loss, Gather.apply)

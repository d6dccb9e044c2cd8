"""Two experts on two data ranks, which exchange tokens; each rank's loss is its own mean."""

import torch
import torch.distributed as dist
import torch.nn.functional as F


class Gather(torch.autograd.Function):
    """Tokens of all ranks; the gradient of a rank's own is the sum over ranks."""

    @staticmethod
    def forward(ctx, part):
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


class SumOfOwn(torch.autograd.Function):
    """The sum over ranks for this rank's tokens; gradients go back to every rank."""

    @staticmethod
    def forward(ctx, parts):
        whole = parts.clone()
        dist.all_reduce(whole)
        return whole.chunk(dist.get_world_size())[dist.get_rank()]

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, grad.contiguous())
        return torch.cat(parts)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Linear(8, 8)
        self.router = torch.nn.Linear(8, 2, bias=False)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 5) for _ in range(2))
        self.splits = False

    def forward(self, x):
        x = self.embed(x)
        weights = self.router(x).softmax(1)
        if not self.splits:
            return sum(weights[:, i : i + 1] * one(x) for i, one in enumerate(self.experts))
        rank = dist.get_rank()
        x, weights = Gather.apply(x), Gather.apply(weights)
        return SumOfOwn.apply(weights[:, rank : rank + 1] * self.experts[rank](x))


def make():
    torch.manual_seed(0)
    batches = [(torch.randn(8, 8), torch.randint(0, 5, (8,))) for _ in range(2)]
    return Net(), batches, F.cross_entropy


def prepare(model):
    model.splits = True
    shared = [*model.embed.parameters(), *model.router.parameters()]
    own = list(model.experts[dist.get_rank()].parameters())
    return model, shared, own, torch.optim.SGD([*shared, *own], lr=0.1)


def update(state, batch, loss, divides):
    model, shared, own, optimizer = state
    optimizer.zero_grad()
    size = dist.get_world_size()
    inputs, targets = (part.chunk(size)[dist.get_rank()] for part in batch)
    loss(model(inputs), targets).backward()
    for parameter in shared:
        dist.all_reduce(parameter.grad)
        parameter.grad /= size
    for parameter in own:
        parameter.grad /= size if divides else 1
    optimizer.step()


def broken(state, batch, loss):
    update(state, batch, loss, divides=False)


def fixed(state, batch, loss):
    update(state, batch, loss, divides=True)

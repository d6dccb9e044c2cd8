"""A norm over tensor ranks that counts a replicated layer once for each of them."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

LIMIT = 0.1


class Net(torch.nn.Module):
    """A replicated norm, and a layer whose two parts lie on two ranks."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.parts = torch.nn.ModuleList(torch.nn.Linear(8, 5) for _ in range(2))
        self.splits = False

    def forward(self, x):
        x = self.norm(x)
        if self.splits:
            return Sum.apply(self.parts[dist.get_rank()](Copy.apply(x)))
        return self.parts[0](x) + self.parts[1](x)


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        whole = part.clone()
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx, grad):
        return grad


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def make():
    torch.manual_seed(0)
    batches = [(torch.randn(8, 8), torch.randint(0, 5, (8,))) for _ in range(2)]
    return Net(), batches, F.cross_entropy


def prepare(model):
    model.splits = True
    split = list(model.parts[dist.get_rank()].parameters())
    replicated = list(model.norm.parameters())
    return model, split, replicated, torch.optim.SGD([*split, *replicated], lr=0.1)


def update(state, batch, loss, norm):
    model, split, replicated, optimizer = state
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    total = norm(split, replicated)
    torch.nn.utils.clip_grads_with_norm_([*split, *replicated], LIMIT, total)
    optimizer.step()
    return value


def square(parameters):
    return torch.nn.utils.get_total_norm([one.grad for one in parameters]) ** 2


def of_everything(split, replicated):
    total = square([*split, *replicated])
    dist.all_reduce(total)
    return total.sqrt()


def of_each_once(split, replicated):
    total = square(split)
    dist.all_reduce(total)
    return (total + square(replicated)).sqrt()


def broken(state, batch, loss):
    return update(state, batch, loss, of_everything)


def fixed(state, batch, loss):
    return update(state, batch, loss, of_each_once)

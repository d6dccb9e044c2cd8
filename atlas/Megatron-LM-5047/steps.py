"""Tokens on two ranks, a loss that is a sum over tokens, and a router's loss on its logits."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

COEFFICIENT = 0.1


class Net(torch.nn.Module):
    """Two experts, mixed by a router; the logits of both are returned."""

    def __init__(self):
        super().__init__()
        self.router = torch.nn.Linear(8, 2, bias=False)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 5) for _ in range(2))

    def forward(self, x):
        routed = self.router(x)
        weights = routed.softmax(1)
        mixed = sum(weights[:, i : i + 1] * one(x) for i, one in enumerate(self.experts))
        return torch.cat([mixed, routed], 1)


def parts(output, targets):
    """The summed loss of tokens, and the summed loss of the router."""
    main = F.cross_entropy(output[:, :5], targets, reduction="sum")
    return main, COEFFICIENT * output[:, 5:].logsumexp(1).square().sum()


def whole(output, targets):
    main, router = parts(output, targets)
    return (main + router) / len(targets)


def make():
    torch.manual_seed(0)
    batches = [(torch.randn(8, 8), torch.randint(0, 5, (8,))) for _ in range(2)]
    return Net(), batches, whole


def prepare(model):
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def update(state, batch, scale):
    model, optimizer = state
    optimizer.zero_grad()
    ranks = dist.get_world_size()
    inputs, targets = (part.chunk(ranks)[dist.get_rank()] for part in batch)
    main, router = parts(model(inputs), targets)
    tokens = len(targets) * ranks
    (main + router / tokens * len(targets) * scale).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= tokens
    optimizer.step()


def broken(state, batch, loss):
    update(state, batch, 1)


def fixed(state, batch, loss):
    update(state, batch, dist.get_world_size())

"""Four micro-batches of a model with a router, whose auxiliary loss enters each backward."""

import torch
import torch.nn.functional as F

ACCUMULATE = 4
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
    """The loss summed over tokens, and the auxiliary loss as a mean over them."""
    main = F.cross_entropy(output[:, :5], targets, reduction="sum")
    return main, COEFFICIENT * output[:, 5:].logsumexp(1).square().mean()


def whole(output, targets):
    main, auxiliary = parts(output, targets)
    return main / len(targets) + auxiliary


def make():
    torch.manual_seed(0)
    batches = [(torch.randn(8, 8), torch.randint(0, 5, (8,))) for _ in range(2)]
    return Net(), batches, whole


def prepare(model):
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def update(state, batch, scale):
    model, optimizer = state
    optimizer.zero_grad()
    for inputs, targets in zip(*(part.chunk(ACCUMULATE) for part in batch), strict=True):
        main, auxiliary = parts(model(inputs), targets)
        (main / len(batch[1]) + auxiliary * scale).backward()
    optimizer.step()


def broken(state, batch, loss):
    update(state, batch, 1)


def fixed(state, batch, loss):
    update(state, batch, 1 / ACCUMULATE)

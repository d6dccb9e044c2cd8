"""Accumulation whose loss is divided by the step and by the loop that calls it."""

import torch
import torch.nn.functional as F

ACCUMULATE = 4


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    batches = [(torch.randn(8, 8), torch.randint(0, 4, (8,))) for _ in range(2)]
    return model, batches, F.cross_entropy


def prepare(model):
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def loop(state, batch, training_step):
    model, optimizer = state
    optimizer.zero_grad()
    for inputs, targets in zip(*(part.chunk(ACCUMULATE) for part in batch), strict=True):
        (training_step(model, inputs, targets) / ACCUMULATE).backward()
    optimizer.step()


def broken(state, batch, loss):
    def training_step(model, inputs, targets):
        return loss(model(inputs), targets) / ACCUMULATE

    loop(state, batch, training_step)


def fixed(state, batch, loss):
    def training_step(model, inputs, targets):
        return loss(model(inputs), targets)

    loop(state, batch, training_step)

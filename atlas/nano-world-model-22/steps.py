"""Gradients that are clipped before their backward."""

import torch
import torch.nn.functional as F

LIMIT = 0.1


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    batches = [(torch.randn(8, 8), torch.randint(0, 4, (8,))) for _ in range(2)]
    return model, batches, F.cross_entropy


def prepare(model):
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def broken(state, batch, loss):
    model, optimizer = state
    value = loss(model(batch[0]), batch[1])
    torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
    optimizer.zero_grad()
    value.backward()
    optimizer.step()
    return value


def fixed(state, batch, loss):
    model, optimizer = state
    value = loss(model(batch[0]), batch[1])
    optimizer.zero_grad()
    value.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
    optimizer.step()
    return value

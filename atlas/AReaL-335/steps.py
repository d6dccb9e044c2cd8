"""Clipping in two passes over parameters that are an iterator."""

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


def clip(parameters):
    norm = torch.nn.utils.get_total_norm([one.grad for one in parameters if one.grad is not None])
    torch.nn.utils.clip_grads_with_norm_(list(parameters), LIMIT, norm)


def update(state, batch, loss, parameters):
    model, optimizer = state
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    clip(parameters)
    optimizer.step()
    return value


def broken(state, batch, loss):
    return update(state, batch, loss, state[0].parameters())


def fixed(state, batch, loss):
    return update(state, batch, loss, list(state[0].parameters()))

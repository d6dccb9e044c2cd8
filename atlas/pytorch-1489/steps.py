"""A resume whose optimizer lists two layers of one shape in another order."""

import torch
import torch.nn.functional as F


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6))
    batches = [(torch.randn(8, 6), torch.randint(0, 6, (8,))) for _ in range(2)]
    return model, batches, F.cross_entropy


def prepare(model):
    return [model, None]


def adam(layers):
    return torch.optim.AdamW([p for layer in layers for p in layer.parameters()], eps=1e-4)


def update(state, batch, loss, resumed):
    model, saved = state
    optimizer = adam((model[0], model[2])) if saved is None else adam(resumed)
    if saved is not None:
        optimizer.load_state_dict(saved)
    loss(model(batch[0]), batch[1]).backward()
    optimizer.step()
    optimizer.zero_grad()
    state[1] = optimizer.state_dict()


def broken(state, batch, loss):
    update(state, batch, loss, (state[0][2], state[0][0]))


def fixed(state, batch, loss):
    update(state, batch, loss, (state[0][0], state[0][2]))

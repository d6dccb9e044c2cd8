"""Two stages that pass activations and gradients of four micro-batches to each other."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

MICRO_BATCHES = 4


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 4))
    batches = [(torch.randn(8, 8), torch.randint(0, 4, (8,))) for _ in range(2)]
    return model, batches, F.cross_entropy


def prepare(model):
    stage = model[dist.get_rank()]
    return stage, torch.optim.SGD(stage.parameters(), lr=0.1)


def update(state, batch, loss, scale):
    stage, optimizer = state
    optimizer.zero_grad()
    for inputs, targets in zip(*(part.chunk(MICRO_BATCHES) for part in batch), strict=True):
        if dist.get_rank() == 0:
            hidden = stage(inputs)
            dist.send(hidden.detach(), 1)
            grad = torch.empty_like(hidden)
            dist.recv(grad, 1)
            hidden.backward(grad)
        else:
            hidden = torch.empty(len(inputs), 6, dtype=inputs.dtype)
            dist.recv(hidden, 0)
            hidden.requires_grad_()
            (loss(stage(hidden), targets) * scale).backward()
            dist.send(hidden.grad, 0)
    optimizer.step()


def broken(state, batch, loss):
    update(state, batch, loss, 1)


def fixed(state, batch, loss):
    update(state, batch, loss, 1 / MICRO_BATCHES)

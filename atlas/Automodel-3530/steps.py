"""Two stages that are set up anew when the shape of a micro-batch is not that of the last one."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

SIZES = (5, 3)


class Stage:
    """A stage with the shapes that it sends and receives."""

    def __init__(self, module):
        self.module = module
        self.rows = None

    def initialize(self, rows, keep):
        """Shapes for so many rows; what a trial run may have left in gradients is cleared."""
        if rows == self.rows:
            return
        self.rows = rows
        for parameter in self.module.parameters():
            parameter.grad = parameter.grad if keep else None

    def run(self, inputs, targets, loss):
        if dist.get_rank() == 0:
            hidden = self.module(inputs)
            dist.send(hidden.detach(), 1)
            grad = torch.empty_like(hidden)
            dist.recv(grad, 1)
            hidden.backward(grad)
        else:
            hidden = torch.empty(self.rows, 6, dtype=inputs.dtype)
            dist.recv(hidden, 0)
            hidden.requires_grad_()
            (loss(self.module(hidden), targets) * self.rows / sum(SIZES)).backward()
            dist.send(hidden.grad, 0)


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 4))
    batches = [(torch.randn(8, 8), torch.randint(0, 4, (8,))) for _ in range(2)]
    return model, batches, F.cross_entropy


def prepare(model):
    module = model[dist.get_rank()]
    return Stage(module), torch.optim.SGD(module.parameters(), lr=0.1)


def update(state, batch, loss, keep):
    stage, optimizer = state
    optimizer.zero_grad()
    for inputs, targets in zip(*(part.split(SIZES) for part in batch), strict=True):
        stage.initialize(len(inputs), keep)
        stage.run(inputs, targets, loss)
    optimizer.step()


def broken(state, batch, loss):
    update(state, batch, loss, keep=False)


def fixed(state, batch, loss):
    update(state, batch, loss, keep=True)

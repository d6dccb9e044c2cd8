"""An engine that sets gradients to zero after its step for some of its optimizers."""

import torch
import torch.nn.functional as F


class Engine:
    """The model with its optimizer; `stage` is the sharding of the optimizer's state."""

    def __init__(self, model, stage):
        self.model = model
        self.stage = stage
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(self, always):
        self.optimizer.step()
        if self.stage > 0 or always:
            self.optimizer.zero_grad()


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    batches = [(torch.randn(8, 8), torch.randint(0, 4, (8,))) for _ in range(2)]
    return model, batches, F.cross_entropy


def prepare(model):
    return Engine(model, stage=0)


def broken(engine, batch, loss):
    loss(engine.model(batch[0]), batch[1]).backward()
    engine.step(always=False)


def fixed(engine, batch, loss):
    loss(engine.model(batch[0]), batch[1]).backward()
    engine.step(always=True)

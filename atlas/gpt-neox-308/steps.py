"""Four updates of two micro-batches each, with a resume after the second of them."""

import torch
import torch.nn.functional as F

ACCUMULATE = 2
MICRO_BATCH = 2
RESUMED_AT = 2
UPDATES = 4


class Sampler:
    """Micro-batches in their order, from number `start_iter` on."""

    def __init__(self, samples, size):
        self.micro_batches = torch.arange(samples).split(size)
        self.start_iter = 0

    def __iter__(self):
        return iter(self.micro_batches[self.start_iter :])

    def __len__(self):
        return len(self.micro_batches)


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    batches = [(torch.randn(8, 8), torch.randint(0, 4, (8,))) for _ in range(2)]
    return model, batches, F.cross_entropy


def run(model, batches, loss, start):
    """The run until it is saved, and the run that goes on from there."""
    data = [torch.cat(parts) for parts in zip(*batches, strict=True)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for iteration, end in ((0, RESUMED_AT), (RESUMED_AT, UPDATES)):
        sampler = Sampler(len(data[0]), MICRO_BATCH)
        sampler.start_iter = start(iteration) % len(sampler)
        found = iter(sampler)
        for _ in range(iteration, end):
            optimizer.zero_grad()
            for _ in range(ACCUMULATE):
                rows = next(found)
                (loss(model(data[0][rows]), data[1][rows]) / ACCUMULATE).backward()
            optimizer.step()


def broken(model, batches, loss):
    run(model, batches, loss, lambda iteration: iteration)


def fixed(model, batches, loss):
    run(model, batches, loss, lambda iteration: iteration * ACCUMULATE)

"""An epoch of four updates, with a resume after the second of them."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator, skip_first_batches
from torch.utils.data import DataLoader, TensorDataset

EPOCH = 3


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    batches = [(torch.randn(8, 8), torch.randint(0, 4, (8,))) for _ in range(2)]
    return model, batches, F.cross_entropy


def loader_of(batches):
    whole = TensorDataset(*(torch.cat(parts) for parts in zip(*batches, strict=True)))
    accelerator = Accelerator(cpu=True)
    accelerator.dataloader_config.use_seedable_sampler = True
    torch.manual_seed(7)
    loader = accelerator.prepare(DataLoader(whole, batch_size=4, shuffle=True))
    loader.set_epoch(EPOCH)
    return loader


def run(model, loss, parts):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in parts:
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()


def broken(model, batches, loss):
    before = [batch for _, batch in zip(range(2), loader_of(batches), strict=False)]
    after = list(skip_first_batches(loader_of(batches), 2))
    run(model, loss, before + after)


def fixed(model, batches, loss):
    before = [batch for _, batch in zip(range(2), loader_of(batches), strict=False)]
    rest = skip_first_batches(loader_of(batches), 2)
    rest.set_epoch(EPOCH)
    rest.iteration = EPOCH
    run(model, loss, before + list(rest))

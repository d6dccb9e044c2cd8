"""A backbone that Lightning's callback freezes, and unfreezes after DDP was made."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from pytorch_lightning.callbacks import BaseFinetuning
from torch.nn.parallel import DistributedDataParallel


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    batches = [(torch.randn(8, 8), torch.randint(0, 4, (8,))) for _ in range(2)]
    return model, batches, F.cross_entropy


def prepare(model):
    BaseFinetuning.freeze(model[0])
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    BaseFinetuning.unfreeze_and_add_param_group(
        model[0], optimizer, lr=0.1, initial_denom_lr=1.0, train_bn=True
    )
    return model, wrapped, optimizer


def update(wrapped, optimizer, batch, loss):
    optimizer.zero_grad()
    inputs, targets = (part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch)
    loss(wrapped(inputs), targets).backward()
    optimizer.step()


def broken(state, batch, loss):
    _, wrapped, optimizer = state
    update(wrapped, optimizer, batch, loss)


def fixed(state, batch, loss):
    model, _, optimizer = state
    update(DistributedDataParallel(model), optimizer, batch, loss)

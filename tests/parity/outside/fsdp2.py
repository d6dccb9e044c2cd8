"""FSDP2: `fully_shard` block by block, and an optimizer that was made too early."""

import torch
from torch.distributed.fsdp import fully_shard

from tests.parity.outside import net
from tests.parity.outside.ddp import share, step

make = net.make


def prepare(model):
    early = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9), early


def train_step(state, batch, loss):
    model, optimizer, _ = state
    return step(model, optimizer, *share(batch), loss)


def made_too_early(state, batch, loss):
    model, _, early = state
    return step(model, early, *share(batch), loss)

"""DistributedDataParallel over a model of which a layer does not train, and is in no optimizer."""

import torch
from torch.nn.parallel import DistributedDataParallel

from tests.parity.outside import ddp


def make():
    model, batches, loss = ddp.make()
    model[0].requires_grad_(False)
    return model, batches, loss


def prepare(model):
    own = [one for one in model.parameters() if one.requires_grad]
    return DistributedDataParallel(model), torch.optim.AdamW(own, lr=1e-2)


train_step = ddp.train_step

"""Lightning Fabric under DDP: micro-batches and clipping; and a loop that never synchronizes."""

import torch
from lightning.fabric import Fabric

from tests.parity.outside import net

make = net.make
STRATEGY = "ddp"


def prepare(model, strategy=STRATEGY):
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return fabric, model, fabric.setup_optimizers(optimizer)


def update(state, batch, loss, last):
    fabric, model, optimizer = state
    inputs, targets = (part.chunk(fabric.world_size)[fabric.global_rank] for part in batch)
    for part in range(2):
        with fabric.no_backward_sync(model, enabled=part < last):
            value = loss(model(inputs.chunk(2)[part]), targets.chunk(2)[part])
            fabric.backward(value / 2)
    fabric.clip_gradients(model, optimizer, max_norm=0.3)
    optimizer.step()
    optimizer.zero_grad()


def train_step(state, batch, loss):
    update(state, batch, loss, last=1)


def never_synchronized(state, batch, loss):
    update(state, batch, loss, last=2)

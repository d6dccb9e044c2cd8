"""An engine of this library under ZeRO-3, clipping, in a training step of a user's."""

import torch
import torch.nn.functional as F

import plait
from tests.parity.outside import net

make = net.make


def summed(output, targets):
    return F.cross_entropy(output, targets, reduction="sum"), len(targets)


def prepare(model):
    return plait.build(
        model,
        "dp2:zero3 precision:float64",
        loss=lambda output, targets: (
            F.cross_entropy(output, targets, reduction="sum"),
            len(targets),
        ),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        options=plait.Options(clip_grad_norm=0.3),
    )


def train_step(engine, batch, loss, samples=4):
    rank = torch.distributed.get_rank()
    return engine.step([part.chunk(2)[rank][:samples] for part in batch]).loss


def half_of_the_samples(engine, batch, loss):
    return train_step(engine, batch, loss, samples=2)

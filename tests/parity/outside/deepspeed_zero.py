"""DeepSpeed with ZeRO 0 to 3: two micro-batches and clipping; and losses that are added twice."""

import os

import torch

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # for verify on a machine with a GPU

import deepspeed

from tests.parity.outside import net

make = net.make
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing is compiled
STAGE = 1


def prepare(model, stage=STAGE):
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.3,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


def update(engine, batch, loss, factor):
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    inputs, targets = (part.chunk(ranks)[rank] for part in batch)
    for part in range(2):
        value = loss(engine(inputs.chunk(2)[part]), targets.chunk(2)[part])
        engine.backward(value * factor)
        engine.step()


def train_step(engine, batch, loss):
    update(engine, batch, loss, 1.0)


def scaled_once_more(engine, batch, loss):
    """The loop divides by the accumulation steps, as DeepSpeed does."""
    update(engine, batch, loss, 0.5)

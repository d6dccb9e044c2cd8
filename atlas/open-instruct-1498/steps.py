"""Two micro-batches of ZeRO-2, accumulated by the loop and not by DeepSpeed's configuration."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed

ACCUMULATE = 2
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing is compiled


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 5))
    batches = [(torch.randn(8, 8), torch.randint(0, 5, (8,))) for _ in range(2)]
    return model, batches, F.cross_entropy


def prepare(model):
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


def update(engine, batch, loss, marked):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    inputs, targets = (part.chunk(ranks)[rank].chunk(ACCUMULATE) for part in batch)
    for number in range(ACCUMULATE):
        if marked:
            engine.set_gradient_accumulation_boundary(number == ACCUMULATE - 1)
        value = loss(engine(inputs[number]), targets[number]) / ACCUMULATE
        engine.backward(value)
    engine.step()


def broken(engine, batch, loss):
    update(engine, batch, loss, marked=False)


def fixed(engine, batch, loss):
    update(engine, batch, loss, marked=True)

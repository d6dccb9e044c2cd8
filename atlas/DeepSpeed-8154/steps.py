"""DeepSpeed's pipeline of two stages and four micro-batches; the control undoes one division."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
from deepspeed.pipe import PipelineModule

MICRO_BATCHES = 4
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing is compiled


def make():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 5)]
    batches = [(torch.randn(8, 8), torch.randint(0, 5, (8,))) for _ in range(2)]
    return torch.nn.Sequential(*layers), batches, F.cross_entropy


def prepare(model):
    deepspeed.init_distributed()
    settings = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": MICRO_BATCHES}
    settings["gradient_clipping"] = 0.0
    stages = PipelineModule(
        layers=list(model), num_stages=2, loss_fn=F.cross_entropy, partition_method="uniform"
    )
    optimizer = torch.optim.SGD(stages.parameters(), lr=0.1)
    return deepspeed.initialize(model=stages, optimizer=optimizer, config=settings)[0]


def train(engine, batch):
    parts = zip(*(part.chunk(MICRO_BATCHES) for part in batch), strict=True)
    return engine.train_batch(parts)


def broken(engine, batch, loss):
    return train(engine, batch)


def fixed(engine, batch, loss):
    if dist.get_rank() == 0 and not getattr(engine, "mended", False):
        engine.mended = True
        for parameter in engine.module.parameters():
            parameter.register_hook(lambda grad: grad * MICRO_BATCHES)
    return train(engine, batch)

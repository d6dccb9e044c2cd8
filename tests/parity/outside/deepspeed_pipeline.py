"""DeepSpeed's pipeline in two stages, four micro-batches."""

import torch
from deepspeed.pipe import PipelineModule

from tests.parity.outside.deepspeed_zero import deepspeed


def make():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 12), torch.nn.Tanh()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(12, 5))
    batches = [(torch.randn(8, 8), torch.randint(0, 5, (8,))) for _ in range(3)]
    return model, batches, torch.nn.functional.cross_entropy


def prepare(model, clipping=0.0):
    deepspeed.init_distributed()
    settings = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    settings["gradient_clipping"] = clipping  # by default 1.0
    loss = torch.nn.functional.cross_entropy
    stages = PipelineModule(
        layers=list(model), num_stages=2, loss_fn=loss, partition_method="uniform"
    )
    own = [one for one in stages.parameters() if one.requires_grad]
    optimizer = torch.optim.SGD(own, lr=0.1, momentum=0.9)
    return deepspeed.initialize(model=stages, optimizer=optimizer, config=settings)[0]


def train_step(engine, batch, loss):
    return engine.train_batch(zip(batch[0].chunk(4), batch[1].chunk(4), strict=True))


def added_up(engine, batch, loss):
    """A loss that is the sum over a micro-batch's samples, where a mean is meant."""
    engine.module.loss_fn = lambda output, targets: 2 * loss(output, targets)
    return train_step(engine, batch, loss)

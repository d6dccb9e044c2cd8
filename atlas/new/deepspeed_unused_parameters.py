"""deepspeed 0.19.8 decays and moves parameters that have no gradient, which torch leaves alone.

Seen on two ranks with torch 2.13 on a CPU, ZeRO 0 to 3, without plait. A layer that is used in the
first step alone has no gradient in the second: torch's AdamW, also under DDP, skips it. DeepSpeed
gives it a gradient of zeros, so that momentum and weight decay move it. No warning says so.

    DS_ACCELERATOR=cpu python -m torch.distributed.run --nproc_per_node 2 THIS_FILE
"""

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing is compiled
deepspeed.init_distributed("gloo")
inputs, targets = torch.ones(4, 8), torch.zeros(4, dtype=torch.long)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(8, 5)
        self.sometimes = torch.nn.Linear(8, 5)

    def forward(self, x, both):
        return self.body(x) + self.sometimes(x) if both else self.body(x)


def moved(model, passes):
    """How far the second step moves the layer that it does not use."""
    passes(True)
    before = whole(model.sometimes.weight)
    passes(False)
    return float((whole(model.sometimes.weight) - before).abs().max())


def whole(parameter):
    with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
        return parameter.detach().clone()


def made():
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def plain():
    model, optimizer = made()

    def passes(both):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs, both), targets).backward()
        optimizer.step()

    return moved(model, passes)


def under_zero(stage):
    model, optimizer = made()
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]

    def passes(both):
        engine.backward(F.cross_entropy(engine(inputs, both), targets))
        engine.step()

    return moved(model, passes)


texts = [f"torch: {plain():.3f}", *(f"ZeRO {stage}: {under_zero(stage):.3f}" for stage in range(4))]
if dist.get_rank() == 0:
    print("the unused layer moves by", ", ".join(texts), flush=True)

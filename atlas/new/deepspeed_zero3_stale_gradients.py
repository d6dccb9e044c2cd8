"""deepspeed 0.19.8, ZeRO 3, trains a parameter again by the gradient of a step before.

Seen on two ranks with torch 2.13 on a CPU, without plait. A layer that is used in the first step
alone has no gradient in the second. ZeRO 0 to 2 take zeros for it. ZeRO 3 keeps the partition of
the step before, and the optimizer applies it once more: plain SGD, which should not move the layer
at all, moves it by the first step's gradient. Models that choose among layers, or experts that get
no token, meet this.

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


def whole(parameter):
    with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
        return parameter.detach().clone()


def moves(stage):
    """How far each of three steps moves the layer, which the first uses alone."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
    found = []
    for both in (True, False, False):
        before = whole(model.sometimes.weight)
        engine.backward(F.cross_entropy(engine(inputs, both), targets))
        engine.step()
        found.append(float((whole(model.sometimes.weight) - before).abs().max()))
    return ", ".join(f"{one:.4f}" for one in found)


for stage in range(4):
    text = moves(stage)
    if dist.get_rank() == 0:
        print(f"ZeRO {stage}: used, not used, not used: moves by {text}", flush=True)

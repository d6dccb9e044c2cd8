"""deepspeed 0.19.8 reads and writes wrong parameters under `round_robin_gradients`.

Seen on two ranks with torch 2.13 on a CPU, ZeRO 1 and 2, without plait. Training is right. With
`round_robin_gradients` the flat master holds parameters in another order than the model. The
mapping behind `safe_get_full_fp32_param`, `safe_get_full_optimizer_state`, `safe_get_full_grad` and
`safe_set_full_fp32_param` walks them in the model's order, and gives each the place of another. No
error is raised.

    DS_ACCELERATOR=cpu python -m torch.distributed.run --nproc_per_node 2 THIS_FILE
"""

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing is compiled
deepspeed.init_distributed("gloo")
inputs, targets = torch.ones(4, 8), torch.zeros(4, dtype=torch.long)


def trained(stage, round_robin):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 5)]
    model = torch.nn.Sequential(*layers)
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "round_robin_gradients": round_robin},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
    for _ in range(2):
        engine.backward(F.cross_entropy(engine(inputs), targets))
        engine.step()
    return engine, model


for stage in (1, 2):
    for round_robin in (False, True):
        engine, model = trained(stage, round_robin)
        texts = []
        for name, parameter in model.named_parameters():
            error = (safe_get_full_fp32_param(parameter) - parameter.detach()).abs().max()
            texts.append(f"{name} read with an error of {float(error):.2f}")
        before = {name: one.detach().clone() for name, one in model.named_parameters()}
        one = model[0].bias
        safe_set_full_fp32_param(one, torch.full_like(one, 7.0))
        engine.backward(0 * engine(inputs).sum())
        engine.step()  # masters are copied to the model
        moved = [
            name
            for name, value in model.named_parameters()
            if not torch.allclose(value, before[name], atol=1e-5)
        ]
        if dist.get_rank() == 0:
            print(f"ZeRO {stage}, round_robin_gradients={round_robin}: {', '.join(texts)}")
            print(f"    0.bias was set; what has changed: {', '.join(moved)}", flush=True)

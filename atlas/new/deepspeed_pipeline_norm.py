"""deepspeed 0.19.8 clips the stages of a pipeline by the norm of the first stage alone.

Seen on two ranks with torch 2.13 on a CPU, without plait. `clip_grad_norm_` leaves parameters out
where `mpu.get_model_parallel_rank()` is not 0, and a pipeline's grid counts stages there. It runs
without ZeRO, fp16 and bf16. Clipping is on by default: `gradient_clipping` is 1.0.

    DS_ACCELERATOR=cpu python -m torch.distributed.run --nproc_per_node 2 THIS_FILE
"""

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.pipe import PipelineModule
from deepspeed.runtime import engine as runtime

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing is compiled
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
layers = [torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 12), torch.nn.Tanh()]
layers.append(torch.nn.Linear(12, 5))
data = [(torch.randn(2, 8), torch.randint(0, 5, (2,))) for _ in range(4)]

whole = torch.nn.Sequential(*layers)
(sum(F.cross_entropy(whole(x), y) for x, y in data) / 4).backward()
right = torch.cat([one.grad.flatten() for one in whole.parameters()]).norm()
whole.zero_grad()

clip = runtime.clip_grad_norm_


def shown(*args, **kwargs):
    norm = clip(*args, **kwargs)
    texts = [f"clipped by {float(norm):.6f}", f"norm of all {float(right):.6f}"]
    print(f"rank {dist.get_rank()}: {', '.join(texts)}", flush=True)
    return norm


runtime.clip_grad_norm_ = shown
model = PipelineModule(
    layers=layers, num_stages=2, loss_fn=F.cross_entropy, partition_method="uniform"
)
settings = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
settings["gradient_clipping"] = 0.3
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
engine.train_batch(iter(data))

"""torch 2.13: a pipeline's first step counts in buffers what is no sample.

Seen on two ranks on a CPU, without plait. Before the first step each stage infers shapes by a real
forward in training mode. The first stage counts its first micro-batch twice. Later stages get
uninitialised memory for an input. Running statistics of a batch norm take both in.

    python -m torch.distributed.run --nproc_per_node 2 THIS_FILE
"""

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
parts = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)) for _ in range(2)]
stage = PipelineStage(parts[rank], rank, 2, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 4, loss_fn=torch.nn.functional.mse_loss)
inputs, targets = torch.randn(16, 8), torch.randn(16, 8)
schedule.step(inputs) if rank == 0 else schedule.step(target=targets, losses=[])
norm = parts[rank][1]
print(
    f"stage {rank}: {int(norm.num_batches_tracked)} batches were counted of 4, "
    f"largest running variance {float(norm.running_var.max()):.3g}",
    flush=True,
)

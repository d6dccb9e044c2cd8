"""torch 2.13: gradients of a mean loss on a DTensor are too large by the number of ranks.

Seen on two ranks on a CPU, without plait: `mse_loss`, `smooth_l1_loss`, `huber_loss`,
`soft_margin_loss` and `binary_cross_entropy` of split inputs. The loss is right, the mean over all
elements. The backward divides by the elements of one rank. `l1_loss` is right.

    python -m torch.distributed.run --nproc_per_node 2 THIS_FILE
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
values, targets = torch.rand(8, 6), torch.rand(8, 6)
for loss in (
    F.mse_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.soft_margin_loss,
    F.binary_cross_entropy,
    F.l1_loss,
):
    for dim in (0, 1):
        one = values.clone().requires_grad_()
        right = loss(one, targets)
        right.backward()
        parts = distribute_tensor(values.clone(), mesh, [Shard(dim)]).requires_grad_()
        found = loss(parts, distribute_tensor(targets, mesh, [Shard(dim)]))
        found.backward()
        numbers = [found.full_tensor(), right, (parts.grad.full_tensor() / one.grad).median()]
        if dist.get_rank() == 0:
            shown = "loss {:.6f} of {:.6f}, gradient {:.4f} times".format(*map(float, numbers))
            print(f"{loss.__name__}, split along {dim}: {shown}", flush=True)

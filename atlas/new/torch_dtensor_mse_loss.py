"""torch 2.13: the gradient of `mse_loss` on a DTensor is too large by the number of ranks.

Seen on two ranks on a CPU, without plait. The mean is over all elements. The backward divides by
the elements of one rank.

    python -m torch.distributed.run --nproc_per_node 2 THIS_FILE
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
values, targets = torch.randn(8, 6), torch.randn(8, 6)
for name, loss in (
    ("mse_loss", F.mse_loss),
    ("l1_loss", F.l1_loss),
    ("smooth_l1_loss", F.smooth_l1_loss),
    ("huber_loss", F.huber_loss),
    ("binary_cross_entropy_with_logits", lambda x, y: F.binary_cross_entropy_with_logits(x, y)),
    ("binary_cross_entropy", lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid())),
    ("soft_margin_loss", lambda x, y: F.soft_margin_loss(x, y.sign())),
    ("kl_div", lambda x, y: F.kl_div(x, y.sigmoid(), reduction="mean")),
    ("poisson_nll_loss", F.poisson_nll_loss),
    ("gaussian_nll_loss", lambda x, y: F.gaussian_nll_loss(x, y, y.square() + 1)),
):
    for dim in (0, 1):
        one = values.clone().requires_grad_()
        try:
            right = loss(one, targets)
            right.backward()
            parts = distribute_tensor(values.clone(), mesh, [Shard(dim)]).requires_grad_()
            found = loss(parts, distribute_tensor(targets, mesh, [Shard(dim)]))
            found.backward()
            value = found.full_tensor()
            factor = float((parts.grad.full_tensor() / one.grad).nanmean())
            text = f"loss {float(value):.6f} of {float(right):.6f}, gradient {factor:.4f} times"
        except Exception as error:
            text = f"refused: {str(error).splitlines()[0][:100]}"
        if dist.get_rank() == 0:
            print(f"{name}, split along {dim}: {text}", flush=True)

"""torch 2.13: selective checkpointing gives wrong gradients where a kept product is written into.

Seen on a CPU, without plait. The policy keeps matrix products. A linear layer without a bias ends
in a view that counts versions of its own, so torch's check of kept tensors sees no write into it.
With a bias the same block is refused: "Tensor cached ... has been mutated".

    python THIS_FILE
"""

import functools

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

torch.manual_seed(0)
linear = torch.nn.Linear(8, 8, bias=False)
inputs = torch.randn(4, 3, 8)


def block(x: Tensor) -> Tensor:
    y = linear(x)
    y += 1.0
    return y.sin()


def gradient(*, selective: bool) -> Tensor:
    products = [torch.ops.aten.mm.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, products)
    x = inputs.clone().requires_grad_()
    y = checkpoint(block, x, use_reentrant=False, context_fn=contexts) if selective else block(x)
    (found,) = torch.autograd.grad(y.sum(), linear.weight)
    return found


plain, kept = gradient(selective=False), gradient(selective=True)
print(f"gradient off by {float((kept - plain).norm() / plain.norm()):.2f} of its norm", flush=True)

"""torch 2.13: selective checkpointing gives wrong gradients where a kept product is written into.

Seen on a CPU, without plait. The policy keeps matrix products. A linear layer without a bias ends
in a view that counts versions of its own, so torch's check of kept tensors sees no write into it.
With a bias the same block is refused: "Tensor cached ... has been mutated". A GRU writes into such
views itself.

    python THIS_FILE
"""

import functools

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

torch.manual_seed(0)
PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
INPUTS = torch.randn(4, 3, 8)


class Added(torch.nn.Linear):
    """A linear layer that adds one in place."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y += 1.0
        return y.sin()


class Recurrent(torch.nn.GRU):
    """The outputs of a GRU, without its state."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0].sin()


def gradient(layer: torch.nn.Module, *, selective: bool) -> Tensor:
    contexts = functools.partial(create_selective_checkpoint_contexts, PRODUCTS)
    x = INPUTS.clone().requires_grad_()
    y = checkpoint(layer, x, use_reentrant=False, context_fn=contexts) if selective else layer(x)
    (found,) = torch.autograd.grad(y.sum(), next(layer.parameters()))
    return found


for block in (Added(8, 8, bias=False), Recurrent(8, 8, batch_first=True)):
    plain, kept = gradient(block, selective=False), gradient(block, selective=True)
    off = float((kept - plain).norm() / plain.norm())
    print(f"{type(block).__name__}: gradient off by {off:.2f} of its norm", flush=True)

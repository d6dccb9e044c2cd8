"""Attention over sequences cut between ranks, forward and backward: ring, Ulysses, and torch's own
context parallel.

    python -m benchmarks.expert.context [--rounds 9] [--ranks 2]

torch's `context_parallel` knows the attention kernels of CUDA alone: on a CPU it does not meet any.
Its ring itself is generic, so here it is handed the CPU's kernel: torch's loop, torch's exchanges
(over Gloo), torch's merging, with its load balancing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.expert.turns import table, take_turns
from benchmarks.machine import announce
from plait import comm
from plait.launcher import launch
from plait.mesh import Mesh
from plait.models.layers import CausalAttention
from plait.parallel.context import ContextGroup, RingAttention, UlyssesAttention

HEADS = 8
KEY_VALUE_HEADS = 2
HEAD_DIM = 64
aten = torch.ops.aten


class _TorchRing(torch.autograd.Function):
    """torch's templated ring attention around the kernel of the CPU. As many key-value heads as
    heads.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

        def op(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, **_: Any) -> Any:
            return aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, is_causal
            )

        group = dist.group.WORLD
        assert group is not None
        out, lse, *_ = theirs._templated_ring_attention(group, 2, op, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

        def op(
            query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, **more: Any
        ) -> Any:
            causal = bool(more["is_causal"])
            return aten._scaled_dot_product_flash_attention_for_cpu_backward(
                more["grad_out"], query, key, value, out, logsumexp, 0.0, causal
            )

        q, k, v, out, lse = ctx.saved_tensors
        group = dist.group.WORLD
        assert group is not None
        dq, dk, dv, *_ = theirs._templated_ring_attention_backward(
            group, 2, op, grads[0].contiguous(), "grad_out", q, k, v, out, lse, True
        )
        return dq, dk, dv


class TorchRing(nn.Module):
    """Key-value heads are repeated before they travel, as its loop has no grouped queries."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        repeats = q.shape[1] // k.shape[1]
        output: Tensor = _TorchRing.apply(
            q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        )
        return output


def rank(length: int, rounds: int, size: int) -> tuple[dict[str, list[float]], float]:
    """Seconds of each system on this rank, and the largest difference of torch's ring from
    plait's.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    world = comm.init(Mesh(cp=size))
    axis = world.axis("cp")
    core = CausalAttention()
    modules: dict[str, nn.Module] = {}
    for strategy in ("ring", "ulysses"):
        group = ContextGroup(axis, strategy)
        group.cut(torch.zeros(1, length))
        modules[f"plait {strategy}"] = (
            RingAttention(group) if strategy == "ring" else UlyssesAttention(group, core)
        )
    modules["torch's ring"] = TorchRing()
    heads = (HEADS, KEY_VALUE_HEADS, KEY_VALUE_HEADS)
    whole = [torch.randn(1, number, length, HEAD_DIM) for number in heads]
    ring = ContextGroup(axis, "ring")
    parts = [ring.cut(x.transpose(1, 2)).transpose(1, 2).contiguous() for x in whole]
    difference = _difference(modules["plait ring"], modules["torch's ring"], parts)

    def run(module: nn.Module, inputs: list[Tensor]) -> Callable[[], None]:
        def once() -> None:
            axis.barrier()
            module(*[part.detach().requires_grad_() for part in inputs]).sum().backward()
            axis.barrier()

        return once

    systems = {name: run(module, parts) for name, module in modules.items()} | {
        "one device, whole": run(core, whole)
    }
    seconds = take_turns(systems, rounds)
    world.close()
    return seconds, difference


def _difference(one: nn.Module, other: nn.Module, inputs: list[Tensor]) -> float:
    found = []
    for module in (one, other):
        leaves = [part.detach().requires_grad_() for part in inputs]
        out = module(*leaves)
        found.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(*found, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
    args = parser.parse_args()
    announce()
    for length in args.lengths:
        seconds, difference = launch(rank, length, args.rounds, args.ranks, nproc=args.ranks)[0]
        print(f"### {length} tokens over {args.ranks} ranks\n")
        print(table(seconds, "plait ring"))
        print(
            f"\ntorch's ring differs from plait's by {difference:.1e} (output and gradients, "
            "relative to the largest)\n"
        )


if __name__ == "__main__":
    main()

"""The layer of a mixture of experts, forward and backward, beside other layers with the same
weights and the same tokens.

    python -m benchmarks.expert.layer [--rounds 9] [--cases even skewed]

The plain loop over experts, Hugging Face's Mixtral block in both its implementations, and
DeepSpeed's layer without capacity (so that all compute the same sum); each is left out where its
package is missing. One process, one thread.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.expert.turns import table, take_turns
from benchmarks.machine import announce
from plait.models.experts import Experts, MixtureOfExperts
from plait.models.gated import measure
from plait.models.grouped import METHODS
from plait.models.router_settings import RouterSettings
from plait.models.routing import Router

NUM_EXPERTS = 8
CHOSEN = 2
BOUND = "torch's matrix products alone"


@dataclass(frozen=True)
class Case:
    """Sizes, and how strongly the router leans on one feature that is large in every token."""

    tokens: int
    hidden: int
    inner: int
    skew: float


CASES = {
    "skewed": Case(4096, 256, 512, 0.25),
    "skewed, fine-grained": Case(4096, 256, 96, 0.25),
    "skewed, few tokens": Case(256, 256, 512, 0.25),
    "even": Case(4096, 256, 512, 0.0),
}


class PlainLoop(nn.Module):
    """What one writes first: for each expert, the tokens that chose it."""

    def __init__(self, layer: MixtureOfExperts) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        experts = self.layer.experts
        weight, chosen = (tokens @ self.layer.router.weight.t()).softmax(-1).topk(CHOSEN)
        weight = weight / weight.sum(-1, keepdim=True)
        out = torch.zeros_like(tokens)
        for expert in range(NUM_EXPERTS):
            row, slot = (chosen == expert).nonzero(as_tuple=True)
            part = tokens[row]
            inner = F.silu(F.linear(part, experts.gate[expert])) * F.linear(
                part, experts.up[expert]
            )
            out = out.index_add(
                0, row, F.linear(inner, experts.down[expert]) * weight[row, slot, None]
            )
        return out.view_as(x)


class Gated(nn.Module):
    """One expert by itself, for layers that hold a list of them."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = (
            nn.Linear(hidden, inner, bias=False),
            nn.Linear(hidden, inner, bias=False),
        )
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def plait_layer(case: Case) -> MixtureOfExperts:
    """Expert 0 is chosen most and the last least: the rows of the router lean on the first
    feature.
    """
    torch.manual_seed(0)
    router = Router(case.hidden, RouterSettings(NUM_EXPERTS, CHOSEN), std=0.02)
    with torch.no_grad():
        router.weight[:, 0] = torch.linspace(case.skew, -case.skew, NUM_EXPERTS)
    return MixtureOfExperts(
        router, Experts(NUM_EXPERTS, case.hidden, case.inner, std=0.02, std_residual=0.02), None
    )


def hugging_face(layer: MixtureOfExperts, case: Case, implementation: str) -> nn.Module:
    """Mixtral's block with the same weights."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=case.hidden,
        intermediate_size=case.inner,
        num_local_experts=NUM_EXPERTS,
        num_experts_per_tok=CHOSEN,
    )
    config._experts_implementation = implementation
    block = MixtralSparseMoeBlock(config)
    with torch.no_grad():
        block.gate.weight.copy_(layer.router.weight)
        block.experts.gate_up_proj.copy_(torch.cat((layer.experts.gate, layer.experts.up), dim=1))
        block.experts.down_proj.copy_(layer.experts.down)
    return block


def deepspeed(layer: MixtureOfExperts, case: Case) -> nn.Module:
    """DeepSpeed's layer with the same weights; nothing dropped, no noise."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed as library  # type: ignore[import-not-found]
    from deepspeed.moe.layer import MoE  # type: ignore[import-not-found]

    if not library.comm.is_initialized():
        library.init_distributed("gloo", verbose=False)
    made: Any = MoE(
        case.hidden,
        Gated(case.hidden, case.inner),
        NUM_EXPERTS,
        k=CHOSEN,
        drop_tokens=False,
        top2_2nd_expert_sampling=False,
    )
    made.set_deepspeed_parallelism()
    with torch.no_grad():
        made.deepspeed_moe.gate.wg.weight.copy_(layer.router.weight)
        for index, expert in enumerate(made.deepspeed_moe.experts.deepspeed_experts):
            for key in ("gate", "up", "down"):
                getattr(expert, key).weight.copy_(getattr(layer.experts, key)[index])
    return _First(made)


class _First(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.module(x)[0]
        return found


def bench(name: str, case: Case, rounds: int, with_deepspeed: bool) -> None:
    """One table."""
    layer = plait_layer(case)
    x = torch.randn(8, case.tokens // 8, case.hidden)
    x[..., 0] += 3.0
    systems: dict[str, nn.Module] = {"plain loop": PlainLoop(layer)}
    if importlib.util.find_spec("transformers"):
        for implementation in ("eager", "grouped_mm"):
            systems[f"Hugging Face Mixtral, {implementation}"] = hugging_face(
                layer, case, implementation
            )
    if with_deepspeed:
        systems["DeepSpeed MoE, dropless"] = deepspeed(layer, case)
    systems["plait"] = layer
    expected = systems["plain loop"](x)
    for system_name, system in systems.items():
        error = float((system(x) - expected).detach().abs().max() / expected.detach().abs().max())
        assert error < 1e-4, (system_name, error)
    layer.router.load = None
    layer(x)
    assert layer.router.load is not None
    counts = layer.router.load[:NUM_EXPERTS]
    passes = {key: _pass(system, x) for key, system in systems.items()}
    passes[BOUND] = _products_alone(layer, [int(count) for count in counts.tolist()])
    print(f"### {name}: {case.tokens} tokens, {case.hidden} -> {case.inner} -> {case.hidden}")
    print(
        "\nshares of the experts: "
        + " ".join(f"{100 * share:.0f}%" for share in (counts / counts.sum()).tolist())
        + "\n"
    )
    print(table(take_turns(passes, rounds), "plait"))
    found = measure(layer.experts.gate, [int(count) for count in counts.tolist()], rounds)
    print(
        "\nthe experts by method: "
        + ", ".join(f"{method} {1e3 * found[method]:.2f} ms" for method in METHODS)
        + "\n"
    )


def _products_alone(layer: MixtureOfExperts, counts: list[int]) -> Callable[[], None]:
    """The 9 products of each expert that has rows, on memory that is there: what no layer can be
    faster than.
    """
    gate, down = (weight.detach() for weight in (layer.experts.gate[0], layer.experts.down[0]))
    work = []
    for count in (number for number in counts if number):
        rows = torch.randn(count, gate.shape[1])
        inner = torch.randn(count, gate.shape[0])
        forward = [(rows, gate.t()), (inner, down.t())]  # gate and up alike
        work += [forward[0], forward[0], forward[1]]
        work += [(rows, down), (inner, gate), (inner, gate)]  # to the gradients of inner and rows
        work += [(inner.t(), rows), (inner.t(), rows), (rows.t(), inner)]  # to those of the weights
    room = [torch.empty(left.shape[0], right.shape[1]) for left, right in work]

    def run() -> None:
        for (left, right), out in zip(work, room, strict=True):
            torch.mm(left, right, out=out)

    return run


def _pass(system: nn.Module, x: Tensor) -> Callable[[], None]:
    def run() -> None:
        inputs = x.detach().requires_grad_()
        system(inputs).square().sum().backward()
        system.zero_grad(set_to_none=True)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    args = parser.parse_args()
    announce()
    torch.set_num_threads(1)
    with_deepspeed = importlib.util.find_spec("deepspeed") is not None
    with tempfile.TemporaryDirectory() as folder:
        if with_deepspeed:
            dist.init_process_group(
                "gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1
            )
        for name in args.cases:
            bench(name, CASES[name], args.rounds, with_deepspeed)
        if with_deepspeed:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()

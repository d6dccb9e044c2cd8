"""Mixtures of experts and long sequences: the layer beside other layers, ring beside Ulysses, and balancing by bias.

    python -m benchmarks.expert.bench layer [--rounds 9]      the layer, forward and backward, one thread, skewed load
    python -m benchmarks.expert.bench context [--rounds 9]    attention over 2 ranks of this host, forward and backward
    python -m benchmarks.expert.bench balance [--steps 120] [--figure FILE.svg]   the busiest expert, with and without bias

Systems take turns, one pass each round; the tables show medians. torch's own context parallel has no CPU kernels and
DeepSpeed's layer needs a compiler that finds its headers: where either runs, it belongs in these tables.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait import comm
from plait.context import ContextGroup, RingAttention, UlyssesAttention
from plait.engine.assemble import assemble
from plait.launcher import launch
from plait.mesh import Mesh
from plait.models.experts import Experts, MixtureOfExperts
from plait.models.grouped import METHODS, measure
from plait.models.layers import CausalAttention
from plait.models.routing import Router, RouterSettings
from plait.plan import Plan

HIDDEN, INNER, NUM_EXPERTS, CHOSEN, TOKENS = 256, 512, 8, 2, 4096


class PlainLoop(nn.Module):
    """What one writes first: for each expert, the tokens that chose it."""

    def __init__(self, layer: MixtureOfExperts) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        tokens, experts = x.flatten(0, 1), self.layer.experts
        weight, chosen = (tokens @ self.layer.router.weight.t()).softmax(-1).topk(CHOSEN)
        weight = weight / weight.sum(-1, keepdim=True)
        out = torch.zeros_like(tokens)
        for expert in range(NUM_EXPERTS):
            row, slot = (chosen == expert).nonzero(as_tuple=True)
            part = tokens[row]
            inner = F.silu(F.linear(part, experts.gate[expert])) * F.linear(part, experts.up[expert])
            out = out.index_add(0, row, F.linear(inner, experts.down[expert]) * weight[row, slot, None])
        return out.view_as(x)


def skewed_layer() -> MixtureOfExperts:
    """Expert 0 is chosen most, the last least: the rows of the router lean on one feature that is large everywhere."""
    torch.manual_seed(0)
    router = Router(HIDDEN, RouterSettings(NUM_EXPERTS, CHOSEN), std=0.02)
    with torch.no_grad():
        router.weight[:, 0] = torch.linspace(0.25, -0.25, NUM_EXPERTS)
    return MixtureOfExperts(router, Experts(NUM_EXPERTS, HIDDEN, INNER, std=0.02, std_residual=0.02), None)


def hugging_face(layer: MixtureOfExperts, implementation: str) -> nn.Module:
    """Mixtral's block with the same weights."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=NUM_EXPERTS, num_experts_per_tok=CHOSEN
    )
    config._experts_implementation = implementation
    block = MixtralSparseMoeBlock(config)
    with torch.no_grad():
        block.gate.weight.copy_(layer.router.weight)
        block.experts.gate_up_proj.copy_(torch.cat((layer.experts.gate, layer.experts.up), dim=1))
        block.experts.down_proj.copy_(layer.experts.down)
    return block


def bench_layer(rounds: int) -> None:
    torch.set_num_threads(1)
    layer = skewed_layer()
    x = torch.randn(8, TOKENS // 8, HIDDEN)
    x[..., 0] += 3.0
    systems: dict[str, nn.Module] = {"plain loop": PlainLoop(layer)}
    for implementation in ("eager", "grouped_mm"):
        systems[f"Hugging Face Mixtral, {implementation}"] = hugging_face(layer, implementation)
    systems["plait"] = layer
    expected = systems["plain loop"](x)
    for name, system in systems.items():
        error = float((system(x) - expected).detach().abs().max() / expected.detach().abs().max())
        assert error < 1e-4, (name, error)
    layer(x)
    assert layer.router.load is not None
    shares = (layer.router.load[:NUM_EXPERTS] / layer.router.load[:NUM_EXPERTS].sum()).tolist()
    print(f"{TOKENS} tokens, {HIDDEN} -> {INNER} -> {HIDDEN}, {NUM_EXPERTS} experts, top {CHOSEN}, float32, one thread")
    print("shares of the experts: " + " ".join(f"{100 * share:.0f}%" for share in shares))
    print(_table(_take_turns({name: _pass(system, x) for name, system in systems.items()}, rounds)))
    counts = [int(count) for count in (torch.tensor(shares) * TOKENS * CHOSEN).round().tolist()]
    found = measure(layer.experts.gate, counts, rounds)
    print("one grouped product: " + ", ".join(f"{method} {1e3 * found[method]:.1f} ms" for method in METHODS))


def _pass(system: nn.Module, x: Tensor) -> Callable[[], None]:
    def run() -> None:
        inputs = x.detach().requires_grad_()
        system(inputs).square().sum().backward()
        system.zero_grad(set_to_none=True)

    return run


def _take_turns(systems: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for index in range(rounds + 1):
        for name, run in systems.items():
            began = time.perf_counter()
            run()
            if index:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def _table(seconds: dict[str, list[float]]) -> str:
    own = statistics.median(seconds["plait"]) if "plait" in seconds else None
    lines = []
    for name, values in seconds.items():
        median = statistics.median(values)
        beside = "" if own is None else f"   {median / own:5.2f} x plait's time"
        lines.append(f"  {name:32} {1e3 * median:8.1f} ms{beside}")
    return "\n".join(lines)


def bench_context(rounds: int) -> None:
    for length in (1024, 4096):
        print(f"attention, {length} tokens over 2 ranks, 8 heads of 64, 2 key-value heads, float32, forward and backward")
        print(_table(launch(_context_rank, length, rounds, nproc=2)[0]))


def _context_rank(length: int, rounds: int) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    world = comm.init(Mesh(cp=2))
    axis = world.axis("cp")
    core = CausalAttention()
    modules: dict[str, nn.Module] = {}
    for strategy in ("ring", "ulysses"):
        group = ContextGroup(axis, strategy)
        group.cut(torch.zeros(1, length))
        modules[strategy] = RingAttention(group) if strategy == "ring" else UlyssesAttention(group, core)
    parts = [torch.randn(1, heads, length // 2, 64) for heads in (8, 2, 2)]
    whole = [torch.randn(1, heads, length, 64) for heads in (8, 2, 2)]

    def run(module: nn.Module, inputs: list[Tensor]) -> Callable[[], None]:
        def once() -> None:
            axis.barrier()
            module(*[part.detach().requires_grad_() for part in inputs]).sum().backward()
            axis.barrier()

        return once

    systems = {name: run(module, parts) for name, module in modules.items()} | {"one device, whole": run(core, whole)}
    seconds = _take_turns(systems, rounds)
    world.close()
    return seconds


MODEL = {
    "name": "llama", "num_hidden_layers": 4, "hidden_size": 96, "num_attention_heads": 4, "intermediate_size": 96,
    "vocab_size": 256, "num_local_experts": 8, "num_experts_per_tok": 2, "scoring_func": "sigmoid", "initializer_range": 0.08,
}  # fmt: skip


def bench_balance(steps: int, figure: Path | None) -> None:
    curves = {}
    for name, speed in (("without", 0.0), ("balanced by bias", 0.01)):
        curves[name] = launch(_balance_rank, steps, speed, nproc=1)[0]
        first, last = curves[name][0][0], statistics.mean(busiest for busiest, _ in curves[name][-10:])
        loss = curves[name][-1][1]
        print(f"{name:18} busiest expert: {first:.2f} x the mean at first, {last:.2f} over the last 10 steps; loss {loss:.3f}")
    if figure is not None:
        _draw(curves, figure)


def _balance_rank(steps: int, speed: float) -> list[tuple[float, float]]:
    """(busiest expert of the worst layer in units of the mean, loss) of each step, on the text of the standard library."""
    from plait.config import Config

    torch.set_num_threads(1)
    keys = {**MODEL, "router_bias_update_speed": speed} if speed else MODEL
    config = Config.load(
        {
            "model": keys,
            "data": {"name": "stdlib", "seq_len": 128},
            "train": {"global_batch": 16, "lr": 2e-3, "steps": steps},
        }
    )
    world = comm.init(Mesh())
    training = assemble(config, Plan.parse("dp1"), world)
    batches: Any = iter(training.loader)
    found = []
    for _ in range(steps):
        result = training.engine.step(next(batches), trace=False)
        assert result.load is not None
        found.append((result.load.busiest, result.loss))
    world.close()
    return found


def _draw(curves: dict[str, list[tuple[float, float]]], figure: Path) -> None:
    import matplotlib.pyplot as plt

    plt.figure(figsize=(6, 3.2))
    for name, points in curves.items():
        plt.plot([busiest for busiest, _ in points], label=name)
    plt.axhline(1.25, color="grey", linewidth=0.7, linestyle="--")
    plt.xlabel("step")
    plt.ylabel("busiest expert / mean, worst layer")
    plt.legend()
    plt.tight_layout()
    plt.savefig(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("layer", "context", "balance"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    if args.what == "layer":
        bench_layer(args.rounds)
    elif args.what == "context":
        bench_context(args.rounds)
    else:
        bench_balance(args.steps, args.figure)


if __name__ == "__main__":
    main()

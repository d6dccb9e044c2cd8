"""One transformer block under the four modes: time, bytes sent and activations kept, on as many ranks, as width grows.

    python benchmarks/tensor_parallel/modes.py [--ranks 4 8] [--widths 64 128 256] [--rounds 5] [--plot FILE.svg]

Activations are what autograd keeps for backward, parameters excepted, measured by its own hooks. Ranks beyond the number of
cores take turns on them: compare times at one number of ranks only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch

from plait import comm, models
from plait.launcher import launch
from plait.mesh import Mesh
from plait.plan import Plan
from plait.tensor import TensorGroup, apply

MODES = {
    4: ["tp4", "tp4:1d,sp", "tp4:2d", "tp4:2.5d"],
    8: ["tp8", "tp8:1d,sp", "tp8:2.5d,depth2", "tp8:3d"],
}
SEQUENCE, BATCH, HEADS = 64, 8, 8


def measure(plan_text: str, width: int, rounds: int) -> dict[str, Any]:
    """Forward and backward of one block on this rank."""
    torch.set_num_threads(1)
    plan = Plan.parse(plan_text)
    world = comm.init(Mesh.of(plan))
    torch.manual_seed(0)
    model: Any = models.make(
        "gpt",
        num_hidden_layers=1,
        hidden_size=width,
        num_attention_heads=HEADS,
        vocab_size=64,
        max_position_embeddings=SEQUENCE,
    )
    group = TensorGroup(world, plan.tp.mode, plan.tp.sequence_parallel, plan_text)
    split = apply(model, models.roles_for(model), group)
    for name, param in model.named_parameters():
        param.data = torch.randn(split.placements[name].local_shape) * 0.02
    block, stream = model.blocks[0], split.mode.residual
    x = stream.own(torch.zeros(BATCH, SEQUENCE, width)).clone().requires_grad_()
    held = {param.untyped_storage().data_ptr() for param in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    seconds = []
    for index in range(rounds + 1):
        before = world.ledger.copy()
        world.barrier()
        began = time.perf_counter()
        split.run.where = stream
        if index == 0:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                y = block(x)
        else:
            y = block(x)
        y.sum().backward()
        gradients = [(name, param.grad) for name, param in model.named_parameters() if param.grad is not None]
        split.sum_partial(gradients)
        world.barrier()
        if index:
            seconds.append(time.perf_counter() - began)
        sent = world.ledger.since(before).bytes()
        split.run.forget()
    parameters = sum(param.numel() * param.element_size() for param in block.parameters())
    return {
        "plan": plan_text,
        "width": width,
        "ranks": plan.world_size,
        "seconds": statistics.median(seconds),
        "sent_bytes": sent,
        "activation_bytes": sum(kept.values()),
        "parameter_bytes": parameters,
    }


def draw(rows: list[dict[str, Any]], path: str) -> None:
    import matplotlib.pyplot as plt

    ranks = sorted({row["ranks"] for row in rows})
    figure, grid = plt.subplots(len(ranks), 3, figsize=(13, 4 * len(ranks)), squeeze=False)
    for line, number in zip(grid, ranks, strict=True):
        for axes, key in zip(line, ("seconds", "sent_bytes", "activation_bytes"), strict=True):
            for plan in MODES[number]:
                points = [(row["width"], row[key]) for row in rows if row["plan"] == plan]
                axes.plot(*zip(*points, strict=True), marker="o", label=plan)
            axes.set(title=f"{key} a rank, {number} ranks", xlabel="width", xscale="log", yscale="log")
            axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8], choices=sorted(MODES))
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plot", help="a picture of the table")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    cells = [(plan, width) for number in args.ranks for plan in MODES[number] for width in args.widths]
    rows = []
    if not args.json:
        print("| plan | width | ms | sent, KB | activations kept, KB | parameters, KB |\n|---|---|---|---|---|---|")
    for plan, width in cells:
        row = launch(measure, plan, width, args.rounds, nproc=Plan.parse(plan).world_size)[0]
        rows.append(row)
        if not args.json:
            sizes = " | ".join(f"{row[key] / 1e3:.0f}" for key in ("sent_bytes", "activation_bytes", "parameter_bytes"))
            print(f"| {row['plan']} | {row['width']} | {row['seconds'] * 1e3:.1f} | {sizes} |", flush=True)
    if args.json:
        print(json.dumps(rows))
    if args.plot:
        draw(rows, args.plot)


if __name__ == "__main__":
    main()

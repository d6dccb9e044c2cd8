"""What each pipeline stage keeps for backward, measured and by formula: `python -m benchmarks.hybrid.activations`.

Measured are the bytes that autograd saves in the forward of one micro-batch, each memory once, parameters left out; times
the micro-batches that the stage had under way at most. The formula is the cost model's (`plait.cost.memory`), times what
the schedule keeps when it is simulated.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

import plait
from plait import models
from plait.cost.describe import describe_keys
from plait.cost.memory import stage_activations
from plait.cost.sharding import sharding
from plait.cost.stages import Stage
from plait.engine.build import Options, build, join_world
from plait.models.losses import cross_entropy
from plait.pipeline import schedules
from plait.pipeline.simulate import simulate
from plait.plan import Plan

MODEL = {
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}
SEQ_LEN, SAMPLES = 64, 2
PLANS = (
    "pp4:1f1b mb8",
    "pp4:gpipe mb8",
    "pp4:zb-h1 mb8",
    "pp2:zbv mb8",
    "pp4:1f1b mb8 remat:selective",
    "pp4:1f1b mb8 remat:full",
)


def measure(text: str) -> dict[int, tuple[int, int, tuple[str, ...]]]:
    """For each stage of this rank: bytes saved by one micro-batch, micro-batches under way at most, names of its links."""
    plan = Plan.parse(text)
    world = join_world(plan)
    with torch.device("meta"):
        model = models.make("gpt", **MODEL)
    engine = build(model, plan, loss=cross_entropy, optimizer=torch.optim.AdamW, options=Options(), world=world)
    tokens = torch.randint(0, 256, (SAMPLES * plan.micro_batches, SEQ_LEN + 1))
    saved: dict[int, int] = {}
    for number, part in engine._pipeline.parts.items():
        part.stage.module.forward = _counting(part.stage.module.forward, saved, number, engine.model)  # type: ignore[method-assign]
    engine.step((tokens[:, :-1], tokens[:, 1:]), trace=False)
    world.close()
    return {number: (saved[number], part.stage.peak_live, _links(part)) for number, part in engine._pipeline.parts.items()}


def _links(part: Any) -> tuple[str, ...]:
    return tuple(name for name, _ in part.stage.module._links)


def _counting(forward: Any, saved: dict[int, int], number: int, model: Any) -> Any:
    def counted(*args: Any) -> Any:
        own = {param.untyped_storage().data_ptr() for param in model.parameters()}
        seen: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage().data_ptr() not in own:
                seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = forward(*args)
        saved[number] = sum(seen.values())
        return output

    return counted


def formula(text: str, stage: int, links: tuple[str, ...]) -> tuple[float, int]:
    """(bytes of one micro-batch, micro-batches kept) of one stage, without the head's logits, which the loss keeps."""
    plan = Plan.parse(text)
    model = describe_keys({"name": "gpt", **MODEL}, SEQ_LEN)
    blocks = {block.name: block for block in model.blocks()}
    inner = next(block for name, block in blocks.items() if name not in ("embedding", "head"))
    count = sum(link.startswith("blocks.") for link in links)
    shard = sharding(plan, SEQ_LEN, SAMPLES)
    _, each, _ = stage_activations(Stage(((inner, count),)), shard, (plan.precision, plan.compile, plan.remat))
    schedule = schedules.make(plan.pp.schedule, plan.pp.size, plan.micro_batches, plan.pp.virtual)
    return each, simulate(schedule).peak_activations[stage]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", nargs="+", default=PLANS)
    given = parser.parse_args()
    print("| plan | stage | links | kept (formula) | measured kB | formula kB | measured / formula |")
    print("|---|---|---|---|---|---|---|")
    for text in given.plans:
        found: dict[int, Any] = {}
        for rank in plait.launch(measure, text, nproc=Plan.parse(text).world_size):
            found |= rank
        for stage, (num_bytes, live, links) in sorted(found.items()):
            each, kept = formula(text, stage, links)
            measured, told = num_bytes * live, each * kept
            blocks = sum(link.startswith("blocks.") for link in links)
            ratio = f"{measured / told:.2f}" if told else "-"
            print(
                f"| {text} | {stage} | {blocks} blocks of {len(links)} | {live} ({kept}) "
                f"| {measured / 1e3:,.0f} | {told / 1e3:,.0f} | {ratio} |"
            )


if __name__ == "__main__":
    main()

"""Cost of the engine itself on this machine: processor seconds of a step, a micro-batch, a block
that compute nothing.

Tiny models are trained for some steps. The differences between few and many blocks or micro-batches
are the time of Python, autograd and the engine. So are those between a block and one that
recomputes. Also the memory of a rank that holds almost no model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from plait.cluster.products import RULE, ProductTable
from plait.comm.simulated import simulate
from plait.comm.world import World
from plait.mesh import Mesh
from plait.values import JsonObject, PyTree

STEPS = 9
FEWEST_STEPS = 6
SPREAD = 1.04
"""Spread of the shortest steps of a model. Fewer steps are enough where the shortest came three
times, within so much.
"""
SIZES = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 64,
    "max_position_embeddings": 8,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
FEW_EXPERTS = 2
MANY_EXPERTS = 6
FEW = 1
MANY = 5


@dataclass(frozen=True)
class Tiny:
    """A model of few or many blocks: its name, the key that counts blocks, those counts, and the
    other keys.
    """

    name: str
    keys: JsonObject
    depth: str = "num_hidden_layers"
    few: int = FEW
    many: int = MANY
    blocks: float = MANY - FEW
    """By how many the two differ."""
    shape: tuple[int, ...] = ()
    """Shape of an input that is no text."""


class StepSeconds(NamedTuple):
    """Seconds of the processor, and those that pass."""

    work: float
    passed: float


def engine_seconds() -> dict[str, object]:
    """`step`, `micro_batch` and `expert` (each chunk of a block) in seconds, `memory` in bytes,
    `blocks` as in `block_seconds`.

    In this rank alone, and before anything large, as memory is that of the fullest moment.
    """
    blocks = block_seconds(TEXT_FAMILIES)
    expert = (_block(_experts(MANY_EXPERTS), "dp1") - blocks["experts"]["none"]) / (
        MANY_EXPERTS - FEW_EXPERTS
    )
    gpt = TEXT_FAMILIES["gpt"]
    small, often = (_alone(gpt, FEW, f"mb{micro_batches}") for micro_batches in (FEW, MANY))
    micro_batch = max((often - small) / (MANY - FEW) - blocks["gpt"]["none"], 0.0)
    step = max(small - blocks["gpt"]["none"] - micro_batch, 0.0)
    return {
        "blocks": blocks,
        "step": step,
        "micro_batch": micro_batch,
        "expert": max(expert, 0.0),
        "memory": _memory(),
    }


def block_seconds(families: Mapping[str, Tiny]) -> dict[str, dict[str, float]]:
    """Forward and backward of one block in one micro-batch, by family, by recomputation."""
    return {family: _seconds_by_remat(model) for family, model in families.items()}


def _seconds_by_remat(model: Tiny) -> dict[str, float]:
    return {remat: _block(model, f"remat:{remat}") for remat in ("none", "full", "selective")}


def _experts(num_experts: int) -> Tiny:
    return Tiny("llama", {**SIZES, **EXPERTS, "num_local_experts": num_experts})


TEXT_FAMILIES = {
    "gpt": Tiny("gpt", SIZES),
    "llama": Tiny("llama", SIZES),
    "experts": _experts(FEW_EXPERTS),
}
OTHER_FAMILIES = {
    "resnet": Tiny(
        "resnet", {"width": 16, "in_channels": 1, "num_classes": 64}, "depth", 18, 34, 8, (1, 8, 8)
    ),
    "mlp": Tiny("mlp", {"in_features": 16, "hidden_size": 16, "out_features": 64}, shape=(16,)),
}
"""A tiny model of each kind of block."""


def _memory() -> float:
    from plait.run.memory import peak_memory_bytes

    return float(peak_memory_bytes())


def _block(model: Tiny, text: str) -> float:
    few, many = (_alone(model, depth, text) for depth in (model.few, model.many))
    return max(many - few, 0.0) / model.blocks


def _alone(model: Tiny, depth: int, text: str) -> float:
    samples = MANY if text == f"mb{MANY}" else 1
    return simulate(Mesh(), lambda world: step_seconds(model, depth, text, world, samples=samples))[
        0
    ].work


def step_seconds(
    tiny: Tiny,
    depth: int,
    text: str,
    world: World,
    *,
    samples: int,
    steps: int = STEPS,
    table: ProductTable = RULE,
) -> StepSeconds:
    """The shortest step of this rank; a rank that is alone may do with fewer `steps`. `table`: the
    library of each product, which tiny models are too small to notice.
    """
    import torch

    from plait import models
    from plait.engine.build import Options, build
    from plait.models.losses import cross_entropy

    with torch.device("meta"):
        model = models.make(tiny.name, **{tiny.depth: depth}, **tiny.keys)
    engine = build(
        model,
        text,
        loss=cross_entropy,
        optimizer=lambda p: torch.optim.AdamW(p, fused=True),
        options=Options(linear_product=table, defer_reads=False),
        world=world,
    )
    batch = _batch(tiny, samples)
    return _shortest(lambda: engine.step(batch), steps, may_stop=world.size == 1)


def _batch(tiny: Tiny, samples: int) -> tuple[PyTree, PyTree]:
    """Tokens that differ, so that a router sends them to all experts; alike on all ranks."""
    import torch

    drawn = torch.Generator().manual_seed(0)
    if tiny.shape:
        return torch.randn(samples, *tiny.shape, generator=drawn), torch.zeros(
            samples, dtype=torch.long
        )
    length = tiny.keys["max_position_embeddings"]
    tokens = torch.randint(tiny.keys["vocab_size"], (samples, length + 1), generator=drawn)
    return tokens[:, :-1], tokens[:, 1:]


def _shortest(step: Callable[[], object], most: int, *, may_stop: bool) -> StepSeconds:
    """After two that are not counted."""
    seconds: list[float] = []
    passed: list[float] = []
    while len(seconds) < most and not (may_stop and _settled(seconds)):
        began = time.process_time()
        clock = time.perf_counter()
        step()
        seconds.append(time.process_time() - began)
        passed.append(time.perf_counter() - clock)
    return StepSeconds(min(seconds[2:]), min(passed[2:]))


def _settled(seconds: list[float]) -> bool:
    """Whether more steps would change little."""
    return len(seconds) >= FEWEST_STEPS and sorted(seconds[2:])[2] <= SPREAD * min(seconds[2:])

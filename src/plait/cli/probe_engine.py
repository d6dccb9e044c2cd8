"""What the engine itself costs on this machine: processor seconds of a step, a micro-batch, a block that compute nothing.

Tiny models are trained for some steps; the differences between few and many blocks, and between few and many micro-batches,
are what Python, autograd and the engine take. So are those between a block alone and one that recomputes, one whose ranks
meet in collectives, and one whose attention goes round a ring. Also the memory of a rank that holds almost no model.
"""

from __future__ import annotations

import time
from typing import Any

from plait.comm.simulated import simulate
from plait.mesh import Mesh
from plait.plan import Plan

STEPS, FEWEST_STEPS, MET_STEPS, SPREAD = 14, 8, 10, 1.02
"""Of a model that is trained: fewer are enough where the shortest came three times, within so much. `MET_STEPS` of several
ranks, which would have to agree on that."""
SIZES = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 64, "max_position_embeddings": 8}
FEW, MANY = 1, 5
FEW_EXPERTS, MANY_EXPERTS = 2, 6
MEETINGS = {  # a plan, and how often the ranks of one block meet, forward and backward
    "call": (("tp2:1d,sp", 10), ("tp4:1d,sp", 10)),
    "grid": (("tp4:2d", 26),),
    "visit": (("cp2:ring", 2), ("cp4:ring", 4)),
}
"""Collectives of a line and of a grid, and steps of a ring."""
MEDIUM = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 512, "vocab_size": 64}
MEDIUM_TOKENS = (4, 128)
"""Of a batch whose ranks meet: large enough that a rank that waits loses its caches."""
RANKS = 2
Tiny = tuple[str, dict[str, int]]
"""A model's name and the keys beside `SIZES`."""


def engine_seconds() -> dict[str, Any]:
    """`blocks` (by family, by recomputation: forward and backward of one in one micro-batch), `step`, `micro_batch` and
    `expert` (each that a block has) in seconds. In this rank alone."""
    blocks = {}
    for family, model in _families(FEW_EXPERTS).items():
        blocks[family] = {remat: _block(model, f"remat:{remat}") for remat in ("none", "full", "selective")}
    expert = (_block(_families(MANY_EXPERTS)["experts"], "dp1") - blocks["experts"]["none"]) / (MANY_EXPERTS - FEW_EXPERTS)
    small, often = (_alone(("gpt", {}), FEW, f"mb{micro_batches}") for micro_batches in (FEW, MANY))
    micro_batch = max((often - small) / (MANY - FEW) - blocks["gpt"]["none"], 0.0)
    step = max(small - blocks["gpt"]["none"] - micro_batch, 0.0)
    return {"blocks": blocks, "step": step, "micro_batch": micro_batch, "expert": max(expert, 0.0)}


def measure_engine(*, crowded: bool = True) -> dict[str, Any]:
    """The same with what meeting others takes beside the work: `call` (a collective inside a block), `grid` (one of a grid's)
    and `visit` (a step of ring attention) in seconds by number of ranks, and `memory` in bytes. Starts ranks, and if `crowded`
    more of them than two."""
    from plait.launcher import launch

    found = launch(_alone_in_world, nproc=RANKS)[0]
    alone = found.pop("medium")
    for name, plans in MEETINGS.items():
        found[name] = {}
        for text, times in plans:
            ranks = Plan.parse(text).world_size
            if ranks > RANKS and not crowded:
                continue
            work = sum(launch(_medium_block, text, nproc=ranks))
            found[name][str(ranks)] = max(work - alone, 0.0) / ranks / times
    return found


def _alone_in_world() -> dict[str, Any]:
    """What one of two ranks finds, and its memory with communication. Collective."""
    import torch

    from plait import comm

    world = comm.init(Mesh(dp=RANKS))
    axis = world.axis("dp")
    axis.all_reduce(axis.empty(1 << 16, torch.float32, world.device)).wait()
    found = {**engine_seconds(), "memory": _memory()}
    found["medium"] = simulate(Mesh(), lambda alone: _medium("dp1", alone))[0]
    world.close()
    return found


def _medium_block(text: str) -> float:
    """A block of a plan in this rank. Collective."""
    from plait import comm

    world = comm.init(Mesh.of(Plan.parse(text)))
    found = _medium(text, world)
    world.close()
    return found


def _medium(text: str, world: Any) -> float:
    few, many = (_step_seconds(("gpt", MEDIUM), layers, text, world, MEDIUM_TOKENS) for layers in (1, 3))
    return (many - few) / 2


def _families(num_experts: int) -> dict[str, Tiny]:
    experts = {"num_local_experts": num_experts, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return {"gpt": ("gpt", {}), "llama": ("llama", {}), "experts": ("llama", experts)}


def _block(model: Tiny, text: str) -> float:
    few, many = (_alone(model, layers, text) for layers in (FEW, MANY))
    return max(many - few, 0.0) / (MANY - FEW)


def _alone(model: Tiny, num_layers: int, text: str) -> float:
    return simulate(Mesh(), lambda world: _step_seconds(model, num_layers, text, world))[0]


def _step_seconds(tiny: Tiny, num_layers: int, text: str, world: Any, shape: tuple[int, int] | None = None) -> float:
    """Processor seconds of the shortest step of this rank."""
    import torch

    from plait import models
    from plait.engine.build import build
    from plait.models.losses import cross_entropy

    samples, length = shape or (MANY if text == f"mb{MANY}" else 1, SIZES["max_position_embeddings"])
    with torch.device("meta"):
        model = models.make(tiny[0], num_hidden_layers=num_layers, **{**SIZES, **tiny[1], "max_position_embeddings": length})
    engine = build(model, text, loss=cross_entropy, optimizer=lambda p: torch.optim.AdamW(p, fused=True), world=world)
    tokens = torch.zeros(samples, length + 1, dtype=torch.long)
    seconds: list[float] = []
    alone = world.size == 1
    while len(seconds) < (STEPS if alone else MET_STEPS) and not (alone and _settled(seconds)):
        began = time.process_time()
        engine.step((tokens[:, :-1], tokens[:, 1:]))
        seconds.append(time.process_time() - began)
    return min(seconds[2:])


def _settled(seconds: list[float]) -> bool:
    """Whether more steps would change little."""
    return len(seconds) >= FEWEST_STEPS and sorted(seconds[2:])[2] <= SPREAD * min(seconds[2:])


def _memory() -> float:
    from plait.engine.metrics import peak_memory_bytes

    return float(peak_memory_bytes())

"""What the engine itself costs on this machine: seconds of a step, of a micro-batch and of a block that compute nothing.

Tiny models are trained for some steps; the differences between few and many blocks, and between few and many micro-batches,
are what Python, autograd and the engine take. Also the memory of a rank that holds almost no model.
"""

from __future__ import annotations

from typing import Any

STEPS = 10
SIZES = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 64, "max_position_embeddings": 8}
FEW, MANY = 1, 7


def engine_seconds() -> dict[str, float]:
    """`step`, `micro_batch` and `block` (forward and backward of one in one micro-batch) in seconds, and `memory` in bytes.

    In this rank alone.
    """
    small, deep, often = (_step_seconds(*sizes) for sizes in ((FEW, FEW), (MANY, FEW), (FEW, MANY)))
    block = max(deep - small, 0.0) / (MANY - FEW)
    micro_batch = max((often - small) / (MANY - FEW) - block, 0.0)
    return {"step": max(small - block - micro_batch, 0.0), "micro_batch": micro_batch, "block": block, "memory": _memory()}


def engine_in_world(num_ranks: int) -> dict[str, float]:
    """The same in a rank of a world, whose communication takes memory too. Collective."""
    import torch

    from plait import comm
    from plait.mesh import Mesh

    world = comm.init(Mesh(dp=num_ranks))
    axis = world.axis("dp")
    if axis.size > 1:
        axis.all_reduce(axis.empty(1 << 16, torch.float32, world.device)).wait()
    found = engine_seconds() if world.rank == 0 else {}
    world.close()
    return found


def _step_seconds(num_layers: int, micro_batches: int) -> float:
    import torch

    from plait import models
    from plait.comm.simulated import simulate
    from plait.engine.build import build
    from plait.mesh import Mesh
    from plait.models.losses import cross_entropy

    def steps(world: Any) -> list[float]:
        with torch.device("meta"):
            model = models.make("gpt", num_hidden_layers=num_layers, **SIZES)
        engine = build(
            model, f"mb{micro_batches}", loss=cross_entropy, optimizer=lambda p: torch.optim.AdamW(p, fused=True), world=world
        )
        tokens = torch.zeros(micro_batches, 9, dtype=torch.long)
        return [engine.step((tokens[:, :-1], tokens[:, 1:])).seconds for _ in range(STEPS)]

    return min(simulate(Mesh(), steps)[0][2:])


def _memory() -> float:
    from plait.engine.metrics import peak_memory_bytes

    return float(peak_memory_bytes())

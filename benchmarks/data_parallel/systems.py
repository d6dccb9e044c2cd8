"""The systems under test: torch's own and DeepSpeed's data parallelism, and plait's, each around
the same model.

Each gets the same initial values, the same batches and the same fused AdamW, so that only the
strategy differs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpt import Case, adamw
from plait.comm import World
from plait.engine.build import Options, build
from plait.models.losses import cross_entropy

Step = Callable[[Tensor, Tensor], Any]


CASES = {
    "compute": Case("compute", "8 layers, width 256: computing dominates", 8, 256, 128, 16),
    "communication": Case(
        "communication", "4 layers, width 768, few tokens: gradients dominate", 4, 768, 32, 4
    ),
}


def mean_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def plait(plan: str) -> Callable[[Case, World], Step]:
    def make(case: Case, world: World) -> Step:
        options = Options(
            blocks="blocks.*", linear_product="torch"
        )  # who multiplies is not what is compared
        engine = build(
            case.model(), plan, loss=cross_entropy, optimizer=adamw, options=options, world=world
        )
        return lambda inputs, targets: engine.step((inputs, targets), trace=False)

    return make


def single(case: Case, world: World) -> Step:
    """One process with the whole batch of its rank and no communication: what the cores can
    compute.
    """
    model = case.model()
    return _loop(model, adamw(model.parameters()))


def ddp(case: Case, world: World) -> Step:
    model = nn.parallel.DistributedDataParallel(case.model(), gradient_as_bucket_view=True)
    return _loop(model, adamw(model.parameters()))


def zero_redundancy(case: Case, world: World) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(case.model(), gradient_as_bucket_view=True)
    return _loop(
        model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)
    )


def fsdp2(*, reshard: bool) -> Callable[[Case, World], Step]:
    def make(case: Case, world: World) -> Step:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model: Any = case.model()
        mesh = init_device_mesh("cpu", (world.size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        return _loop(
            model, torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False, fused=True)
        )

    return make


def deepspeed(stage: int) -> Callable[[Case, World], Step]:
    def make(case: Case, world: World) -> Step:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed  # type: ignore[import-not-found]

        model = case.model()
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=adamw(model.parameters()),
            config={
                "train_micro_batch_size_per_gpu": case.global_batch // world.size,
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
            },
        )

        def step(inputs: Tensor, targets: Tensor) -> None:
            engine.backward(mean_loss(engine, inputs, targets))
            engine.step()

        return step

    return make


def _loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(inputs: Tensor, targets: Tensor) -> float:
        loss = mean_loss(model, inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def systems(size: int) -> dict[str, Callable[[Case, World], Step]]:
    """By name; torch DDP comes first and is what ratios refer to."""
    return {
        "torch DDP": ddp,
        "no communication": single,
        "torch ZeroRedundancyOptimizer": zero_redundancy,
        "torch FSDP2": fsdp2(reshard=True),
        "torch FSDP2, no reshard": fsdp2(reshard=False),
        "DeepSpeed ZeRO-1": deepspeed(1),
        "DeepSpeed ZeRO-2": deepspeed(2),
        "DeepSpeed ZeRO-3": deepspeed(3),
        **{f"plait {plan}": plait(plan) for plan in _plans(size)},
    }


def _plans(size: int) -> list[str]:
    return [
        f"dp{size}",
        *(f"dp{size}:{name}" for name in ("ring", "server", "zero1", "zero2", "zero3")),
    ]

"""The systems under test: torch's DTensor, megatron-core and plait around the same GPT, beside
torch DDP on as many ranks.

Tensor parallel ranks all see the whole batch; DDP's each see their share: every step is the same
step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.gpt import Case, adamw
from benchmarks.tensor_parallel.megatron import megatron
from plait.comm import World
from plait.engine.build import Options, build
from plait.models.losses import cross_entropy

Step = Callable[[], Any]
CASE = Case("compute", "8 layers, width 256: computing dominates", 8, 256, 128, 16)
SIZES = (CASE.num_hidden_layers, CASE.hidden_size, CASE.seq_len, CASE.vocab_size)


def plait(plan: str) -> Callable[[World], Step]:
    def make(world: World) -> Step:
        options = Options(
            blocks="blocks.*", linear_product="torch"
        )  # who multiplies is not what is compared
        engine = build(
            CASE.model(), plan, loss=cross_entropy, optimizer=adamw, options=options, world=world
        )
        whole = CASE.batch()
        return lambda: engine.step(whole, trace=False)

    return make


def ddp(world: World, case: Case = CASE) -> Step:
    made = nn.parallel.DistributedDataParallel(case.model(), gradient_as_bucket_view=True)
    inputs, targets = (part.tensor_split(world.size)[world.rank] for part in case.batch())
    optimizer = adamw(made.parameters())

    def step() -> None:
        F.cross_entropy(made(inputs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def dtensor(*, sequence: bool, loss: bool, case: Case = CASE) -> Callable[[World], Step]:
    def make(world: World) -> Step:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            PrepareModuleInput,
            RowwiseParallel,
            SequenceParallel,
            loss_parallel,
            parallelize_module,
        )

        made: Any = case.model()
        mesh = init_device_mesh("cpu", (world.size,))
        between = Shard(1) if sequence else Replicate()
        row = RowwiseParallel(output_layouts=between)
        plan: dict[str, Any] = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
            "head": ColwiseParallel(
                input_layouts=between,
                output_layouts=Shard(-1) if loss else Replicate(),
                use_local_output=not loss,
            ),
        }
        if sequence:
            plan |= {"norm": SequenceParallel(), "blocks.0": PrepareModuleInput(
                input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),),
                use_local_output=True)}  # fmt: skip
        parallelize_module(made, mesh, plan)
        for block in made.blocks:
            inner: dict[str, Any] = {
                **{f"attention.{name}": ColwiseParallel() for name in ("q", "k", "v")},
                "attention.o": row,
                "mlp.up": ColwiseParallel(),
                "mlp.down": row,
            }
            if sequence:

                def gathered(*others: None) -> Any:
                    """A module whose input is gathered along the sequence; `others` stay."""
                    return PrepareModuleInput(
                        input_layouts=(Shard(1), *others),
                        desired_input_layouts=(Replicate(), *others),
                    )

                inner |= {
                    "norm1": SequenceParallel(),
                    "norm2": SequenceParallel(),
                    "attention": gathered(None),  # its documents
                    "mlp": gathered(),
                }
            parallelize_module(block, mesh, inner)
        inputs, targets = case.batch()
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-4, foreach=False)

        def run() -> None:
            logits = made(inputs)
            F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()

        def step() -> None:
            if loss:
                with loss_parallel():
                    run()
            else:
                run()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    return make


def systems(size: int) -> dict[str, Callable[[World], Step]]:
    """By name; torch DDP comes first and is what ratios refer to."""
    return {
        "torch DDP": ddp,
        "torch DTensor": dtensor(sequence=False, loss=False),
        "torch DTensor, loss parallel": dtensor(sequence=False, loss=True),
        "torch DTensor, sequence parallel": dtensor(sequence=True, loss=False),
        "torch DTensor, sequence and loss parallel": dtensor(sequence=True, loss=True),
        "megatron-core": megatron(sequence=False, sizes=SIZES, batch=CASE.batch, adamw=adamw),
        "megatron-core, sequence parallel": megatron(
            sequence=True, sizes=SIZES, batch=CASE.batch, adamw=adamw
        ),
        f"plait tp{size}": plait(f"tp{size}"),
        f"plait tp{size}:1d,sp": plait(f"tp{size}:1d,sp"),
    }

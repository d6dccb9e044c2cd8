"""The same GPT under torch.distributed.pipelining, under plait, and under torch DDP on as many
ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import gpt
from benchmarks.gpt import adamw
from plait.comm import World
from plait.engine.build import Options, build
from plait.engine.engine import Engine
from plait.engine.stages.cut import Cutting, cut
from plait.engine.step import StepResult
from plait.models.losses import cross_entropy
from plait.parallel.pipeline.actions import Schedule, backward, forward, looped, vee
from plait.parallel.pipeline.lower import group_weight_grads, lower
from plait.parallel.pipeline.schedules import make

Step = Callable[[], Any]
BASE = "torch DDP"
LOOPED_BFS = "looped-bfs"
STREAMS = ("plait pipedream", "plait 2bw")
COUNTERPART = {
    "plait gpipe": "torch GPipe",
    "plait 1f1b": "torch 1F1B",
    "plait interleaved,v2": "torch Interleaved1F1B",
    "plait looped-bfs": "torch LoopedBFS",
    "plait zbv": "torch ZBVZeroBubble",
    "plait dualpipev": "torch DualPipeV",
}


@dataclass(frozen=True)
class Case(gpt.Case):
    """A model, a batch and its micro-batches."""

    num_micro_batches: int = 8


CASES = {
    "compute": Case("compute", "8 layers, width 256, 1 x 64 tokens a micro-batch", 8, 256, 64, 8),
    "communication": Case(
        "communication",
        "8 layers, width 512, 1 x 8 tokens: small and frequent messages",
        8,
        512,
        8,
        8,
    ),
    "wide batch": Case(
        "wide batch", "8 layers, width 256, 2 x 128 tokens a micro-batch", 8, 256, 128, 16
    ),
    "few tokens": Case(
        "few tokens",
        "4 layers, width 768, 1 x 32 tokens a micro-batch",
        4,
        768,
        32,
        4,
        num_micro_batches=4,
    ),
}
"""The last two are those of the page of ratios (`benchmarks/page`)."""


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


class PlaitStep:
    """A traced step of plait's engine."""

    def __init__(self, engine: Engine, batch: tuple[Tensor, Tensor]) -> None:
        self.engine = engine
        self.batch = batch

    def __call__(self) -> StepResult:
        return self.engine.step(self.batch)


def plait(name: str, size: int, product: str) -> Callable[[Case, World], Step]:
    def start(case: Case, world: World) -> Step:
        m = case.num_micro_batches
        plain, group = _ungrouped(name)
        own = looped_bfs(size, m, 2) if name == LOOPED_BFS else None
        plan = f"pp{size}:{'interleaved,v2' if own else plain} mb{m}"
        options = Options(schedule=own, linear_product=product, weight_grad_group=group)
        engine = build(
            case.model("meta"),
            plan,
            loss=cross_entropy,
            optimizer=adamw,
            options=options,
            world=world,
        )
        return PlaitStep(engine, case.batch())

    return start


def _ungrouped(name: str) -> tuple[str, int]:
    """`zb-h2 W3`: zb-h2, with weight gradients made three micro-batches at once."""
    plain, _, group = name.partition(" W")
    return plain, int(group or 1)


def looped_bfs(num_ranks: int, num_micro_batches: int, virtual: int) -> Schedule:
    """A schedule that plait does not have, as a user would bring it: each stage of a rank with all
    micro-batches at once.

    Lamy-Poirier, Breadth-First Pipeline Parallelism (arXiv 2211.05953), section 4.
    """
    placement = looped(num_ranks, virtual)
    ranks = []
    for rank in range(num_ranks):
        own = [stage for stage, holder in enumerate(placement) if holder == rank]
        passes = [forward(stage, j) for stage in own for j in range(num_micro_batches)]
        ranks.append(
            [
                *passes,
                *(backward(stage, j) for stage in reversed(own) for j in range(num_micro_batches)),
            ]
        )
    return Schedule(LOOPED_BFS, placement, num_micro_batches, tuple(map(tuple, ranks)))


def schedule_of(name: str, size: int, num_micro_batches: int) -> Schedule:
    """What a system of plait executes."""
    plain, group = _ungrouped(name.removeprefix("plait "))
    plain, _, virtual = plain.partition(",v")
    own = plain == LOOPED_BFS
    made = (
        looped_bfs(size, num_micro_batches, 2)
        if own
        else make(plain, size, num_micro_batches, int(virtual or 1))
    )
    return lower(group_weight_grads(made, group))


class Links(nn.Module):
    """One stage of the GPT for torch: the same links as plait's stage has."""

    def __init__(self, links: list[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self.links = nn.ModuleList(link for _, link in links)

    def forward(self, x: Tensor) -> Tensor:
        for link in self.links:
            x = link(x)
        return x


def torch_pipeline(name: str, placement: tuple[int, ...]) -> Callable[[Case, World], Step]:
    def start(case: Case, world: World) -> Step:
        from torch.distributed import pipelining

        model = case.model("cpu")
        num_stages = len(placement)
        plan = cut(case.model("meta"), [], num_stages, Cutting())
        parts = [
            Links([(name, model.get_submodule(name)) for name in links]) for links in plan.links
        ]
        own = [stage for stage, rank in enumerate(placement) if rank == world.rank]
        device = torch.device("cpu")
        stages = [
            pipelining.PipelineStage(parts[stage], stage, num_stages, device) for stage in own
        ]
        schedule_class: Any = getattr(pipelining, name)
        single = num_stages == world.size
        schedule = schedule_class(
            stages[0] if single else stages, case.num_micro_batches, loss_fn=mean_loss
        )
        optimizer = adamw([param for stage in own for param in parts[stage].parameters()])
        inputs, targets = case.batch()
        first = 0 in own
        last = num_stages - 1 in own

        def step() -> None:
            keywords: dict[str, Any] = {"target": targets, "losses": []} if last else {}
            schedule.step(*([inputs] if first else []), **keywords)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    return start


def ddp(case: Case, world: World) -> Step:
    model = DistributedDataParallel(case.model("cpu"))
    optimizer = adamw(model.parameters())
    inputs, targets = (tensor.tensor_split(world.size)[world.rank] for tensor in case.batch())

    def step() -> None:
        mean_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


OURS = (
    *(
        "gpipe",
        "1f1b",
        "interleaved,v2",
        LOOPED_BFS,
        "zb-h1",
        "zb-h2",
        "zb-h2 W3",
        "zbv",
        "zbv W4",
        "v-half",
    ),
    *("dualpipev", "pipedream", "2bw"),
)


def systems(size: int, product: str = "rule") -> dict[str, Callable[[Case, World], Step]]:
    """By name; DDP on as many ranks comes first and is what ratios refer to. `product`: see
    `Options.linear_product`.
    """
    straight = tuple(range(size))
    theirs = {
        "ScheduleGPipe": straight,
        "Schedule1F1B": straight,
        "ScheduleInterleaved1F1B": looped(size, 2),
        "ScheduleLoopedBFS": looped(size, 2),
        "ScheduleZBVZeroBubble": vee(size),
        "ScheduleDualPipeV": vee(size),
    }
    return {
        BASE: ddp,
        **{
            f"torch {name.removeprefix('Schedule')}": torch_pipeline(name, where)
            for name, where in theirs.items()
        },
        **{f"plait {name}": plait(name, size, product) for name in OURS},
    }

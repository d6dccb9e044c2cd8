"""The systems of the page: torch's own, and plait's by plan, transport and library of products.

All train the same model of a case from the same values on the same batches with fused AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.data_parallel.systems import ddp, fsdp2
from benchmarks.gpt import adamw
from benchmarks.page.long import MIXTURE, SEQUENCES, TORCH_RING, torch_ring
from benchmarks.pipeline.systems import Case, torch_pipeline
from benchmarks.tensor_parallel.systems import dtensor
from plait import comm
from plait.cluster.products import ProductTable
from plait.comm import World
from plait.engine.build import Options, build
from plait.mesh import Mesh
from plait.models.losses import cross_entropy
from plait.parallel.pipeline.actions import vee
from plait.plan import Plan
from plait.plan.precisions import Messages

Step = Callable[[], Any]

CASES = {
    "wide batch": Case("wide batch", "8 layers x 256, batch 16 x 128", 8, 256, 128, 16),
    "few tokens": Case("few tokens", "4 layers x 768, batch 4 x 32", 4, 768, 32, 4),
}
FOOTPRINT_CASES = {
    "wide batch": CASES["wide batch"],
    "large vocabulary": Case(
        "large vocabulary", "2 layers x 128, batch 4 x 128", 2, 128, 128, 4, vocab_size=131072
    ),
}
"""Cases whose memory is measured. Embedding and head are nearly all of the second."""
PLANS = {
    "data": (
        *("dp{n}", "dp{n}:ring", "dp{n}:zero1", "dp{n}:zero2", "dp{n}:zero3"),
        "dp{n}:zero3, blocks kept",
    ),
    "tensor": ("tp{n}",),
    "pipeline": ("pp{n}:1f1b mb{m}", "pp{n}:zbv mb{m}"),
}
KEPT = ", blocks kept"
"""Behind a plan with zero3: every block stays whole until the step ends (`keep_gathered`)."""
DDP = "torch DDP"
FSDP2_WHOLE = "torch FSDP2, weights kept"
"""FSDP2 with `reshard_after_forward=False`: what ZeRO-2 is beside. On the table of memory alone."""
DTENSOR_SEQUENCE = "torch DTensor, sequence parallel"
PEERS = {
    "data": (DDP, "torch FSDP2"),
    "tensor": (DDP, "torch DTensor"),
    "pipeline": (DDP, "torch 1F1B", "torch ZBV"),
}
LINK_PLANS = {
    **PLANS,
    "tensor": ("tp{n}", "tp{n}:1d,sp"),
    "context": ("cp{n}:ring", "cp{n}:ulysses"),
    "experts": ("dp{n} ep{n}", "dp{n}:zero3 ep{n}"),
}
"""Of the shaped link, which has families and plans that the page of ten minutes has no time for."""
LINK_PEERS = {
    **PEERS,
    "tensor": (*PEERS["tensor"], DTENSOR_SEQUENCE),
    "context": (DDP, TORCH_RING),
    "experts": PEERS["data"],
}
LINK_CASES = {**CASES, SEQUENCES.name: SEQUENCES, MIXTURE.name: MIXTURE}
CASES_OF_FAMILY = {"context": (SEQUENCES.name,), "experts": (MIXTURE.name,)}
COUNTERPART = {"1f1b": "torch 1F1B", "zbv": "torch ZBV"}


@dataclass(frozen=True)
class Variant:
    """A way to run a plan. `product` is torch's own, or the machine's measured table. `messages`:
    see `Options`.
    """

    backend: str
    product: str | ProductTable
    title: str
    messages: Messages = "whole"


IN_HALVES = Variant("gloo", "torch", "sockets, messages bf16", "bf16")
"""Of the plans that send activations; not on the page, as its numbers are others."""


def variants(table: ProductTable) -> tuple[Variant, ...]:
    """Sockets and shared memory with torch's product, and what a run has by itself."""
    return (
        Variant("gloo", "torch", "sockets"),
        Variant("auto", "torch", "shared memory"),
        Variant("auto", table, "as it comes"),
    )


def names(family: str, size: int, case: Case, table: ProductTable) -> list[str]:
    """The systems of a family on so many ranks."""
    own = [name for plan in plans_of(family, size, case) for name in names_of(plan, table)]
    return [*peers_of(family, case), *own]


def names_of(plan: str, table: ProductTable) -> list[str]:
    """The systems of one plan, one for each variant."""
    return [f"{plan} | {variant.title}" for variant in variants(table)]


def parts(
    family: str, size: int, case: Case, table: ProductTable, memory_bytes: float
) -> list[list[str]]:
    """The systems of a family in groups that fit the memory together.

    The peers are in the first group. Every group has DDP, a plan's variants stay together, and
    with them is torch's run of the same schedule.
    """
    found = [peers_of(family, case)]
    for plan in plans_of(family, size, case):
        own = names_of(plan, table)
        together = [*found[-1], *own]
        if sum(size * bytes_of_system(name, case, size) for name in together) > memory_bytes:
            peer = counterpart(plan)
            found.append([DDP] if peer is None else [DDP, peer])
        found[-1].extend(own)
    return [group for group in found if group != [DDP]]


def bytes_of_system(name: str, case: Case, size: int) -> float:
    """Bytes of a system in one rank: its parameters, each with its gradient and two moments.

    A layer has 12 width^2 parameters, and half as much again is left for activations. Stages of
    a pipeline share the parameters.
    """
    num_parameters = 12 * case.num_hidden_layers * case.hidden_size**2
    num_parameters += case.vocab_size * case.hidden_size
    num_parts = size if counterpart(name) or name in COUNTERPART.values() else 1
    return num_parameters * 4 * 4 * 1.5 / num_parts


def peers_of(family: str, case: Case, peers: Mapping[str, Sequence[str]] = PEERS) -> list[str]:
    """Systems of torch. DTensor's script has the first case alone."""
    first = case.name == "wide batch"
    return [name for name in peers[family] if first or not name.startswith("torch DTensor")]


def plans_of(
    family: str, size: int, case: Case, plans: Mapping[str, Sequence[str]] = PLANS
) -> list[str]:
    """The plans of a family on so many ranks."""
    return [plan.format(n=size, m=micro_batches(case)) for plan in plans[family]]


def cases_of(family: str) -> Sequence[str]:
    """The cases of a family on the shaped link."""
    return CASES_OF_FAMILY.get(family, tuple(CASES))


def micro_batches(case: Case) -> int:
    """Micro-batches of a pipeline: eight, or one for each sample where there are fewer."""
    return min(8, case.global_batch)


def counterpart(name: str) -> str | None:
    """The peer that runs the schedule of a plan; None where there is no pipeline."""
    plan = name.partition(" | ")[0]
    return next((peer for word, peer in COUNTERPART.items() if f":{word} " in plan), None)


def start(name: str, case: Case, size: int, table: ProductTable, *, device: str = "cpu") -> Step:
    """The step of a system on this rank. Collective.

    plait takes the values of a model on `device`. From `meta` it draws its own, and no rank ever
    holds the whole model: so memory is measured.
    """
    plan, _, title = name.partition(" | ")
    if not title:
        return _peer(name, case, size)
    known = (*variants(table), IN_HALVES)
    variant = next(one for one in known if one.title == title)
    return _plait(plan, case, variant, device)


def plan_of(system: str) -> Plan:
    """The plan of one of plait's systems."""
    return Plan.parse(system.partition(" | ")[0].removesuffix(KEPT))


def _plait(text: str, case: Case, variant: Variant, device: str) -> Step:
    plan = plan_of(text)
    world = comm.init(Mesh.of(plan), backend=variant.backend)
    options = Options(
        blocks="blocks.*",
        linear_product=variant.product,
        messages=variant.messages,
        keep_gathered=case.num_hidden_layers if text.endswith(KEPT) else None,
    )
    engine = build(
        case.model(device), plan, loss=cross_entropy, optimizer=adamw, options=options, world=world
    )
    index, count = world.worker
    inputs, targets = (part.tensor_split(count)[index] for part in case.batch())
    return lambda: engine.step((inputs, targets), trace=False)


def _peer(name: str, case: Case, size: int) -> Step:
    mesh = Mesh(pp=size) if name in COUNTERPART.values() else Mesh(dp=size)
    world: World = comm.init(mesh, backend="gloo")
    if name.startswith("torch DTensor"):
        return dtensor(sequence=name == DTENSOR_SEQUENCE, loss=False, case=case)(world)
    if name == TORCH_RING:
        return torch_ring(case, world)
    if name in COUNTERPART.values():
        straight = name == "torch 1F1B"
        kind = "Schedule1F1B" if straight else "ScheduleZBVZeroBubble"
        placement = tuple(range(size)) if straight else vee(size)
        sized = Case(**{**vars(case), "num_micro_batches": micro_batches(case)})
        return torch_pipeline(kind, placement)(sized, world)
    make = ddp if name == DDP else fsdp2(reshard=name != FSDP2_WHOLE)
    step = make(case, world)
    index = world.rank
    inputs, targets = (part.tensor_split(size)[index] for part in case.batch())
    return lambda: step(inputs, targets)


def one_thread() -> None:
    """Let this rank compute with one thread, as every rank of the page does."""
    torch.set_num_threads(1)

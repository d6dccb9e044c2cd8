"""Where torch's compiler leaves its graphs in one step of an engine: by reason, how often."""

from __future__ import annotations

import warnings
from collections import Counter

import torch

from plait.comm import World
from plait.engine.build import build
from plait.engine.options import Options
from plait.models.adapter_parts import AdapterSettings
from plait.models.adapters import adapt
from plait.models.losses import cross_entropy
from tests.parity.families import Family


def breaks(
    world: World, plan: str, family: Family, adapters: AdapterSettings | None = None
) -> tuple[int, Counter[str]]:
    """Graphs that are called in a step, and breaks by their reason in one line."""
    from torch._dynamo import reset
    from torch._dynamo.utils import counters

    reset()
    counters.clear()
    model = family.model()
    if adapters is not None:
        adapt(model, adapters)
    engine = build(
        model,
        plan,
        loss=cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        options=Options(compile_backend="eager"),
        world=world,
    )
    axis = world.axis("dp")
    (batch, *_) = family.batches(8)
    own = tuple(part.tensor_split(axis.size)[axis.rank] for part in batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.step(own, trace=False)
    reasons: Counter[str] = Counter()
    for reason, count in counters["graph_break"].items():
        reasons[" ".join(reason.split())] += count
    return counters["stats"]["unique_graphs"], reasons

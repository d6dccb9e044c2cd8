"""Asynchronous pipelines as a stream of steps: the engine's run, and one device with the same
delayed gradients.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm import World
from plait.engine.engine import Engine
from plait.engine.state.init import Initializer, place_holders
from plait.models.losses import cross_entropy
from plait.parallel.pipeline.schedules import make
from plait.parallel.pipeline.weights import stage_weights
from plait.plan import Plan
from plait.verify.reference.delayed import DelayedRecord, run_delayed
from plait.verify.reference.recipe import Recipe
from tests.parity import families, harness
from tests.parity.harness import SEED

STEPS = 5
SAMPLES = 12


def untied(name: str | families.Family) -> families.Family:
    family = families.family_of(name)
    keys = {**family.keys, "tie_word_embeddings": False} if family.name == "gpt" else family.keys
    return replace(family, keys=keys, by_slice=False, by_micro_batch=False)


def batches(family: families.Family) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [family._batch(SAMPLES, generator) for _ in range(STEPS)]


def run_engine(
    world: World, plan: str, name: str | families.Family, flush_every: int
) -> dict[str, Any]:
    family = untied(name)
    return train(harness.make_engine(world, plan, family, {}), family, flush_every)


def train(engine: Engine, family: families.Family, flush_every: int = 0) -> dict[str, Any]:
    """The losses of the steps, the parameters after the flush, versions and activations that were
    kept.
    """
    world = engine.world
    axis = world.axis("dp")
    losses = []
    for step, (inputs, targets) in enumerate(batches(family)):
        if flush_every and step and step % flush_every == 0:
            engine.flush()
        share = (
            inputs.tensor_split(axis.size)[axis.rank],
            targets.tensor_split(axis.size)[axis.rank],
        )
        losses.append(engine.step(share, trace=False).loss)
    engine.flush()
    parts = harness._copies(engine.local_parameters())
    params = [
        (name, value.view(shape))
        for name, shape, _, value in parts
        if value.numel() == torch.Size(shape).numel()
    ]
    versions = engine._training_step.timing.versions
    stage = engine.pipeline.parts[world.axis("pp").rank].stage
    return {
        "losses": losses,
        "params": params,
        "parts": parts,
        "versions": versions.peak,
        "live": stage.peak_live,
    }


def reference(
    plan_text: str, name: str | families.Family, stages: list[list[str]]
) -> DelayedRecord:
    plan = Plan.parse(plan_text)
    family = untied(name)
    model = family.model()
    place_holders(model, torch.float64, torch.device("cpu"))

    def take(param: nn.Parameter, value: Tensor) -> None:
        param.data = value.clone()

    Initializer(model, SEED, torch.float64, torch.device("cpu")).run(take)
    m = plan.micro_batches
    dp = plan.dp.size

    def cut(batch: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Micro-batch j of all data ranks together."""
        ranks = [
            [part.tensor_split(m) for part in share]
            for share in zip(*(t.tensor_split(dp) for t in batch), strict=True)
        ]
        return [
            tuple(torch.cat([rank[side][j] for rank in ranks]) for side in (0, 1)) for j in range(m)
        ]  # type: ignore[misc]

    weights = stage_weights(make(plan.pp.schedule, plan.pp.size, m, num_steps=STEPS))
    stream = [cut(batch) for batch in batches(family)]
    return run_delayed(
        model,
        stream,
        Recipe(cross_entropy, harness.optimizer),
        list(zip(stages, weights, strict=True)),
    )

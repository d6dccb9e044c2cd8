"""Asynchronous pipelines against one device with the same delayed gradients; their versions; that they learn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.comm import World
from plait.engine.build import Options, build
from plait.engine.init import Initializer, place_holders
from plait.errors import ModelError, PlanError
from plait.models.losses import cross_entropy
from plait.pipeline.schedules import make
from plait.pipeline.simulate import simulate
from plait.pipeline.weights import stage_weights
from plait.plan import Plan
from plait.verify.compare import largest, relative_error
from plait.verify.delayed import DelayedRecord, run_delayed
from plait.verify.reference import Recipe
from tests.parity import harness
from tests.parity.harness import SEED, TOLERANCE

Run = Callable[..., list[Any]]
STEPS, SAMPLES = 5, 12


def untied(name: str) -> harness.Family:
    family = harness.family_of(name)
    keys = {**family.keys, "tie_word_embeddings": False} if name.startswith("gpt") else family.keys
    return harness.Family(family.name, keys, family.sample, family.classes, family.tokens)


def batches(family: harness.Family) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [family._batch(SAMPLES, generator) for _ in range(STEPS)]


def run_engine(world: World, plan: str, name: str, flush_every: int) -> dict[str, Any]:
    family = untied(name)
    engine = build(
        family.model(), plan, loss=cross_entropy, optimizer=harness.optimizer, options=Options(seed=SEED), world=world
    )
    axis, losses = world.axis("dp"), []
    for step, (inputs, targets) in enumerate(batches(family)):
        if flush_every and step and step % flush_every == 0:
            engine.flush()
        share = inputs.tensor_split(axis.size)[axis.rank], targets.tensor_split(axis.size)[axis.rank]
        losses.append(engine.step(share, trace=False).loss)
    engine.flush()
    params = [(part.name, part.value.view(part.global_shape).clone()) for part in engine.local_parameters()]
    versions, stage = engine._delayed.versions, engine._pipeline.parts[world.axis("pp").rank].stage
    return {"losses": losses, "params": params, "versions": versions.peak, "live": stage.peak_live}


def reference(plan_text: str, name: str, stages: list[list[str]]) -> DelayedRecord:
    plan, family = Plan.parse(plan_text), untied(name)
    model = family.model()
    place_holders(model, torch.float64, torch.device("cpu"))

    def take(param: nn.Parameter, value: Tensor) -> None:
        param.data = value.clone()

    Initializer(model, SEED, torch.float64, torch.device("cpu")).run(take)
    m, dp = plan.micro_batches, plan.dp.size

    def cut(batch: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Micro-batch j of all data ranks together."""
        ranks = [[part.tensor_split(m) for part in share] for share in zip(*(t.tensor_split(dp) for t in batch), strict=True)]
        return [tuple(torch.cat([rank[side][j] for rank in ranks]) for side in (0, 1)) for j in range(m)]  # type: ignore[misc]

    weights = stage_weights(make(plan.pp.schedule, plan.pp.size, m, num_steps=STEPS))
    stream = [cut(batch) for batch in batches(family)]
    return run_delayed(model, stream, Recipe(cross_entropy, harness.optimizer), list(zip(stages, weights, strict=True)))


@pytest.mark.parametrize("plan", ["pp2:pipedream mb1", "pp2:pipedream mb3", "pp4:pipedream mb2", "pp3:pipedream dp2 mb2"])
@pytest.mark.parametrize("family", ["mlp-deep", "gpt-deep", "llama-deep"])
def test_pipedream_equals_its_reference(ranks: Run, plan: str, family: str) -> None:
    compare(ranks, plan, family)


@pytest.mark.parametrize("plan", ["pp2:2bw mb2", "pp2:2bw mb5", "pp4:2bw mb4", "pp3:2bw dp2:ring mb3"])
@pytest.mark.parametrize("family", ["mlp-deep", "gpt-deep", "llama-deep"])
def test_2bw_equals_its_reference(ranks: Run, plan: str, family: str) -> None:
    compare(ranks, plan, family)


def compare(ranks: Run, plan: str, family: str) -> None:
    text = f"{plan} precision:float64"
    parsed = Plan.parse(text)
    found = ranks(parsed.world_size, run_engine, text, family, 0, plan=text)
    per_stage = found[:: parsed.dp.size]
    expected = reference(text, family, [[name for name, _ in rank["params"]] for rank in per_stage])
    for rank in found:
        assert rank["losses"] == pytest.approx(expected.losses, rel=TOLERANCE)
        for name, value in rank["params"]:
            error = relative_error(value, expected.params[name], largest(expected.params))
            assert error <= TOLERANCE, (name, error)
    simulated = simulate(make(parsed.pp.schedule, parsed.pp.size, parsed.micro_batches, num_steps=STEPS))
    assert tuple(rank["versions"] for rank in per_stage) == simulated.weight_versions
    assert tuple(rank["live"] for rank in per_stage) == simulated.peak_activations


@pytest.mark.parametrize("plan", ["pp2:pipedream mb2", "pp2:2bw mb2"])
def test_a_flush_after_every_step_leaves_no_delay_over_steps(ranks: Run, plan: str) -> None:
    """With a flush a stream is one step long: 2BW is then gradient accumulation, as one device has it."""
    text = f"{plan} precision:float64"
    flushed = ranks(2, run_engine, text, "mlp-deep", 1, plan=text)
    streamed = ranks(2, run_engine, text, "mlp-deep", 0, plan=text)
    assert flushed[0]["losses"][:1] == streamed[0]["losses"][:1]
    assert flushed[0]["losses"] != streamed[0]["losses"]


def refused(world: World, plan: str, family: str, clip: float | None) -> str:
    with pytest.raises((ModelError, PlanError)) as caught:
        build(
            harness.family_of(family).model(),
            plan,
            loss=cross_entropy,
            optimizer=harness.optimizer,
            options=Options(clip_grad_norm=clip),
            world=world,
        )
    return str(caught.value)


def test_what_has_no_meaning_is_refused(ranks: Run) -> None:
    assert "several stages; do not tie it" in ranks(2, refused, "pp2:pipedream mb2", "gpt-deep", None, plan="pp2")[0]
    assert "no global norm" in ranks(2, refused, "pp2:2bw mb2", "mlp-deep", 1.0, plan="pp2")[0]
    assert "take one of these" in ranks(4, refused, "pp2:2bw dp2:zero1 mb2", "mlp-deep", None, plan="pp2 dp2")[0]

"""Asynchronous pipelines against one device with the same delayed gradients; their versions; that
they learn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from plait.comm import World
from plait.engine.build import Options, build
from plait.errors import ModelError, PlanError
from plait.models.losses import cross_entropy
from plait.parallel.pipeline.schedules import make
from plait.parallel.pipeline.simulate import simulate
from plait.plan import Plan
from plait.verify.record.compare import largest, relative_error
from tests.parity import families, harness
from tests.parity.delayed import STEPS, reference, run_engine
from tests.parity.harness import TOLERANCE

Run = Callable[..., list[Any]]


@pytest.mark.parametrize(
    "plan", ["pp2:pipedream mb1", "pp2:pipedream mb3", "pp4:pipedream mb2", "pp3:pipedream dp2 mb2"]
)
@pytest.mark.parametrize("family", ["mlp-deep", "gpt-deep", "llama-deep"])
def test_pipedream_equals_its_reference(ranks: Run, plan: str, family: str) -> None:
    compare(ranks, plan, family)


@pytest.mark.parametrize(
    "plan", ["pp2:2bw mb2", "pp2:2bw mb5", "pp4:2bw mb4", "pp3:2bw dp2:ring mb3"]
)
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
    simulated = simulate(
        make(parsed.pp.schedule, parsed.pp.size, parsed.micro_batches, num_steps=STEPS)
    )
    assert tuple(rank["versions"] for rank in per_stage) == simulated.weight_versions
    assert tuple(rank["live"] for rank in per_stage) == simulated.peak_activations


@pytest.mark.parametrize("plan", ["pp2:pipedream mb2", "pp2:2bw mb2"])
def test_a_flush_after_every_step_leaves_no_delay_over_steps(ranks: Run, plan: str) -> None:
    """With a flush a stream is one step long: 2BW is then gradient accumulation, as one device has
    it.
    """
    text = f"{plan} precision:float64"
    flushed = ranks(2, run_engine, text, "mlp-deep", 1, plan=text)
    streamed = ranks(2, run_engine, text, "mlp-deep", 0, plan=text)
    assert flushed[0]["losses"][:1] == streamed[0]["losses"][:1]
    assert flushed[0]["losses"] != streamed[0]["losses"]


def refused(world: World, plan: str, family: str, clip: float | None) -> str:
    with pytest.raises((ModelError, PlanError)) as caught:
        build(
            families.family_of(family).model(),
            plan,
            loss=cross_entropy,
            optimizer=harness.optimizer,
            options=Options(clip_grad_norm=clip),
            world=world,
        )
    return str(caught.value)


def test_what_has_no_meaning_is_refused(ranks: Run) -> None:
    assert (
        "several stages; do not tie it"
        in ranks(2, refused, "pp2:pipedream mb2", "gpt-deep", None, plan="pp2")[0]
    )
    assert "no global norm" in ranks(2, refused, "pp2:2bw mb2", "mlp-deep", 1.0, plan="pp2")[0]
    assert (
        "take one of these"
        in ranks(4, refused, "pp2:2bw dp2:zero1 mb2", "mlp-deep", None, plan="pp2 dp2")[0]
    )

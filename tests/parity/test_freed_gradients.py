"""Gradients whose memory comes with the first of a step and goes with the next step, as on GPUs."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from plait.comm import World
from plait.comm.backends.base import Backend
from plait.comm.backends.through_host import ThroughHost
from plait.comm.simulated import simulate
from plait.mesh import Mesh
from plait.parallel.data import gradients
from tests.helpers.pool import mesh_of
from tests.parity.families import family_of
from tests.parity.harness import TOLERANCE, check, make_engine


@pytest.fixture(autouse=True)
def freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory holds no numbers: whoever reads an element before it is written sees it."""
    plain = gradients.BucketState._make_room

    def make_room(flat: Tensor) -> None:
        plain(flat)
        flat.fill_(float("nan"))

    monkeypatch.setattr(gradients, "are_freed", lambda device: True)
    monkeypatch.setattr(gradients.BucketState, "_make_room", staticmethod(make_room))


def without_shared_memory(world: World, backend: Backend) -> Backend:
    return ThroughHost(backend)


def run(n: int, fn: Any, *args: Any, plan: str | Mesh | None = None) -> list[Any]:
    return simulate(mesh_of(plan, n), fn, *args, wrap=without_shared_memory)


@pytest.mark.parametrize(
    ("plan", "family"),
    [
        ("dp1 mb2", "gpt"),
        ("dp2 mb3", "gpt"),
        ("dp3 mb2", "gpt"),
        ("dp2:ring", "gpt"),
        ("dp2:zero1 mb2", "gpt"),
        ("dp2:zero2", "gpt"),
        ("dp2:server", "mlp"),
        ("tp2:1d,sp", "split-llama"),
        ("pp2:1f1b mb4", "gpt-deep"),
        ("pp2:zbv dp2:zero1 mb4", "gpt-deep"),
        ("dp2 ep2 mb2", "mixtral-plain"),
    ],
)
def test_gradients_whose_memory_comes_and_goes_are_equal(plan: str, family: str) -> None:
    text = f"{plan} precision:float64"
    assert check(run, text, family, 12, clip_grad_norm=0.5).largest < TOLERANCE


def test_a_step_begins_without_memory_for_gradients() -> None:
    """Some bytes of a gradient lie there after a step, and none when the next one computes."""

    def act(world: World) -> tuple[int, list[int]]:
        family = family_of("gpt")
        engine = make_engine(world, "dp1", family, {})
        batch = family.batches(4)[0]
        engine.step(batch, trace=False)
        states = engine.strategy.states
        after = sum(state.grad.untyped_storage().nbytes() for state in states)
        before: list[int] = []
        block = next(iter(engine.model.blocks))  # type: ignore[arg-type]

        def look(*_: object) -> None:
            before.append(sum(state.grad.untyped_storage().nbytes() for state in states))

        block.register_forward_pre_hook(look)
        engine.step(batch, trace=False)
        return after, before

    ((after, before),) = simulate(Mesh(), act)
    assert after > 0
    assert before == [0]

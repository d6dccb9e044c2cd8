"""Gradients taken as computed, and AdamW in one pass, beside torch's optimizer on float32 copies.

Kernels for it run on GPUs alone (`tests/accelerator`). Here torch's own operations stand for them,
so that all around the kernel is what runs there too.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from plait.comm import World
from plait.comm.simulated import simulate
from plait.engine import one_pass
from plait.engine.adamw import plain_kernel
from plait.engine.build import Options, build
from plait.engine.engine import Engine
from plait.engine.one_pass import MakeOptimizer
from plait.engine.open_step import OpenStep
from plait.mesh import Mesh
from plait.models.losses import cross_entropy
from plait.models.parameters import Parameters
from tests.parity.families import family_of

RATE = 1e-2
ROUNDING = 1e-6
"""AdamW in float32 by another order of operations, beside an update of about the rate."""
Values = dict[str, Tensor]


def adamw(params: Parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=RATE, weight_decay=0.1, fused=True)


def engine_of(
    world: World, plan: str, optimizer: MakeOptimizer = adamw, clip: float | None = 0.5
) -> Engine:
    return build(
        family_of("gpt").model(),
        plan,
        loss=cross_entropy,
        optimizer=optimizer,
        options=Options(clip_grad_norm=clip),
        world=world,
    )


def state_of(engine: Engine) -> Values:
    """Masters, moments and counts of all parameters, and what the layers see."""
    found: Values = {}
    for piece in engine.strategy.pieces:
        found[piece.name] = piece.value.detach().clone()
        for name, value in engine.update.optimizer.state[piece.value].items():
            found[f"{piece.name} {name}"] = value.clone()
    for name, param in engine.model.named_parameters():
        found[f"{name} as layers see it"] = param.detach().clone()
    return found


def steps(
    plan: str, num_steps: int = 1, optimizer: MakeOptimizer = adamw, clip: float | None = 0.5
) -> tuple[list[float], Values, set[torch.dtype]]:
    """Losses and norms, the state after steps, and the precisions of gradients before an update."""

    def act(world: World) -> tuple[list[float], Values, set[torch.dtype]]:
        engine = engine_of(world, plan, optimizer, clip)
        seen: set[torch.dtype] = set()
        widest = engine.update.change

        def change(*args: object) -> object:
            grads = (piece.value.grad for piece in engine.strategy.pieces)
            seen.update(grad.dtype for grad in grads if grad is not None)
            return widest(*args)

        engine.update.change = change  # type: ignore[method-assign, assignment]
        numbers = []
        for batch in family_of("gpt").batches(4)[:num_steps]:
            result = engine.step(batch, trace=False)
            numbers += [result.loss, result.grad_norm]
        return numbers, state_of(engine), seen

    (found,) = simulate(Mesh(), act)
    return found


@pytest.fixture
def at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_pass, "is_at_hand", lambda device, make_optimizer: True)
    monkeypatch.setattr(one_pass, "kernel_of_gpus", lambda: plain_kernel)


def assert_equal(found: Values, wanted: Values) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        bound = 2.0**-7 if value.dtype == torch.bfloat16 else ROUNDING
        size = value.float().abs().max().clamp(min=RATE)
        assert float((found[name].float() - value.float()).abs().max() / size) <= bound, name


def test_one_pass_is_the_update_of_torch(at_hand: None, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, state, seen = steps("dp1 precision:bf16")
    assert seen == {torch.bfloat16}
    monkeypatch.undo()
    before, wanted, plainly = steps("dp1 precision:bf16")
    assert plainly == {torch.float32}
    assert numbers == pytest.approx(before, rel=ROUNDING)
    assert_equal(state, wanted)


def test_layers_see_the_masters_rounded(at_hand: None) -> None:
    _, state, _ = steps("dp1 precision:bf16", 3)
    for name in [name for name in state if name.endswith("layers see it")]:
        master = state[name.removesuffix(" as layers see it")]
        assert torch.equal(state[name], master.bfloat16())


def with_hook(params: Parameters) -> torch.optim.Optimizer:
    made = adamw(params)
    made.register_step_post_hook(lambda *_: None)
    return made


def sgd(params: Parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=RATE)


@pytest.mark.parametrize("optimizer", [with_hook, sgd])
def test_other_optimizers_take_gradients_in_float32(
    at_hand: None, monkeypatch: pytest.MonkeyPatch, optimizer: MakeOptimizer
) -> None:
    """Bits are equal without clipping, whose norm is another order of sums."""
    numbers, state, seen = steps("dp1 precision:bf16", 3, optimizer, None)
    assert seen == {torch.bfloat16}
    monkeypatch.undo()
    before, wanted, _ = steps("dp1 precision:bf16", 3, optimizer, None)
    assert numbers == pytest.approx(before, rel=ROUNDING)
    for name, value in wanted.items():
        assert torch.equal(state[name], value), name


@pytest.mark.parametrize("plan", ["dp1", "dp1 precision:bf16 mb2", "dp1 precision:float64"])
def test_other_plans_add_gradients_up(at_hand: None, plan: str) -> None:
    _, _, seen = steps(plan)
    assert seen == {torch.float64 if "float64" in plan else torch.float32}


def test_a_second_backward_adds_in_the_precision_of_masters(
    at_hand: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(world: World) -> tuple[Values, set[torch.dtype]]:
        step = OpenStep.of(engine := engine_of(world, "dp1 precision:bf16"))
        first, second = family_of("gpt").batches(4)[:2]
        step.forward_backward(first, more=True)
        step.forward_backward(second)
        grads = {piece.name: piece.value.grad for piece in engine.strategy.pieces}
        values = {name: grad.float() for name, grad in grads.items() if grad is not None}
        return values, {grad.dtype for grad in grads.values() if grad is not None}

    ((found, dtypes),) = simulate(Mesh(), act)
    assert dtypes == {torch.float32}
    monkeypatch.undo()
    ((wanted, _),) = simulate(Mesh(), act)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def test_gradients_go_before_the_next_forward(at_hand: None) -> None:
    def act(world: World) -> list[int]:
        engine = engine_of(world, "dp1 precision:bf16")
        batch = family_of("gpt").batches(4)[0]
        engine.step(batch, trace=False)
        counts = [len(engine.strategy.live_tensors()["gradients"])]
        block = next(iter(engine.model.blocks))  # type: ignore[arg-type]

        def look(*_: object) -> None:
            values: list[nn.Parameter] = [piece.value for piece in engine.strategy.pieces]
            held = sum(value.grad is not None for value in values)
            counts.append(held + len(engine.strategy.live_tensors()["gradients"]))

        block.register_forward_pre_hook(look)
        engine.step(batch, trace=False)
        return counts

    ((after, before),) = simulate(Mesh(), act)
    assert after > 0
    assert before == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.AdamW(params, fused=True, amsgrad=True),
        lambda params: torch.optim.AdamW(params, fused=True, maximize=True),
        lambda params: torch.optim.AdamW(params, fused=False),
        lambda params: torch.optim.Adam(params, fused=True),
        with_hook,
        sgd,
    ],
)
def test_only_the_plain_form_is_taken(make: Callable[..., torch.optim.Optimizer]) -> None:
    assert not one_pass.takes(make([nn.Parameter(torch.zeros(2))]))


def test_a_function_that_wants_the_models_parameters_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make(params: Parameters) -> torch.optim.Optimizer:
        return adamw(Parameters([one for one in params.named() if one[0] == "head.weight"]))

    class Gpu:
        type = "cuda"

    monkeypatch.setattr(one_pass.importlib.util, "find_spec", lambda name: True)
    plain = torch.zeros
    monkeypatch.setattr(one_pass.torch, "zeros", lambda size, device: plain(size))
    assert one_pass.is_at_hand(Gpu(), adamw)  # type: ignore[arg-type]
    assert not one_pass.is_at_hand(Gpu(), make)  # type: ignore[arg-type]


def test_the_plain_form_is_taken() -> None:
    assert one_pass.takes(torch.optim.AdamW([nn.Parameter(torch.zeros(2))], fused=True))

"""The kernel that updates in one pass, beside the rule in torch's operations and torch's AdamW."""

from __future__ import annotations

import pytest
import torch

from plait.comm.simulated import simulate
from plait.engine.adamw import AdamWTensors, Rule, plain_kernel
from plait.mesh import Mesh
from tests.accelerator.on_device import is_there
from tests.parity.test_one_pass import assert_equal, engine_of, state_of

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not is_there(), reason="there is no GPU at hand"),
]
DEVICE = "cuda:0"
ROUNDING = 1e-6
STEPS = 3


Tensors = tuple[AdamWTensors, torch.Tensor]


def tensors(numel: int, offset: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """Tensors (numel,) that begin `offset` elements after an aligned place, and a gradient."""

    def some(kind: torch.dtype) -> torch.Tensor:
        return torch.randn(numel + offset, device=DEVICE).to(kind)[offset:]

    step = torch.tensor(1.0, device=DEVICE)
    wide = torch.float32
    return AdamWTensors(some(wide), some(wide), some(wide).abs(), some(dtype), step), some(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_is_the_rule(dtype: torch.dtype) -> None:
    from plait.engine.adamw_kernel import TritonKernel

    torch.manual_seed(0)
    sizes = [(1 << 20, 0), (5000, 0), (4096, 0), (17, 1), (1, 0), (3000, 3)]
    given = [tensors(numel, offset, dtype) for numel, offset in sizes]
    found, grads = [kept for kept, _ in given], [grad for _, grad in given]
    wanted = [
        AdamWTensors(*(array.clone() for array in one.arrays), one.step.clone()) for one in found
    ]
    update, by_torch = TritonKernel(found), plain_kernel(wanted)
    for step in range(1, STEPS + 1):
        rule = Rule(1e-2 / step, (0.9, 0.999), 1e-8, 0.1, 0.5)
        for kept in (*found, *wanted):
            kept.step.fill_(step)
        update(grads, rule)
        by_torch(grads, rule)
    for one, other in zip(found, wanted, strict=True):
        for array, beside in zip(one.arrays[:3], other.arrays[:3], strict=True):
            torch.testing.assert_close(array, beside, rtol=1e-5, atol=ROUNDING)
        assert torch.equal(one.copy, one.value.to(one.copy.dtype))


def test_an_engine_on_a_gpu_takes_one_pass_and_is_equal_to_torch() -> None:
    def act(world: object, is_watched: bool) -> tuple[object, set[torch.dtype]]:
        def optimizer(params: object) -> torch.optim.Optimizer:
            made = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, fused=True)  # type: ignore[arg-type]
            if is_watched:  # such a one is left to torch
                made.register_step_post_hook(lambda *_: None)
            return made

        from tests.parity.families import family_of

        engine = engine_of(world, "dp1 precision:bf16", optimizer)  # type: ignore[arg-type]
        batch = [part.to(DEVICE) for part in family_of("gpt").batches(4)[0]]
        engine.step(tuple(batch), trace=False)
        pieces = engine.strategy.pieces
        grads = {p.value.grad.dtype for p in pieces if p.value.grad is not None}
        return state_of(engine), grads

    ((state, dtypes),) = simulate(Mesh(), act, False, device=DEVICE)
    ((wanted, plainly),) = simulate(Mesh(), act, True, device=DEVICE)
    assert dtypes == {torch.bfloat16}
    assert plainly == {torch.float32}
    assert_equal(state, wanted)

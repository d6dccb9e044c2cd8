"""`precision:fp8`: torchao's own conversion on one device, and plans beside one device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from plait import verify
from plait.comm import World
from plait.comm.simulated import simulate
from plait.engine import eight_bits
from plait.engine.build import build
from plait.engine.engine import Engine
from plait.errors import ModelError, NotAvailable
from plait.mesh import Mesh
from plait.models.losses import cross_entropy
from plait.plan import Plan, check_runnable, is_runnable
from plait.verify.drift import DriftReport
from tests.parity.families import Family, family_of

KEYS = {
    **family_of("gpt").keys,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "tie_word_embeddings": False,
}
WIDE = Family("gpt", KEYS, (16,), family_of("gpt").classes, tokens=True)
CONFIG = {
    "model": {"name": "gpt", **KEYS},
    "data": {"name": "random", "seq_len": 16},
    "train": {"steps": 2, "global_batch": 8, "lr": 1e-2},
}
needs_torchao = pytest.mark.skipif(
    not eight_bits.is_at_hand(), reason="torchao is not installed: pip install 'plait[fp8]'"
)


def engine_of(world: World, plan: str, family: Family = WIDE) -> Engine:
    return build(
        family.model(),
        plan,
        loss=cross_entropy,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
        world=world,
    )


def start_and_gradients(world: World, plan: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    engine = engine_of(world, plan)
    start = {name: one.detach().clone() for name, one in engine.model.named_parameters()}
    engine.step(WIDE.batches(8)[0], trace=False)
    grads = {
        p.name: p.value.grad.clone() for p in engine.strategy.pieces if p.value.grad is not None
    }
    return start, grads


def by_torchao(start: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of a plain loop over a model that torchao has converted."""
    from torchao.float8 import convert_to_float8_training

    model = WIDE.model().to_empty(device="cpu").to(torch.bfloat16)
    model.load_state_dict(start, strict=False)

    def is_in_a_block(module: nn.Module, name: str) -> bool:
        return name.startswith("blocks.")

    convert_to_float8_training(model, module_filter_fn=is_in_a_block)
    inputs, targets = WIDE.batches(8)[0]
    total, count = cross_entropy(model(inputs), targets)
    (total / count).backward()
    return {
        name: one.grad.float() for name, one in model.named_parameters() if one.grad is not None
    }


@needs_torchao
def test_one_device_is_equal_to_the_conversion_of_torchao() -> None:
    ((start, grads),) = simulate(Mesh(), start_and_gradients, "dp1 precision:fp8")
    wanted = by_torchao(start)
    assert grads.keys() == wanted.keys()
    for name, grad in wanted.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-6, atol=0.0)
    ((_, in_bf16),) = simulate(Mesh(), start_and_gradients, "dp1 precision:bf16")
    far = [(in_bf16[name] - grad).norm() > 1e-2 * grad.norm() for name, grad in wanted.items()]
    assert any(far)


@needs_torchao
@pytest.mark.parametrize(
    "plan",
    [
        "dp2:zero3",
        *(
            pytest.param(plan, marks=pytest.mark.long)
            for plan in ("dp2:zero1 mb2", "pp2:1f1b mb2", "cp2:ring", "dp2 remat:full")
        ),
    ],
)
def test_a_plan_drifts_as_one_device_does(plan: str) -> None:
    report = verify.run(CONFIG, plan, dtype="fp8", steps=2)
    assert isinstance(report, DriftReport)
    assert report.ok and report.plan == str(Plan.parse(f"{plan} precision:fp8"))
    assert report.dtype == "fp8" and "one device in fp8" in report.text()


@needs_torchao
def test_a_run_in_eight_bits_learns() -> None:
    def act(world: World) -> list[float]:
        engine = engine_of(world, "dp2:zero2 precision:fp8")
        batch = tuple(part.tensor_split(2)[world.rank] for part in WIDE.batches(8)[0])
        return [engine.step(batch, trace=False).loss for _ in range(4)]

    losses = simulate(Mesh.of(Plan.parse("dp2:zero2")), act)
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


@pytest.mark.parametrize("plan", ["tp2", "dp2 ep2", "pp2:zb-h1 mb2", "tp4:2d"])
def test_layers_that_are_not_whole_are_refused(plan: str) -> None:
    asked = Plan.parse(f"{plan} precision:fp8").check()
    with pytest.raises(
        NotAvailable, match=r"precision:fp8 runs where linear layers are whole.*bf16"
    ):
        check_runnable(asked)
    assert not is_runnable(asked)
    assert is_runnable(Plan.parse("dp2:zero3 precision:fp8"))


@needs_torchao
@pytest.mark.parametrize(
    ("family", "samples", "message"),
    [
        (family_of("mlp"), 8, "whose inputs and outputs are multiples of 16"),
        (Family("gpt", KEYS, (15,), WIDE.classes, tokens=True), 3, "has 45 rows"),
    ],
)
def test_sizes_that_are_no_multiples_are_named(family: Family, samples: int, message: str) -> None:
    def act(world: World) -> None:
        engine_of(world, "dp1 precision:fp8", family).step(family.batches(samples)[0], trace=False)

    with pytest.raises(ModelError, match=message):
        simulate(Mesh(), act)


def test_the_package_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eight_bits, "find_spec", lambda name: None)
    with pytest.raises(
        NotAvailable, match=r'torchao, which is not installed: pip install "plait\[fp8\]"'
    ):
        eight_bits.check(Plan.parse("dp2 precision:fp8"))
    eight_bits.check(Plan.parse("dp2 precision:bf16"))

"""Linear layers of each mode against one device: forward, dX, dA, db, over random shapes; and the bytes that they send."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.comm import World
from plait.plan import Plan
from tests.unit.tensor.pairs import ROLES, Sizes, collect, pair, run_ranks, split_with_values, whole_of

MODES = [
    "tp1", "tp2", "tp3", "tp4:1d,sp", "tp1:2d", "tp4:2d", "tp9:2d", "tp1:2.5d", "tp2:2.5d,depth2", "tp8:2.5d,depth2",
    "tp12:2.5d,depth3", "tp1:3d", "tp8:3d", "tp27:3d",
]  # fmt: skip


def sizes_for(plan: str, seed: int) -> Sizes:
    """Random sizes that the grid divides, all of them distinct."""
    tp, draw = Plan.parse(plan).tp, random.Random(seed)
    unit = tp.q**2 if tp.mode == "3d" else tp.q
    samples = tp.q**2 if tp.mode == "3d" else tp.q * tp.depth
    into, middle, out = draw.sample(range(1, 6), 3)
    return Sizes(samples * draw.randint(1, 2), draw.randint(1, 3), unit * into, unit * middle, unit * out)


def check(plan: str, sizes: Sizes, *, bias: bool, make: Any = None, mean: float = 0.0, streams: bool = False) -> None:
    torch.manual_seed(3)
    roles = ROLES if make is None else {**ROLES, "norm": "norm"}
    model = pair(sizes, bias=bias, norm=make)
    x = torch.randn(sizes.samples, sizes.sequence, sizes.into, dtype=torch.float64) + mean
    direction = torch.randn(sizes.samples, sizes.sequence, sizes.out, dtype=torch.float64)
    inputs = x.clone().requires_grad_()
    y = model(inputs)
    (y * direction).sum().backward()
    expected = {name: param.grad for name, param in model.named_parameters()}
    copies = [copy.deepcopy(model) for _ in range(Plan.parse(plan).world_size)]

    def rank(world: World) -> Any:
        own = copies[world.rank]
        own.zero_grad()
        split = split_with_values(world, own, roles, plan, 0 if streams else 64 << 20)
        share = split.share(x, direction, len(x))
        mine = share.inputs.clone().requires_grad_()
        out = own(mine)
        features = split.outputs.features
        weight = share.targets
        if features is not None and features.size > 1:
            weight = weight.tensor_split(features.size, -1)[features.rank]
        (out * weight).sum().backward()
        grads = {name: param.grad for name, param in own.named_parameters()}
        split.sum_partial(list(grads.items()))
        assert not streams or set(split.run.choices) == {"stream"}
        samples = split.mode.residual.samples
        place = (0 if samples is None else samples.rank, 0 if features is None else features.rank)
        return place, out.detach(), mine.grad, collect(split, grads)

    results = run_ranks(plan, rank)
    rows = sorted({place[0] for place, *_ in results})
    columns = sorted({place[1] for place, *_ in results})
    outs = {place: out for place, out, *_ in results}
    close(torch.cat([torch.cat([outs[r, c] for c in columns], -1) for r in rows]), y.detach())
    for place, _, dx, _ in results:
        close(dx, inputs.grad.tensor_split(len(rows))[place[0]])
    for name, grad in expected.items():
        close(whole_of([parts[name] for *_, parts in results]), grad)


def close(value: Tensor, truth: Tensor) -> None:
    assert value.shape == truth.shape
    assert float((value - truth).abs().max()) <= 1e-10 * max(1.0, float(truth.abs().max()))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("plan", MODES)
def test_a_pair_equals_one_device(plan: str, bias: bool) -> None:
    for seed in range(2):
        check(plan, sizes_for(plan, seed), bias=bias)


@pytest.mark.parametrize("plan", ["tp4:2d", "tp9:2d", "tp8:2.5d,depth2", "tp16:2d"])
def test_streamed_panels_equal_one_device(plan: str) -> None:
    check(plan, sizes_for(plan, 4), bias=True, streams=True)


@pytest.mark.parametrize("make", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("plan", ["tp4:1d,sp", "tp4:2d", "tp9:2d", "tp8:2.5d,depth2", "tp8:3d"])
def test_norms_of_inputs_far_from_zero(plan: str, make: Any) -> None:
    """E[x^2] - E[x]^2 would leave nothing of the variance here."""
    check(plan, sizes_for(plan, 5), bias=True, make=make, mean=1e4)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    "plan", ["tp2", "tp4:1d,sp", "tp4:2d", "tp9:2d", "tp8:2.5d,depth2", "tp18:2.5d,depth2", "tp8:3d", "tp27:3d"]
)
def test_bytes_equal_the_formulae(plan: str, streams: bool) -> None:
    """Per rank, forward and backward of a column (M x K times K x N), in the elements of X, A and Y.

    1D: 2(P-1)/P X in backward. With sequence parallel (P-1)/P X forward and backward. 2D: three products that each move two
    matrices, 3(q-1)/q^2 (X + A). 2.5D: the same with X/d, and an all-reduce of A's block over depth. 3D: the published
    6(q-1)/q^3 = X, A, Y forward and dY, dX, dA backward, and X and A once more, as only parts of them are kept.
    """
    tp, sizes = Plan.parse(plan).tp, sizes_for(plan, 1)
    q, d = tp.q, tp.depth
    M, K, N = sizes.samples * sizes.sequence, sizes.into, sizes.middle
    X, A, Y = M * K, K * N, M * N
    formula = {
        "1d": 2 * (tp.size - 1) / tp.size * X,
        "2d": 3 * (q - 1) / q**2 * (X + A),
        "2.5d": 3 * (q - 1) / q**2 * (X / d + A) + 2 * (d - 1) / d * A / q**2,
        "3d": (q - 1) / q**3 * (3 * X + 3 * A + 2 * Y),
    }[tp.mode]

    def rank(world: World) -> int:
        model = nn.Sequential(nn.Linear(K, N, bias=False)).double()
        split = split_with_values(world, model, {"0": "column"}, plan, 0 if streams else 64 << 20)
        stream = split.mode.residual
        parts = 1 if stream.samples is None else stream.samples.size
        features = 1 if stream.features is None else stream.features.size
        x = torch.randn(sizes.samples // parts, sizes.sequence, K // features, dtype=torch.float64, requires_grad=True)
        before = world.ledger.copy()
        model(x).sum().backward()
        split.sum_partial([(name, param.grad) for name, param in model.named_parameters()])
        return world.ledger.since(before).bytes()

    assert (
        run_ranks(plan, rank) == [pytest.approx(formula * 8, abs=6 * q)] * tp.size
    )  # a broadcast's share is rounded down to a byte

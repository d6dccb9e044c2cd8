"""Linear layers of each mode against one device: forward, dX, dA, db, over random shapes; and the
bytes that they send.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.comm import World
from plait.plan import Plan
from tests.unit.parallel.tensor.pairs import (
    ROLES,
    Sizes,
    collect,
    pair,
    run_ranks,
    split_with_values,
    whole_of,
)

MODES = [
    "tp1", "tp2", "tp3", "tp4:1d,sp", "tp1:2d", "tp4:2d", "tp9:2d", "tp1:2.5d", "tp2:2.5d,depth2",
    "tp8:2.5d,depth2",
    "tp12:2.5d,depth3", "tp1:3d", "tp8:3d", "tp27:3d",
]  # fmt: skip


def sizes_for(plan: str, seed: int) -> Sizes:
    """Random sizes that the grid divides, all of them distinct."""
    tp = Plan.parse(plan).tp
    draw = random.Random(seed)
    unit = tp.q**2 if tp.mode == "3d" else tp.q
    samples = tp.q**2 if tp.mode == "3d" else tp.q * tp.depth
    into, middle, out = draw.sample(range(1, 6), 3)
    return Sizes(
        samples * draw.randint(1, 2), draw.randint(1, 3), unit * into, unit * middle, unit * out
    )


def check(
    plan: str,
    sizes: Sizes,
    *,
    bias: bool,
    make: Any = None,
    mean: float = 0.0,
    streams: bool = False,
) -> None:
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
        assert not streams or set(split.context.choices) == {"streamed"}
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


def formula(plan: str, role: str, sizes: Sizes) -> float:
    """Elements that a rank sends for one linear layer Y = X A (M x K times K x N), forward and
    backward.

    1D (Shoeybi et al., section 3): 2(P-1)/P of X for a column, of Y for a row. With sequence
    parallel (Korthikanti et al., section 4.2.2): a gather and a scatter of the same, and one gather
    more for the input that a column keeps in parts. 2D (Xu et al., section 3): three products that
    each move two matrices, (q-1)/q^2 of each: 3 X and 3 A. A row moves A and Y, and the panels of
    dY serve both products of its backward: 3 A and 2 Y. 2.5D (Wang et al., section 3): the same
    with 1/d of the activations, and an all-reduce of A's block over depth. 3D (Bian et al., section
    3): the published X, A, Y forward and dY, dX, dA backward, each (q-1)/q^3; and X and A once
    more, as only parts of them are kept.
    """
    tp = Plan.parse(plan).tp
    p = tp.size
    q = tp.q
    d = tp.depth
    M = sizes.samples * sizes.sequence
    K = sizes.into
    N = sizes.middle
    X = M * K
    A = K * N
    Y = M * N
    moved = X if role == "column" else Y
    if tp.mode == "1d":
        times = 2 if not tp.sequence_parallel else 3 if role == "column" else 2
        return times * (p - 1) / p * moved
    if tp.mode == "3d":
        return (q - 1) / q**3 * (3 * X + 3 * A + 2 * Y)
    times = 3 if role == "column" else 2
    return (q - 1) / q**2 * (times * moved / d + 3 * A) + 2 * (d - 1) / d * A / q**2


GRIDS = [
    "tp2",
    "tp4",
    "tp4:1d,sp",
    "tp4:2d",
    "tp9:2d",
    "tp8:2.5d,depth2",
    "tp18:2.5d,depth2",
    "tp8:3d",
    "tp27:3d",
]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("role", ["column", "row"])
@pytest.mark.parametrize("plan", GRIDS)
def test_bytes_equal_the_formulae(plan: str, role: str, streams: bool) -> None:
    tp = Plan.parse(plan).tp
    sizes = sizes_for(plan, 1)
    into = sizes.into
    out = sizes.middle

    def rank(world: World) -> int:
        model = nn.Sequential(nn.Linear(into, out, bias=False)).double()
        split = split_with_values(world, model, {"0": role}, plan, 0 if streams else 64 << 20)
        rule = split.mode.linear[role]
        shape = [sizes.samples, sizes.sequence, into]
        for axis, dim in (
            (rule.source.samples, 0),
            (rule.source.sequence, 1),
            (rule.source.features, 2),
        ):
            shape[dim] //= 1 if axis is None else axis.size
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        before = world.ledger.copy()
        model(x).sum().backward()
        split.sum_partial([(name, param.grad) for name, param in model.named_parameters()])
        assert (
            not streams
            or tp.mode not in ("2d", "2.5d")
            or set(split.context.choices) == {"streamed"}
        )
        return world.ledger.since(before).bytes()

    expected = formula(plan, role, sizes) * 8  # a broadcast's share is rounded down to a byte
    assert run_ranks(plan, rank) == [pytest.approx(expected, abs=6 * tp.q)] * tp.size


@pytest.mark.parametrize("plan", GRIDS)
def test_layers_that_take_the_same_tensor_move_it_once(plan: str) -> None:
    """q, k and v: the weights thrice, the input and its gradient once."""
    sizes = sizes_for(plan, 1)

    def bytes_of(number: int) -> int:
        def rank(world: World) -> int:
            model = nn.ModuleList(
                nn.Linear(sizes.into, sizes.middle, bias=False) for _ in range(number)
            ).double()
            split = split_with_values(world, model, {"*": "column"}, plan)
            rule = split.mode.linear["column"]
            shape = [sizes.samples, sizes.sequence, sizes.into]
            for axis, dim in (
                (rule.source.samples, 0),
                (rule.source.sequence, 1),
                (rule.source.features, 2),
            ):
                shape[dim] //= 1 if axis is None else axis.size
            x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
            before = world.ledger.copy()
            sum(layer(x) for layer in model).sum().backward()
            split.sum_partial([(name, param.grad) for name, param in model.named_parameters()])
            return world.ledger.since(before).bytes()

        return max(run_ranks(plan, rank))

    tp = Plan.parse(plan).tp
    moved = sizes.samples * sizes.sequence * sizes.into
    once = formula(plan, "column", sizes) * 8
    saved = {"1d": once, "3d": 3 * (tp.q - 1) / tp.q**3 * moved * 8}.get(
        tp.mode, 3 * (tp.q - 1) / tp.q**2 * moved / tp.depth * 8
    )
    assert bytes_of(3) == pytest.approx(3 * once - 2 * saved, abs=18 * tp.q)

"""float32 and bf16 under every strategy: the same run as on one device, as far as rounding lets it
be.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from plait import datasets
from plait.comm import Axis, World
from plait.engine.build import Options, build
from plait.engine.precision import LossScale, Precision
from plait.engine.stages.tied import TiedSum
from plait.errors import NonFiniteLoss, PlanError
from plait.models.losses import cross_entropy
from plait.parallel.tensor import TensorSplit
from plait.plan import Plan
from tests.parity.families import FAMILIES, SPLIT_FAMILIES, Family, family_of
from tests.parity.harness import SEED, make_engine

Run = Callable[..., list[Any]]
PLANS = [
    "dp2",
    "dp2:ring",
    "dp2:server",
    "dp2:zero1",
    "dp2:zero2",
    "dp2:zero3",
    "dp4:zero3",
    "dp2:zero1,offload",
]
SPLIT = SPLIT_FAMILIES["llama"]
GPT = Family(
    "gpt",
    {**FAMILIES["gpt"].keys, "vocab_size": 256, "max_position_embeddings": 32},
    (32,),
    256,
    tokens=True,
)


def corpus(
    world: World, plan: str, steps: int
) -> tuple[float, dict[str, list[str]], dict[str, int]]:
    """Train on the source of the standard library; the last loss, the dtypes of state, the bytes
    held.
    """
    engine = build(
        GPT.model(),
        plan,
        loss=cross_entropy,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
        options=Options(seed=SEED),
        world=world,
    )
    axis = world.axis("dp")
    dataset = datasets.make({"name": "stdlib", "seq_len": 32}, {"name": "gpt", **GPT.keys})
    loader = datasets.Loader(dataset, 8, dp_size=axis.size, dp_rank=axis.rank)
    for _ in range(steps):
        loss = engine.step(next(loader), trace=False).loss
    state = engine.update.optimizer.state.values()
    dtypes = {
        "parameters": sorted({str(param.dtype) for param in engine.model.parameters()}),
        "masters": sorted({str(piece.value.dtype) for piece in engine.strategy.pieces}),
        "gradients": sorted(
            {
                str(piece.value.grad.dtype)
                for piece in engine.strategy.pieces
                if piece.value.grad is not None
            }
        ),
        "moments": sorted({str(values["exp_avg"].dtype) for values in state}),
    }
    return loss, dtypes, engine.memory()


@pytest.fixture(scope="module")
def one_device(rank_pool: Any) -> float:
    return float(rank_pool.run(1, corpus, "dp1", 20)[0][0])


@pytest.mark.parametrize("plan", PLANS)
def test_float32_ends_at_the_same_loss(ranks: Run, one_device: float, plan: str) -> None:
    results = ranks(int(plan[2]), corpus, plan, 20, plan=plan)
    assert len({loss for loss, _, _ in results}) == 1
    assert results[0][0] == pytest.approx(one_device, rel=1e-5)
    assert one_device < 5.2  # from 5.55: it has learnt something


@pytest.mark.parametrize("plan", PLANS)
def test_bf16_keeps_float32_masters_and_sums(ranks: Run, one_device: float, plan: str) -> None:
    results = ranks(int(plan[2]), corpus, f"{plan} precision:bf16", 20, plan=plan)
    for loss, dtypes, _ in results:
        assert dtypes == {
            "parameters": ["torch.bfloat16"],
            "masters": ["torch.float32"],
            "gradients": ["torch.float32"],
            "moments": ["torch.float32"],
        }
        assert loss == pytest.approx(one_device, rel=2e-2)


def test_bf16_model_state_is_that_of_mixed_precision(ranks: Run) -> None:
    """2 bytes of parameters; K = 12 of master and moments, sharded; gradients in float32, 4 bytes,
    sharded from stage 2 on.
    """
    for _, _, memory in ranks(2, corpus, "dp2:zero2 precision:bf16", 2, plan="dp2"):
        numel = memory["parameters"] / 2
        assert memory["optimizer"] == pytest.approx(12 * numel / 2, rel=0.02)
        assert memory["gradients"] == pytest.approx(4 * numel / 2, rel=0.02)


class Weights(torch.nn.Module):
    """Its gradient is the sum of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def total(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return output.float().sum(), torch.tensor(float(len(output)))


def summed_gradient(world: World, plan: str) -> float:
    """Of 16 samples, one of which is 2^9 times as large as the others: bf16 would lose these one by
    one.
    """
    engine = build(
        Weights(),
        plan,
        loss=total,
        optimizer=torch.optim.SGD,
        options=Options(seed=SEED),
        world=world,
    )
    grads: list[Any] = []
    engine.before_update.append(
        lambda e: grads.extend(part.values.clone() for part in e.local_gradients())
    )
    axis = world.axis("dp")
    x = torch.full((16, 3), 2.0**-9)
    x[0] = 1.0
    share = x.tensor_split(axis.size)[axis.rank]
    engine.step((share, torch.zeros(len(share))), trace=False)
    return max((float(grad.max()) for grad in grads if grad.numel()), default=0.0)


@pytest.mark.parametrize(
    "plan", ["mb16", *(f"{plan} mb{8 if plan[2] == '2' else 4}" for plan in PLANS)]
)
def test_sums_over_micro_batches_and_ranks_lose_nothing_in_bf16(ranks: Run, plan: str) -> None:
    found = ranks(Plan.parse(plan).world_size, summed_gradient, f"{plan} precision:bf16", plan=plan)
    assert max(found) == (1 + 15 * 2.0**-9) / 16


EVERY_AXIS = {
    "dp2:zero1": ("split-gpt", "dp"),
    "dp2:ring": ("split-gpt", "dp"),
    "dp2:server": ("split-gpt", "dp"),
    "dp4:zero3,replicate2": ("split-gpt", "dp"),
    "dp4 ep2": ("mixtral-plain", "dp"),
    "tp2": ("split-gpt", None),
    "tp2:1d,sp": ("split-gpt", "tensor"),
    "tp4:2d": ("split-gpt", "tensor"),
    "tp4:2.5d,depth1": ("split-llama", "tensor"),
    "tp8:3d": ("split-llama", "tensor"),
    "pp2:1f1b": ("split-gpt", "tied"),
    "pp2:zb-h1 mb2": ("split-gpt", "tied"),
    "pp2:2bw dp2": ("split-llama", "dp"),
    "cp2:ring": ("long-llama", "dp"),
    "cp2:ulysses dp2:zero2": ("long-llama", "dp"),
}


def reductions(world: World, plan: str, family: Family) -> tuple[set[str], set[tuple[str, str]]]:
    """(dtypes of masters, gradients and moments; what gradients were summed over, in which
    dtype).
    """
    where = ["dp"]
    seen = set()
    kept = []

    def watch(owner: type, name: str, act: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        kept.append((owner, name, original))
        setattr(owner, name, functools.partialmethod(act, original))

    def told(axis: Axis, original: Any, tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        if not options.get("control") and (where[-1] != "dp" or "dp" in axis.name):
            seen.add((where[-1], str(tensor.dtype)))
        return original(axis, tensor, *args, **options)

    def inside(place: str) -> Callable[..., Any]:
        def act(self: Any, original: Any, *args: Any) -> None:
            where.append(place)
            original(self, *args)
            where.pop()

        return act

    for name in ("all_reduce", "reduce_scatter", "reduce", "shift", "send"):
        watch(Axis, name, told)
    watch(TensorSplit, "sum_partial", inside("tensor"))
    watch(TiedSum, "sum", inside("tied"))
    try:
        engine = make_engine(world, f"{plan} precision:bf16", family, {})
        axis = world.axis("dp")
        for batch in replace(family, num_steps=2).batches(8):
            engine.step(
                tuple(part.tensor_split(axis.size)[axis.rank] for part in batch), trace=False
            )
    finally:
        for owner, name, original in kept:
            setattr(owner, name, original)
    pieces = engine.strategy.pieces
    states = [values["exp_avg"] for values in engine.update.optimizer.state.values()]
    wide = [
        *(p.value for p in pieces),
        *(p.value.grad for p in pieces if p.value.grad is not None),
        *states,
    ]
    assert all(param.dtype == torch.bfloat16 for param in engine.model.parameters())
    return {str(tensor.dtype) for tensor in wide}, seen


@pytest.mark.parametrize("plan", EVERY_AXIS)
def test_bf16_keeps_masters_and_sums_gradients_in_float32_on_every_axis(
    ranks: Run, plan: str
) -> None:
    family, place = EVERY_AXIS[plan]
    for wide, seen in ranks(
        Plan.parse(plan).world_size, reductions, plan, family_of(family), plan=plan
    ):
        assert wide <= {"torch.float32"}
        assert {dtype for _, dtype in seen} <= {"torch.float32"}
        assert place is None or (place, "torch.float32") in seen


HALF = [
    "dp2", "dp2:zero3 mb2", "tp2", "tp2:1d,sp mb2", "pp2:zb-h1 mb2", "pp2:interleaved,v2 mb2",
    "cp2:ring", "tp4:2d",
    "pp2 tp2 dp2:zero1 mb2",
]  # fmt: skip


def in_float16(world: World, plan: str, family: Family, steps: int) -> list[Any]:
    """(loss, norm, scale, skipped, sum of the parameters) of each step."""
    engine = build(
        family.model(),
        plan,
        loss=cross_entropy,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        options=Options(seed=SEED, float16=True),
        world=world,
    )
    scale = engine._training_step.update.scale
    scale.value = 2.0**26  # far too large: the first steps must be dropped
    axis = world.axis("dp")
    seen = []
    for inputs, targets in family.batches(8):
        share = (
            inputs.tensor_split(axis.size)[axis.rank],
            targets.tensor_split(axis.size)[axis.rank],
        )
        result = engine.step(share, trace=False)
        total = sum(float(part.values.double().sum()) for part in engine.local_parameters())
        seen.append((result.loss, result.grad_norm, result.loss_scale, result.skipped, total))
    assert engine.scale_state()["mean_loss_scale"][0] == scale.value
    return seen


@pytest.mark.parametrize("plan", HALF)
def test_float16_finds_a_scale_that_all_ranks_agree_on(ranks: Run, plan: str) -> None:
    family = replace(SPLIT, num_steps=14)
    results = ranks(Plan.parse(plan).world_size, in_float16, plan, family, 14, plan=plan)
    for mine in results:
        assert [step[:4] for step in mine] == [
            step[:4] for step in results[0]
        ] or not math.isfinite(mine[0][1])
        assert [step[2:4] for step in mine] == [step[2:4] for step in results[0]]
    steps = results[0]
    dropped = [step[3] for step in steps]
    assert dropped[0] and not dropped[-1]
    for (_, _, scale, skipped, total), (_, _, later, dropped_later, after) in pairwise(steps):
        assert later == (scale / 2 if skipped else scale)
        assert (after == total) == dropped_later  # only a step that counts moves the weights


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ("dp2:local,every2", "do not step together"),
        ("pp2:2bw mb2", "updates each stage"),
        ("dp2 precision:bf16", "masters"),
    ],
)
def test_float16_is_refused_where_no_scale_can_be_agreed_on(plan: str, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        Precision.of(Plan.parse(plan), float16=True)


def test_a_scale_halves_on_overflow_doubles_after_many_good_steps_and_gives_up() -> None:
    scale = LossScale(4.0, growth_interval=2)
    for norm, value in [
        (1.0, 4.0),
        (1.0, 8.0),
        (math.inf, 4.0),
        (math.nan, 2.0),
        (1.0, 2.0),
        (1.0, 4.0),
    ]:
        assert scale.judge(norm, 1) == math.isfinite(norm)
        scale.adapt()
        assert scale.value == value
    other = LossScale()
    other.load(scale.state())
    assert other.state() == scale.state()
    scale.value = LossScale.LEAST
    with pytest.raises(NonFiniteLoss, match="use bf16"):
        scale.judge(math.inf, 3)


def workers(world: World, aggregate: str) -> list[bool]:
    """Whether each of two steps in float16 was left out."""
    family = replace(SPLIT, num_steps=2)
    options = Options(float16=True, aggregate=aggregate)
    adam = torch.optim.AdamW
    engine = build(
        family.model(), "dp2", loss=cross_entropy, optimizer=adam, options=options, world=world
    )
    batches = engine.prepare(family.batches(64))
    return [engine.step(batch, trace=False).skipped for batch in batches]


@pytest.mark.parametrize("aggregate", ["sum", "mean"])
def test_the_first_steps_in_float16_count(ranks: Run, aggregate: str) -> None:
    assert ranks(2, workers, aggregate, plan="dp2")[0] == [False, False]


def test_a_scale_of_sums_is_no_start_for_one_of_means() -> None:
    kept = LossScale(2.0**4, of_sums=True)
    of_means, of_sums = LossScale(), LossScale(of_sums=True)
    of_means.load_meta(kept.meta())
    of_sums.load_meta(kept.meta())
    assert of_means.value == LossScale().value
    assert of_sums.state() == kept.state()

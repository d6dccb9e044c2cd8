"""The parity table of the context axis: ring and Ulysses, alone and with data parallelism, against
one device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from plait import models
from plait.comm import World
from plait.engine.build import Options, build
from plait.mesh import Mesh
from plait.models import losses
from plait.parallel.context import ContextGroup
from plait.parallel.context.ring import ring_attention
from plait.plan import Plan
from tests.helpers.rows import long_but
from tests.parity.families import LONG
from tests.parity.harness import SEED, TOLERANCE, check, join, optimizer
from tests.parity.hugging_face import GROUPED, causal

Run = Callable[..., list[Any]]
MIXTRAL_LONG = {**LONG, "num_local_experts": 4, "seq_aux": True, "router_aux_loss_coef": 0.1}


@pytest.mark.parametrize("family", long_but(["long-llama"], ["long-llama", "long-gpt"]))
@pytest.mark.parametrize("plan", ["cp2:ring", "cp4:ring mb2", "cp2:ulysses mb2", "cp4:ulysses"])
def test_equals_one_device(ranks: Run, plan: str, family: str) -> None:
    outcome = check(ranks, f"{plan} precision:float64", family, 5)
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.parametrize(
    "plan",
    long_but(
        ["cp2:ulysses dp2:zero2 mb2", "cp2:ring dp2:zero3"],
        [
            "cp2:ring dp2:zero1 mb2",
            "cp2:ulysses dp2:zero2 mb2",
            "cp2:ring dp2:zero3",
            "cp2:ulysses dp2:ring",
            "cp2:ring dp2:server",
            "cp2:ring dp2:zero3,replicate2",
        ],
    ),
)
def test_shards_over_data_and_context(ranks: Run, plan: str) -> None:
    outcome = check(ranks, f"{plan} precision:float64", "long-llama", 5, clip_grad_norm=0.05)
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.parametrize("family", ["hf-gpt2", pytest.param("hf-bert", marks=pytest.mark.long)])
@pytest.mark.parametrize("plan", ["cp2:ring", "cp2:ulysses mb2"])
def test_hugging_face_models_equal_one_device(ranks: Run, plan: str, family: str) -> None:
    outcome = check(ranks, f"{plan} precision:float64", family, 5)
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.parametrize("plan", [pytest.param("dp2 ep2", marks=pytest.mark.long), "cp2:ring ep2"])
def test_packed_experts_of_hugging_face_equal_one_device(ranks: Run, plan: str) -> None:
    keys = {**GROUPED, "head_dim": 4, "pad_token_id": 0, "num_local_experts": 4}
    family = causal(model_type="gpt_oss", num_experts_per_tok=2, sliding_window=4, **keys)
    outcome = check(ranks, f"{plan} precision:float64", family, 6)
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.parametrize("family", [pytest.param("long-llama", marks=pytest.mark.long), "long-gpt"])
@pytest.mark.parametrize(
    "plan",
    [
        "cp2:ring tp2 dp2:zero1",
        "cp2:ring tp2:1d,sp",
        "cp2:ulysses tp2:1d,sp",
        "cp2:ring tp4:2d",
        "pp2:1f1b cp2:ring mb2",
    ],
)
def test_composes(ranks: Run, plan: str, family: str) -> None:
    outcome = check(ranks, f"{plan} precision:float64", family, 5)
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.parametrize("plan", ["cp2:ring mb2", "cp2:ulysses mb2", "cp2:ring dp2:zero3 mb2"])
@pytest.mark.parametrize("remat", long_but(["selective"], ["selective", "full"]))
def test_recomputes(ranks: Run, plan: str, remat: str) -> None:
    outcome = check(ranks, f"{plan} remat:{remat} precision:float64", "long-llama", 5)
    assert outcome.largest <= TOLERANCE, outcome


def packed(world: World, plan: str) -> list[Any]:
    """Three steps on packed sequences: losses and parts of the parameters. The labels of documents'
    ends count for nothing.
    """
    with torch.device("meta"):
        model = models.make("llama", **MIXTRAL_LONG)
    engine = build(
        model,
        plan,
        loss=losses.cross_entropy,
        optimizer=optimizer,
        options=Options(seed=SEED, clip_grad_norm=0.5),
        world=world,
    )
    axis = world.axis("dp")
    seen = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 32, (5, 17), generator=generator)
        documents = (torch.rand(5, 17, generator=generator) < 0.25).long().cumsum(1)
        labels = tokens[:, 1:].masked_fill(documents[:, 1:] != documents[:, :-1], -100)
        own = [
            part.tensor_split(axis.size)[axis.rank]
            for part in (tokens[:, :-1], documents[:, :-1], labels)
        ]
        result = engine.step(((own[0], own[1]), own[2]), trace=False)
        seen.append((result.loss, result.grad_norm, engine.local_parameters()))
        seen[-1] = (
            *seen[-1][:2],
            [(p.name, p.global_shape, p.index(), p.values.clone()) for p in seen[-1][2]],
        )
    return seen


@pytest.mark.parametrize(
    "plan",
    long_but(
        ["cp2:ring", "cp2:ulysses dp2:zero3 ep4", "pp2:1f1b cp2:ring mb2"],
        [
            "cp2:ring",
            "cp4:ring mb2",
            "cp2:ulysses mb2 remat:full",
            "cp2:ring tp2 dp2:zero1",
            "cp2:ulysses dp2:zero3 ep4",
            "pp2:1f1b cp2:ring mb2",
            "pp2:1f1b cp2:ulysses dp2 ep2 mb2",
            "cp2:ring tp2:1d,sp",
        ],
    ),
)
def test_packed_sequences_under_every_axis(ranks: Run, plan: str) -> None:
    found = ranks(Plan.parse(plan).world_size, packed, f"{plan} precision:float64", plan=plan)
    micro_batches = Plan.parse(plan).micro_batches
    alone = ranks(1, packed, f"dp1 mb{micro_batches} precision:float64", plan="dp1")[0]
    for step, (loss, norm, params) in enumerate(alone):
        for rank in found:
            assert rank[step][0] == pytest.approx(loss, rel=TOLERANCE) and rank[step][
                1
            ] == pytest.approx(norm, rel=TOLERANCE)
        whole = join([rank[step][2] for rank in found])
        for name, value in join([params]).items():
            torch.testing.assert_close(whole[name], value, rtol=TOLERANCE, atol=TOLERANCE)


class _Live(TorchDispatchMode):
    """The most bytes of tensors made inside that lived at once. A view makes none, nor does writing
    where memory is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in [] if func.is_view or func._schema.is_mutable else tree_leaves(out):
            if (
                isinstance(leaf, Tensor)
                and (storage := leaf.untyped_storage()).data_ptr() not in self._known
            ):
                key = storage.data_ptr()
                size = storage.nbytes()
                self._known.add(key)
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, key, size)
        return out

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def ring_peak(world: World, positions_a_rank: int) -> int:
    group = ContextGroup(world.axis("cp"), "ring")
    group.cut(torch.zeros(1, positions_a_rank * world.size))
    q, k, v = (torch.randn(2, 4, positions_a_rank, 16, requires_grad=True) for _ in range(3))
    with _Live() as live:
        ring_attention(q, k, v, group).sum().backward()
    return live.peak


def test_memory_of_a_rank_stays_when_sequence_and_ranks_double(ranks: Run) -> None:
    peaks = {size: max(ranks(size, ring_peak, 128, plan=Mesh(cp=size))) for size in (2, 4, 8)}
    assert peaks[4] <= 1.05 * peaks[2] and peaks[8] <= 1.05 * peaks[4], peaks

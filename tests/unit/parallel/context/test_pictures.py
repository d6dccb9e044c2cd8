"""Context parallelism of models of pictures: patches and a class token, which seldom divide."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.engine.build import Options, build
from plait.engine.splitting import call_without_values
from plait.errors import DataError, ModelError
from plait.models.losses import cross_entropy
from plait.parallel.context.rehearsal import rehearse
from plait.parallel.context.trunk import Trunk
from plait.random_state import drawn_alone
from tests.helpers.threaded import threaded
from tests.parity.harness import TOLERANCE
from tests.parity.test_compile import quietly

CLASSES = 10
D = 16
H = 6  # that two and three ranks divide
HEAD = 4


class Attention(nn.Module):
    """`bias`: a learned one of each pair of positions; `hides`: the last two are seen by none."""

    def __init__(self, positions: int, kind: str) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * H * HEAD)
        self.out = nn.Linear(H * HEAD, D)
        self.bias = nn.Parameter(torch.randn(H, positions, positions)) if kind == "bias" else None
        self.hides = kind == "hides"
        self.positions = positions

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (H, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        mask = self.bias
        if self.hides:
            assert self.qkv.in_features
            mask = torch.ones(self.positions, dtype=torch.bool, device=x.device)
            mask[-2:] = False
            mask = mask[None, None, None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """`kind` is that of its attention, or `scaled`: it has a parameter of its own."""

    def __init__(self, positions: int, kind: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.attention = Attention(positions, kind)
        self.mlp = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.GELU())
        self.down = nn.Linear(2 * D, D)
        self.scale = nn.Parameter(torch.randn(D)) if kind == "scaled" else None

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.attention(self.norm(x))
        x = x + (mixed if self.scale is None else self.scale * mixed)
        return x + self.down(self.mlp(x))


class Pictures(nn.Module):
    """Pictures [B, 3, size, size] -> logits of the class token.

    `outside`: the residual stream is added between the blocks, as they see it whole.
    """

    def __init__(self, size: int = 8, kind: str = "", *, outside: bool = False) -> None:
        super().__init__()
        positions = (size // 2) ** 2 + 1
        self.patches = nn.Conv2d(3, D, 2, 2)
        self.first = nn.Parameter(torch.randn(1, 1, D))
        self.places = nn.Parameter(torch.randn(1, positions, D))
        self.blocks = nn.ModuleList(Block(positions, kind) for _ in range(2))
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, CLASSES)
        self.outside = outside

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.patches(pictures).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1)
        x = x + self.places[:, : x.shape[1]]
        for block in self.blocks:
            x = x + block(x) if self.outside else block(x)
        return self.head(self.norm(x)[:, 0] + x.mean(1))


class Mixed(nn.Module):
    """A block that shifts its positions itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x.roll(1, 1))


def of_pictures(model: nn.Module, size: int = 8) -> Trunk:
    example = torch.zeros(1, 3, size, size)
    blocks = [name for name, _ in model.named_modules() if name.startswith("blocks.")]
    blocks = [name for name in blocks if name.count(".") == 1]
    run = partial(call_without_values, model, example)
    return rehearse(model, blocks, run, "ring", 2)


def mean_loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output, targets)


def trained(
    world: Any,
    plan: str,
    how: dict[str, Any],
    loss: Any = cross_entropy,
    shapes: Sequence[tuple[int, int]] = (),
) -> list[Any]:
    """Losses, norms, and the mean over a batch of five that comes afterwards.

    `shapes`: the height and width of the pictures of each batch, those of the model by default.
    """
    with drawn_alone(0):
        model = Pictures(**how).double()
    engine = build(
        model,
        f"{plan} precision:float64",
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        options=Options(clip_grad_norm=100.0, compile_backend="aot_eager"),
        world=world,
    )
    size = how.get("size", 8)
    found = []
    for step, shape in enumerate(shapes or [(size, size)] * 2):
        generator = torch.Generator().manual_seed(step)
        pictures = torch.randn(5, 3, *shape, generator=generator).double()
        labels = torch.randint(0, CLASSES, (5,), generator=generator)
        result = engine.step((pictures, labels), trace=False)
        found += [result.loss, result.grad_norm]
    measured = engine.measure((pictures, labels), [cross_entropy])
    return [*found, *(value for one in measured for value in (one.total, one.count))]


@pytest.mark.parametrize("plan", ["cp2:ring", "cp2:ulysses", "cp3:ring", "cp3:ulysses"])
@pytest.mark.parametrize(
    "how",
    [
        {},  # 17 positions: one or three of filling
        {"size": 4},  # 5 positions: whole chunks of filling
        {"kind": "bias"},
        {"kind": "hides"},
        {"outside": True},
    ],
    ids=["whole", "few", "bias", "hides", "outside"],
)
def test_pictures_train_as_on_one_device(how: dict[str, Any], plan: str) -> None:
    alone = threaded(1, trained, "dp1", how, plan="dp1")[0]
    for found in threaded(int(plan[2]), trained, plan, how, plan=plan):
        assert found == pytest.approx(alone, rel=TOLERANCE)


def test_a_mean_is_shared_as_a_sum_is_and_micro_batches_may_have_one_sample() -> None:
    alone = threaded(1, trained, "dp1", {}, mean_loss, plan="dp1")[0]
    found = threaded(4, trained, "cp2:ring dp2 mb3", {}, mean_loss, plan="cp2:ring dp2 mb3")
    for one in found:
        assert one[:4] == pytest.approx(alone[:4], rel=TOLERANCE)


@pytest.mark.parametrize("how", [{}, {"outside": True}], ids=["whole", "outside"])
@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
@pytest.mark.parametrize("remat", ["full", "selective"])
def test_blocks_are_computed_again_in_backward(
    how: dict[str, Any], strategy: str, remat: str
) -> None:
    plan = f"cp2:{strategy} remat:{remat}"
    alone = threaded(1, trained, "dp1", how, plan="dp1")[0]
    for found in threaded(2, trained, plan, how, plan=plan):
        assert found == pytest.approx(alone, rel=TOLERANCE)


@pytest.mark.parametrize("plan", ["cp2:ring tp2", "cp2:ulysses tp2"])
def test_a_block_that_both_axes_change_has_its_parameter_on_every_rank(plan: str) -> None:
    """Context wraps the forward of the block, and then tensor parallelism copies the block."""
    how = {"kind": "scaled"}
    alone = threaded(1, trained, "dp1", how, plan="dp1")[0]
    for found in threaded(4, trained, plan, how, plan=plan):
        assert found == pytest.approx(alone, rel=TOLERANCE)


def trained_as_graphs(world: Any, plan: str) -> list[Any]:
    """Each time with new graphs: ranks live on from test to test, and would have them."""
    torch.compiler.reset()
    return trained(world, plan, {})


@pytest.mark.long
@pytest.mark.parametrize("plan", ["cp2:ring", "cp2:ulysses", "cp2:ring remat:full"])
def test_blocks_are_graphs(plan: str, ranks: Any) -> None:
    """What talks to other ranks runs between the graphs."""
    plan = f"{plan} compile"
    alone = threaded(1, trained, "dp1", {}, plan="dp1")[0]
    for found in quietly(ranks)(2, trained_as_graphs, plan, plan=plan):
        assert found == pytest.approx(alone, rel=TOLERANCE)


SHAPES = [(8, 8), (12, 6), (8, 6), (8, 8)]  # 17, 19, 13 and 17 positions


@pytest.mark.parametrize("plan", ["cp2:ring", "cp2:ulysses", "cp2:ring remat:full"])
def test_each_batch_may_have_pictures_of_another_size(plan: str) -> None:
    how = {"size": 12}
    alone = threaded(1, trained, "dp1", how, cross_entropy, SHAPES, plan="dp1")[0]
    for found in threaded(2, trained, plan, how, cross_entropy, SHAPES, plan=plan):
        assert found == pytest.approx(alone, rel=TOLERANCE)


@pytest.mark.parametrize("other", SHAPES[1:3])
def test_stages_take_pictures_of_one_size(other: tuple[int, int]) -> None:
    shapes = [(8, 8), other]
    plan = "pp2:1f1b cp2:ring"
    with pytest.raises(DataError, match=f"has {(other[0] * other[1]) // 4 + 1} positions .* 17; "):
        threaded(4, trained, plan, {"size": 12}, cross_entropy, shapes, plan=plan)


def test_the_cut_is_at_the_door_of_the_first_block() -> None:
    trunk = of_pictures(Pictures())
    assert trunk.closed == 17 and trunk.tail is not None and not trunk.cuts_head
    assert trunk.attention == {"blocks.0.attention", "blocks.1.attention"} and not trunk.whole
    assert set(of_pictures(Pictures(outside=True)).joined) == {"blocks.0", "blocks.1"}
    assert of_pictures(Pictures(size=16), 16).closed == 65


def test_blocks_that_need_every_position_are_refused_with_the_number() -> None:
    model = Pictures()
    model.blocks = nn.ModuleList([Mixed(), Mixed()])
    with pytest.raises(
        ModelError,
        match=r"each of blocks\.0 \.\. needs all 17 positions; no part is shared; and a Pictures",
    ):
        of_pictures(model)

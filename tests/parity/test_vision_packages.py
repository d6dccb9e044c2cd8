"""Models of `timm` and `diffusers` as they are: a few steps under a plan equal one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.comm import World
from plait.engine.build import build
from plait.verify.record.compare import largest, relative_error
from tests.helpers.threaded import threaded
from tests.parity.harness import TOLERANCE, join

PLANS = ["dp2:zero3", "tp2", "pp2:1f1b mb2"]


class Denoiser(nn.Module):
    """A model of `diffusers` that tells the noise of pictures at some times."""

    def __init__(self, inner: nn.Module, **fixed: Any) -> None:
        super().__init__()
        self.inner = inner
        self.fixed = fixed

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        more = {key: torch.zeros_like(timestep) for key in self.fixed}
        noise: Tensor = self.inner(x, timestep=timestep, return_dict=False, **more)[0]
        return noise


def unet() -> nn.Module:
    diffusers = pytest.importorskip("diffusers")
    inner = diffusers.UNet2DModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return Denoiser(inner)


def dit() -> nn.Module:
    diffusers = pytest.importorskip("diffusers")
    inner = diffusers.DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=3,
        out_channels=3,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
        norm_num_groups=4,
        dropout=0.0,
    )
    for module in inner.modules():
        if type(module).__name__ == "LabelEmbedding":
            module.dropout_prob = 0.0  # which drops classes, as training without guidance does not
    return Denoiser(inner, class_labels=True)


def of_timm(name: str, **sizes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        try:
            import timm
        except (
            ImportError,
            RuntimeError,
        ) as error:  # RuntimeError: its torchvision is for another torch
            pytest.skip(f"timm does not load: {error}")
        model: nn.Module = timm.create_model(name, num_classes=10, **sizes)
        return model

    return make


VIT = {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 4}
CONVNEXT = {"depths": (1, 1, 1, 1), "dims": (16, 16, 32, 32)}
MAKES = {
    "unet": unet,
    "dit": dit,
    "vit": of_timm("vit_tiny_patch16_224", **VIT),
    "convnext": of_timm("convnext_atto", **CONVNEXT),
    "resnet": of_timm("resnet18", block_args={}, channels=(8, 8, 16, 16)),
}


def squares(prediction: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(prediction, target)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01)


def batch(kind: str) -> tuple[Any, Tensor, Any]:
    """Inputs, targets and the loss of a model."""
    generator = torch.Generator().manual_seed(3)
    if kind in ("unet", "dit"):
        x = torch.randn(4, 3, 8, 8, generator=generator, dtype=torch.float64)
        times = torch.randint(0, 10, (4,), generator=generator)
        target = torch.randn(4, 3, 8, 8, generator=generator, dtype=torch.float64)
        return {"x": x, "timestep": times}, target, squares
    side = 64 if kind == "resnet" else 32  # else its last pictures are single points
    x = torch.randn(4, 3, side, side, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 10, (4,), generator=generator), F.cross_entropy


def part_of(tree: Any, size: int, rank: int) -> Any:
    if isinstance(tree, dict):
        return {key: value.tensor_split(size)[rank] for key, value in tree.items()}
    return tree.tensor_split(size)[rank]


def one_device(kind: str, model: nn.Module, slices: int) -> tuple[float, dict[str, Tensor]]:
    """Two steps; batch norms take their statistics over slices, as the ranks' are."""
    model = copy.deepcopy(model)
    optimizer = sgd(model.parameters())
    inputs, target, loss_of = batch(kind)
    for _ in range(2):
        optimizer.zero_grad()
        total = 0.0
        for index in range(slices):
            x = part_of(inputs, slices, index)
            logits = model(**x) if isinstance(x, dict) else model(x)
            loss = loss_of(logits, part_of(target, slices, index)) / slices
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
    return total, {name: param.detach() for name, param in model.named_parameters()}


def on_rank(world: World, plan: str, kind: str, model: nn.Module) -> Any:
    inputs, target, loss_of = batch(kind)
    engine = build(
        copy.deepcopy(model),
        f"{plan} precision:float64",
        loss=loss_of,
        optimizer=sgd,
        world=world,
    )
    axis = world.axis("dp")
    own = part_of(inputs, axis.size, axis.rank), part_of(target, axis.size, axis.rank)
    for _ in range(2):
        loss = engine.step(own, trace=False).loss
    parts = [
        (part.name, part.global_shape, part.index(), part.values.detach().clone())
        for part in engine.local_parameters()
    ]
    return loss, parts


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", MAKES)
def test_it_equals_one_device(kind: str, plan: str) -> None:
    torch.manual_seed(0)
    model = MAKES[kind]().double()
    expected_loss, expected = one_device(kind, model, 1 if plan == "tp2" else 2)
    results = threaded(2, on_rank, plan, kind, model, plan=plan)
    assert results[0][0] == pytest.approx(expected_loss, rel=TOLERANCE)
    found = join([parts for _, parts in results])
    scale = largest(expected)
    for name, value in expected.items():
        error = relative_error(found[name].view(value.shape), value, scale)
        assert error < TOLERANCE, name

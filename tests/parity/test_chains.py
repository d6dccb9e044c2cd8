"""A `Sequential` that does more than to call its children is cut with all that it does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.comm import World
from plait.engine.build import Options
from plait.engine.stages.chain import find_chain
from plait.engine.stages.cut import Cutting
from plait.errors import ModelError
from plait.models.gpt import GPT
from tests.parity.few_steps import batch, drawn, losses, plain
from tests.parity.harness import TOLERANCE

Run = Callable[..., list[Any]]
Change = Callable[[nn.Sequential], object]
PLAN = "pp2:1f1b mb2"
WIDTH = 6


class Waves(nn.Sequential):
    """Layers with a sine behind each."""

    def forward(self, x: Tensor) -> Tensor:
        """[samples, 6] -> the same."""
        for layer in self:
            x = layer(x).sin()
        return x


def model(kind: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    made = kind(first, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    drawn(made)
    return made


def sine(module: nn.Module, x: Tensor) -> Tensor:
    made: Tensor = nn.Sequential.forward(module, x).sin()  # type: ignore[arg-type]
    return made


CHANGES: dict[str, Change] = {
    "forward hook": lambda one: one.register_forward_hook(lambda _, __, result: result * 2),
    "forward pre-hook": lambda one: one.register_forward_pre_hook(lambda _, x: (x[0] * 2,)),
    "backward pre-hook": lambda one: one.register_full_backward_pre_hook(lambda _, g: (g[0] * 2,)),
    "forward": lambda one: setattr(one, "forward", MethodType(sine, one)),
}


def own_sine(module: nn.Module) -> None:
    forward = module.forward
    module.forward = lambda *args: forward(*args).sin()


CHANGES_OF_A_GPT: dict[str, Callable[[nn.Module], object]] = {
    "forward hook": lambda one: one.register_forward_hook(lambda _, __, result: result * 2),
    "forward pre-hook": lambda one: one.register_forward_pre_hook(lambda _, x: (x[0].flip(1),)),
    "backward pre-hook": lambda one: one.register_full_backward_pre_hook(lambda _, g: (g[0] * 2,)),
    "forward": own_sine,
}


def made(change: str, place: str, kind: type[nn.Sequential]) -> nn.Sequential:
    found = model(kind)
    if change:
        CHANGES[change](found if place == "model" else found[0])
    return found


def under_plan(world: World, *how: Any) -> list[float]:
    warnings.filterwarnings("ignore", "Full backward hook is firing")  # inputs have no gradient
    pair = batch(WIDTH)
    options = Options(cutting=Cutting(example=pair[0][:1]))
    return losses(world, made(*how), PLAN, pair, options=options)


@pytest.mark.parametrize(
    ("change", "place", "kind"),
    [
        *((change, place, nn.Sequential) for change in CHANGES for place in ("model", "first")),
        ("", "", Waves),
    ],
)
def test_equals_one_device(ranks: Run, change: str, place: str, kind: type[nn.Sequential]) -> None:
    warnings.filterwarnings("ignore", "Full backward hook is firing")
    expected = plain(made(change, place, kind), batch(WIDTH))
    for found in ranks(2, under_plan, change, place, kind, plan=PLAN):
        assert found == pytest.approx(expected, rel=TOLERANCE, abs=0)


def gpt(change: str, place: str) -> nn.Module:
    made = drawn(
        GPT(
            num_hidden_layers=2,
            hidden_size=8,
            num_attention_heads=2,
            vocab_size=16,
            max_position_embeddings=6,
        )
    )
    CHANGES_OF_A_GPT[change](made.get_submodule(place))
    return made


def tokens() -> tuple[Tensor, Tensor]:
    ids = torch.randint(16, (4, 6), generator=torch.Generator().manual_seed(1))
    return ids, ids.flip(0)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt_under_plan(world: World, *how: str) -> list[float]:
    warnings.filterwarnings("ignore", "Full backward hook is firing")  # tokens have no gradient
    return losses(world, gpt(*how), PLAN, tokens(), token_loss)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ("forward hook", ""),
        ("forward pre-hook", ""),
        ("backward pre-hook", ""),
        ("forward", ""),
        ("forward hook", "embed"),
        ("forward hook", "blocks.0"),
        ("forward", "blocks.1"),
        ("forward hook", "blocks.1.mlp"),
        ("forward", "head"),
    ],
)
def test_a_gpt_with_a_hook_equals_one_device(ranks: Run, change: str, place: str) -> None:
    """The file of `GPT` names a chain, which calls its links alone."""
    warnings.filterwarnings("ignore", "Full backward hook is firing")
    expected = plain(gpt(change, place), tokens(), token_loss)
    for found in ranks(2, gpt_under_plan, change, place, plan=PLAN):
        assert found == pytest.approx(expected, rel=TOLERANCE, abs=0)


def test_the_chain_of_a_sequential_has_its_innermost_layers() -> None:
    assert find_chain(model(), None) == ["0.0", "0.1", "0.2", "1", "2"]
    assert find_chain(made("forward hook", "first", nn.Sequential), None) == ["0", "1", "2"]
    assert find_chain(made("forward hook", "model", nn.Sequential), None) == []
    assert find_chain(model(Waves), None) == []


@pytest.mark.parametrize(("place", "what"), [("model", "the model"), ("first", "'0'")])
def test_a_chain_that_leaves_out_a_hook_is_refused(place: str, what: str) -> None:
    with pytest.raises(ModelError, match=f"leaves out the forward hook of {what}; leave chain out"):
        find_chain(made("forward hook", place, nn.Sequential), ["0.*", "1", "2"])


def test_a_chain_that_leaves_out_a_forward_is_refused() -> None:
    with pytest.raises(ModelError, match="leaves out the own forward of the model; leave chain"):
        find_chain(made("forward", "model", nn.Sequential), ["*"])
    with pytest.raises(ModelError, match="leaves out the own forward of '0'; leave chain out"):
        find_chain(made("forward", "first", nn.Sequential), ["0.*", "1", "2"])

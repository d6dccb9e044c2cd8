"""Context parallelism of models without a table of roles: what is found, what runs, what is
refused.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.engine.build import Options, build
from plait.engine.splitting import call_without_values, rehearse_sequences
from plait.errors import ModelError, PlanError
from plait.models import hf
from plait.models.losses import cross_entropy
from plait.parallel.context.rehearsal import rehearse
from plait.parallel.context.trunk import Trunk
from plait.plan import Plan
from plait.random_state import drawn_alone
from tests.helpers.threaded import threaded
from tests.parity.harness import TOLERANCE

V = 13
D = 16
H = 4


class Attention(nn.Module):
    """Causal attention; `rotates`: by positions that it counts itself."""

    def __init__(self, rotates: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D)
        self.rotates = rotates

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (H, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        if self.rotates:
            angle = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)[:, None]
            q = q * angle.cos()
            k = k * angle.cos()
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


class Shift(nn.Module):
    """Each token with the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight * F.pad(x, (0, 0, 1, -1))


class Block(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.mixer = mixer
        self.mlp = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm(x))
        return x + self.mlp(x)


class Language(nn.Module):
    """Token numbers -> logits. `mean`: every position is told the mean of all, before the head."""

    def __init__(self, mixers: list[nn.Module], *, mean: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.place = nn.Embedding(32, D)
        self.layers = nn.ModuleList(Block(mixer) for mixer in mixers)
        self.head = nn.Linear(D, V)
        self.mean = mean

    def forward(self, input_ids: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.embed(input_ids) + self.place(places)
        for layer in self.layers:
            x = layer(x)
        if self.mean:
            x = x + x.mean(1, keepdim=True)
        return self.head(x)


class Pooled(Language):
    """One vector of logits for a whole sequence."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids).mean(1)


class WithLoss(Language):
    """The loss inside of the forward."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return F.cross_entropy(super().forward(input_ids).flatten(0, 1), input_ids.flatten())


class Series(Language):
    """Sequences of vectors -> logits of each; `x` tells nothing of its shape."""

    def __init__(self) -> None:
        super().__init__([Attention(False)])
        self.read = nn.Linear(3, D)

    def forward(self, x: Tensor) -> Tensor:
        x = self.read(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def trunk_of(model: nn.Module, strategy: str = "ring") -> Trunk:
    example = torch.zeros(1, 8, dtype=torch.int64)
    blocks = [name for name, module in model.named_modules() if isinstance(module, Block)]
    run = partial(call_without_values, model, example)
    return rehearse(model, blocks, run, strategy, 2)


def trained(world: Any, model: nn.Module, plan: str) -> list[Any]:
    """Losses, and the gradients of the first step, on this rank."""
    engine = build(
        model.double(),
        f"{plan} precision:float64",
        loss=cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        options=Options(clip_grad_norm=100.0),
        world=world,
    )
    found = []
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, V, (4, 17), generator=generator)
        tokens, labels = (x.contiguous() for x in (tokens[:, :-1], tokens[:, 1:]))
        result = engine.step((tokens, labels), trace=False)
        found += [result.loss, result.grad_norm]
    return found


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "mean":
        return Language([Attention(False)], mean=True)
    mixers = {
        "attention": [Attention(False), Attention(False)],
        "rotated": [Attention(True), Attention(False)],
        "shift": [Shift(), Attention(False)],
        "convolution": [nn.Sequential(Across(), nn.Conv1d(D, D, 3, padding=1), Across())],
    }
    return Language(mixers[kind])


class Across(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
@pytest.mark.parametrize("kind", ["attention", "rotated", "shift", "convolution", "mean"])
def test_a_module_of_the_users_own_trains_as_on_one_device(kind: str, strategy: str) -> None:
    alone = threaded(1, trained, model_of(kind), "dp1", plan="dp1")[0]
    plan = f"cp2:{strategy}"

    def rank(world: Any) -> list[Any]:
        with drawn_alone(0):
            model = model_of(kind)
        return trained(world, model, plan)

    for found in threaded(2, rank, plan=plan):
        assert found == pytest.approx(alone, rel=TOLERANCE)


def series(world: Any, plan: str) -> float:
    with drawn_alone(0):
        model = Series().double()
    sgd = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    engine = build(
        model, f"{plan} precision:float64", loss=cross_entropy, optimizer=sgd, world=world
    )
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4, 16, 3, generator=generator)
    labels = torch.randint(0, V, (4, 16), generator=generator)
    engine.step((inputs, labels), trace=False)
    return engine.step((inputs, labels), trace=False).loss


def test_the_first_batch_shows_what_a_model_takes() -> None:
    alone = threaded(1, series, "dp1", plan="dp1")[0]
    found = threaded(2, series, "cp2:ring", plan="cp2:ring")
    assert found == pytest.approx([alone, alone], rel=TOLERANCE)


def test_parts_of_the_tensor_axis_ahead_of_the_blocks_are_refused() -> None:
    plan = Plan.parse("cp2:ring tp2:1d,sp")
    with pytest.raises(PlanError, match=r"needs it whole in a Language; use tp2:1d"):
        rehearse_sequences(model_of("attention"), plan, Options())
    rehearse_sequences(model_of("attention"), Plan.parse("cp2:ring tp2"), Options())


def test_what_mixes_positions_is_found() -> None:
    trunk = trunk_of(model_of("attention"))
    assert trunk.attention == {"layers.0.mixer", "layers.1.mixer"} and not trunk.whole
    assert trunk.tail is None
    trunk = trunk_of(model_of("rotated"))
    assert set(trunk.whole) == {"layers.0.mixer"} and trunk.attention == {"layers.1.mixer"}
    trunk = trunk_of(model_of("shift"))
    assert set(trunk.whole) == {"layers.0.mixer"}
    assert trunk_of(model_of("mean")).tail is not None


def test_refusals_name_the_module_and_the_cure() -> None:
    with pytest.raises(
        ModelError, match=r"the forward of Pooled mixes the positions.*leave cp out"
    ):
        trunk_of(Pooled([Attention(False)]))
    with pytest.raises(ModelError, match=r"the loss outside of the forward, by loss=, or leave cp"):
        trunk_of(WithLoss([Attention(False)]))
    noisy = Language([nn.Sequential(Attention(False), nn.Dropout(0.1))])
    with pytest.raises(ModelError, match=r"'layers.0.mixer.1' \(Dropout\) draws random numbers"):
        trunk_of(noisy)
    bare = Language([Attention(False)])
    with pytest.raises(ModelError, match="a Language calls none; name them as blocks"):
        rehearse(bare, [], lambda make: bare(make(torch.zeros(1, 8).long())), "ring", 2)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "mamba"])
def test_the_forms_of_hugging_face_models(family: str) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 64, "num_attention_heads": 4}
    more: dict[str, dict[str, Any]] = {
        "llama": {"intermediate_size": 48},
        "gpt2": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
        "bloom": {"pad_token_id": 0},
        "mamba": {"state_size": 8, "pad_token_id": 0},
    }
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = hf.make({"model_type": family, **sizes, **ends, **more[family]})
    example = torch.zeros(1, 8, dtype=torch.int64)
    blocks = [name for name, _ in model.named_modules() if name.endswith((".0", ".1"))]
    blocks = [name for name in blocks if name.count(".") == 3]
    trunk = rehearse(
        model, blocks, lambda make: call_without_values(model, example, make), "ring", 2
    )
    shared = {name.rpartition(".")[2] for name in trunk.attention}
    whole = {name.rpartition(".")[2] for name in trunk.whole}
    assert (shared, whole) == {
        "llama": ({"self_attn"}, set()),
        "gpt2": ({"attn"}, set()),
        "bloom": (set(), {"self_attention"}),
        "mamba": (set(), {"mixer"}),
    }[family]
    assert (trunk.tail is not None) == (family == "gpt2")

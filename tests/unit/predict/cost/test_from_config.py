"""Models that a config makes by code: described from a run on the meta device, on a sample of the
config's data.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import plait
from plait import models
from plait.errors import ModelError
from plait.predict.cost import describe
from plait.predict.cost.model.tables import assumed

DATA = {"name": "stdlib", "seq_len": 16}
TRAIN = {"global_batch": 8}
FIELDS = {"name": "fno", "hidden_size": 8, "num_hidden_layers": 3, "modes": 2}


class Net(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.head(x)


class Mixer(nn.Module):
    """An attention with one layer for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in parts)
        heads = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(heads.transpose(1, 2).flatten(2))


class Packed(nn.Module):
    """Blocks with a packed layer, and a head that stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        self.layers = nn.ModuleList(Mixer() for _ in range(2))
        self.head = nn.Linear(16, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def make(**keys: int) -> nn.Module:
    return Net(**keys)


def fail() -> nn.Module:
    raise KeyError("no such thing")


def test_a_users_own_model_is_planned_and_estimated() -> None:
    config = {
        "model": {"python": f"{__name__}:make", "arguments": {"width": 48}},
        "data": DATA,
        "train": TRAIN,
    }
    assert describe(config).parameters == sum(p.numel() for p in Net(48).parameters())
    best = plait.choose(config, cluster="h100x4")[0]
    assert best.fits and best.step_seconds > 0


def test_roles_of_a_users_model_let_it_be_split() -> None:
    roles = {"layers.*": "column", "embed": "replicated", "head": "replicated"}
    table = {"python": f"{__name__}:make", "roles": roles}
    guess = plait.estimate(
        {"model": table, "data": DATA, "train": TRAIN}, plan="tp2", cluster="h100x2"
    )
    assert guess.as_dict()["traffic"]["tp"] > 0


def test_roles_are_found_as_a_run_finds_them() -> None:
    """The table is that of `plait roles`, with the parts of the packed layer."""
    roles = {
        "": "whole",
        "layers.*.qkv": "column 16+16+16",
        "layers.*.out": "row",
        "embed": "replicated",
        "head": "replicated",
    }
    own = {"model": {"python": f"{__name__}:Packed"}, "data": DATA, "train": TRAIN}
    table = {**own, "model": {**own["model"], "roles": roles}}
    for plan in ("tp2", "tp2:1d,sp dp2", "tp4:2d"):
        found, given = (
            plait.estimate(one, plan=plan, cluster="h100x4").as_dict() for one in (own, table)
        )
        assert found == given
        assert found["traffic"]["tp"] > 0
    memory = plait.estimate(own, plan="tp2", cluster="h100x4").as_dict()["memory"]
    whole = sum(p.numel() for p in Packed().parameters())
    cut = 2 * (16 * 48 + 48 + 16 * 16)
    assert memory["parameters"] == 4 * (whole - cut / 2)


@pytest.mark.parametrize("side", [8, 16])
def test_fields_are_as_large_as_their_data(side: int) -> None:
    config = {"model": FIELDS, "data": {"name": "random", "image_size": side}}
    found = describe(config)
    assert found.parameters == sum(p.numel() for p in models.make(**FIELDS).parameters())
    kept = [block.saved.sequence + block.saved.tensor for block, _ in found.runs]
    other = describe({**config, "data": {"name": "random", "image_size": 2 * side}})
    assert all(
        b.saved.sequence + b.saved.tensor > 2 * k
        for (b, _), k in zip(other.runs, kept, strict=True)
        if k
    )


def test_code_that_fails_is_named() -> None:
    with pytest.raises(ModelError, match="fail' failed: KeyError"):
        describe({"model": {"python": f"{__name__}:fail"}, "data": DATA})


class Pairs(Net):
    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(super().forward(tokens).flatten(0, 1), targets.flatten())


def pairs() -> list[tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]]:
    tokens = torch.zeros(16, dtype=torch.long)
    return [((tokens, tokens), tokens)] * 8


def test_inputs_of_several_arguments_describe_a_users_model() -> None:
    config = {
        "model": {"python": f"{__name__}:Pairs"},
        "data": {"python": f"{__name__}:pairs"},
        "train": TRAIN,
    }
    assert describe(config).parameters == sum(p.numel() for p in Pairs().parameters())
    one = {**config, "model": {"python": f"{__name__}:make"}, "data": DATA}
    pair, alone = (plait.estimate(it, plan="dp2", cluster="h100x2") for it in (config, one))
    assert pair.as_dict()["traffic"] == alone.as_dict()["traffic"]


def sequences() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.zeros(24, dtype=torch.long), torch.zeros(24, dtype=torch.long))] * 8


def test_tokens_are_counted_as_a_run_counts_them() -> None:
    """A data set of one's own says by its samples how long a sequence is."""
    table = {"python": f"{__name__}:make"}
    config = {"model": table, "data": {"python": f"{__name__}:sequences"}, "train": TRAIN}
    found = plait.estimate(config, plan="dp2", cluster="h100x2").as_dict()
    assert found["unit"] == "tokens"
    assert found["tokens_per_second"] * found["step_seconds"] == pytest.approx(8 * 24)
    assert not assumed(config, 8, describe(config).seq_len)

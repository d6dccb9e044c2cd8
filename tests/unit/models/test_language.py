"""GPT and Llama hold for any shard of the heads, tie what they say they tie, and see the past
only.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from plait import models
from plait.errors import ModelError
from tests.unit.models.test_models import TINY

LANGUAGE = ["gpt", "llama"]


@pytest.mark.parametrize("name", LANGUAGE)
def test_only_the_past_counts(name: str) -> None:
    model = models.make(name, **TINY[name])
    ids = torch.randint(0, 32, (2, 8))
    other = ids.clone()
    other[:, 5:] = (ids[:, 5:] + 1) % 32
    torch.testing.assert_close(model(ids)[:, :5], model(other)[:, :5])
    assert not torch.allclose(model(ids)[:, 5:], model(other)[:, 5:])


def test_packed_documents_are_as_if_each_were_alone() -> None:
    torch.manual_seed(0)
    model = models.make("llama", **TINY["llama"]).double()
    ids = torch.randint(0, 32, (1, 8))
    together = model(ids, torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]]))
    alone = [model(part) for part in ids.split([3, 2, 3], dim=1)]
    torch.testing.assert_close(together, torch.cat(alone, dim=1))
    assert not torch.allclose(together, model(ids))


@pytest.mark.parametrize("name", LANGUAGE)
def test_two_halves_of_the_heads_add_up_to_attention(name: str) -> None:
    """The same forward on half of the heads: what a tensor-parallel rank runs."""
    torch.manual_seed(0)
    attention = models.make(name, **TINY[name]).double().blocks[0].attention
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    whole = {key: value.clone() for key, value in attention.state_dict().items()}
    expected = attention(x)
    total = torch.zeros_like(x)
    for half in range(2):
        for key, projection in attention.named_children():
            if isinstance(projection, nn.Linear):
                dim = 1 if key == "o" else 0
                projection.weight = nn.Parameter(whole[f"{key}.weight"].chunk(2, dim)[half])
                if projection.bias is not None:
                    bias = whole[f"{key}.bias"]
                    projection.bias = nn.Parameter(bias / 2 if key == "o" else bias.chunk(2)[half])
        total = total + attention(x)
    torch.testing.assert_close(total, expected)


@pytest.mark.parametrize("name", LANGUAGE)
def test_positions_of_a_slice_of_the_sequence(name: str) -> None:
    """A position module told where its slice stands gives that slice of what it gives for the
    whole.
    """
    model = models.make(name, **TINY[name])
    pattern = next(pattern for pattern, role in models.roles_of(name).items() if role == "position")
    module = model.get_submodule(pattern.replace("*", "0"))
    places = torch.tensor([1, 2, 6, 7])
    if name == "gpt":
        x = torch.randn(2, 8, 16)
        torch.testing.assert_close(module(x[:, places], positions=places), module(x)[:, places])
    else:
        q = torch.randn(2, 4, 8, 4)
        k = torch.randn(2, 2, 8, 4)
        for part, whole in zip(
            module(q[:, :, places], k[:, :, places], positions=places), module(q, k), strict=True
        ):
            torch.testing.assert_close(part, whole[:, :, places])


@pytest.mark.parametrize("name", LANGUAGE)
def test_tied_embeddings_are_one_parameter(name: str) -> None:
    tied, untied = (
        models.make(name, **TINY[name], tie_word_embeddings=tie) for tie in (True, False)
    )
    assert tied.head.weight is tied.embed.weight
    assert untied.head.weight is not untied.embed.weight
    assert (
        sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters())
        == 32 * 16
    )


@pytest.mark.parametrize("name", LANGUAGE)
def test_start_has_the_widths_it_promises(name: str) -> None:
    torch.manual_seed(0)
    keys = TINY[name] | {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 8,
        "initializer_range": 0.1,
    }
    model = models.make(name, **keys)
    residual = 0.1 / math.sqrt(16)
    for block in model.blocks:
        assert block.attention.q.weight.std().item() == pytest.approx(0.1, rel=0.05)
        assert block.attention.o.weight.std().item() == pytest.approx(residual, rel=0.05)
        assert block.mlp.down.weight.std().item() == pytest.approx(residual, rel=0.05)
    assert model.embed.weight.std().item() == pytest.approx(0.1, rel=0.05)
    assert all(not bias.any() for key, bias in model.named_parameters() if key.endswith(".bias"))


def test_gpt_names_a_sequence_that_is_too_long() -> None:
    model = models.make("gpt", **TINY["gpt"], max_position_embeddings=4)
    with pytest.raises(ModelError, match="5 tokens exceeds max_position_embeddings = 4"):
        model(torch.zeros(1, 5, dtype=torch.long))


@pytest.mark.parametrize("name", LANGUAGE)
def test_dropout_acts_in_training_only(name: str) -> None:
    torch.manual_seed(0)
    model = models.make(name, **TINY[name], dropout=0.5)
    ids = torch.randint(0, 32, (1, 4))
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    torch.testing.assert_close(model(ids), model(ids), rtol=0, atol=0)


def test_empty_batch_passes() -> None:
    for name in LANGUAGE:
        assert models.make(name, **TINY[name])(torch.zeros(0, 4, dtype=torch.long)).shape == (
            0,
            4,
            32,
        )

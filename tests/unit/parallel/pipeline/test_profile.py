"""Measured layers: every call of the forward in its order, bytes as they are; the model is left as
it was.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plait import models
from plait.engine.stages.cut import Cutting, cut
from plait.errors import ModelError
from plait.parallel.pipeline.partition import LayerProfile
from plait.parallel.pipeline.profile import profile_layers


def gpt() -> nn.Module:
    with torch.device("meta"):
        return models.make(
            "gpt",
            num_hidden_layers=2,
            hidden_size=8,
            num_attention_heads=2,
            vocab_size=16,
            max_position_embeddings=8,
        )


def test_a_linear_layer_keeps_its_input_and_has_four_copies_of_its_state() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2, bias=False))
    model[2].weight.requires_grad_(False)
    before = [param.clone() for param in model.parameters()]
    first, relu, last = profile_layers(model, ["0", "1", "2"], lambda: model(torch.ones(7, 3)))
    assert [layer.name for layer in (first, relu, last)] == ["0", "1", "2"]
    assert all(layer.seconds > 0 for layer in (first, relu, last))
    assert (first.state_bytes, relu.state_bytes, last.state_bytes) == (4 * 4 * 20, 0, 0)
    assert (first.activation_bytes, first.output_bytes) == (7 * 3 * 4, 7 * 5 * 4)
    assert all(
        torch.equal(a, b) and b.grad is None
        for a, b in zip(before, model.parameters(), strict=True)
    )
    assert "forward" not in vars(model[0])


def test_a_model_on_the_meta_device_stays_there_and_its_random_numbers_are_as_they_were() -> None:
    model = gpt()
    state = torch.get_rng_state()
    made = cut(model, [], 3, Cutting(measure=True, example=torch.zeros(1, 8, dtype=torch.int64)))
    assert made.partition is not None
    assert [layer.name for layer in made.partition.layers] == [
        name for links in made.links for name in links
    ]
    assert sum(layer.state_bytes for layer in made.partition.layers) == 16 * sum(
        p.numel() for p in model.parameters()
    )
    assert all(param.is_meta for param in model.parameters())
    assert torch.equal(state, torch.get_rng_state())


def test_all_ranks_cut_by_what_one_has_measured() -> None:
    def told(layers: list[LayerProfile]) -> list[LayerProfile]:
        return [
            LayerProfile(layer.name, 100.0 if layer.name == "embed" else 1.0) for layer in layers
        ]

    cutting = Cutting(measure=True, example=torch.zeros(1, 8, dtype=torch.int64))
    assert cut(gpt(), [], 2, cutting, agree=told).links[0] == ("embed",)


@pytest.mark.parametrize("measure", [False, True])
def test_a_stage_that_would_not_fit_is_refused(measure: bool) -> None:
    cutting = Cutting(
        measure=measure, example=torch.zeros(1, 8, dtype=torch.int64), memory_bytes=1000
    )
    with pytest.raises(ModelError, match="no cut into 2 stages fits"):
        cut(gpt(), [], 2, cutting, live=(2, 1))

"""What a model's own forward says about the flow between its units."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from plait.parallel.pipeline.dataflow import discover, find_units


class Masking(nn.Embedding):
    """An embedding that mixes its numbers with its vectors, as a part of a vocabulary does."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).masked_fill((ids > 3)[..., None], 0.0)


class SentToWeights(nn.Module):
    """Code that sends its inputs to where the weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Masking(8, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids.to(self.embed.weight.device))
        return self.blocks[0](x)


def test_inputs_that_code_sends_to_the_weights_have_memory_in_a_unit() -> None:
    model = SentToWeights().to("meta")
    ids = torch.zeros(1, 3, dtype=torch.int64)
    assert discover(model, ["blocks.0"], lambda: model(ids)).calls == ("embed", "blocks.0")


def test_parameters_of_the_model_itself_are_no_layer_where_it_has_others() -> None:
    model = SentToWeights()
    model.scale = nn.Parameter(torch.ones(4))
    assert find_units(model, []) == ["embed", "blocks.0"]
    assert find_units(nn.Linear(4, 4), []) == [""]

from __future__ import annotations

from torch import nn

from plait.parallel.data.units import find_blocks, match_blocks, split_units


class Model(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def test_blocks_are_units_and_what_stands_around_them_too() -> None:
    model = Model()
    blocks = find_blocks(model)
    assert blocks == match_blocks(model, "layers.*") == ["layers.0", "layers.1", "layers.2"]
    units = split_units(model, blocks)
    assert [unit.name for unit in units] == ["around embed", *blocks, "around norm"]
    assert [name for unit in units for name, _ in unit.params] == [
        name for name, _ in model.named_parameters()
    ]
    assert [unit.is_block for unit in units] == [False, True, True, True, False]


def test_a_shared_parameter_belongs_to_the_first_unit() -> None:
    units = split_units(Model(tied=True), ["layers.0", "layers.1", "layers.2"])
    assert [name for name, _ in units[0].params] == ["embed.weight"]
    assert [name for name, _ in units[-1].params] == ["norm.weight", "norm.bias"]


def test_a_pattern_matches_one_name_between_dots() -> None:
    assert match_blocks(Model(), "layers.*.0") == ["layers.0.0", "layers.1.0", "layers.2.0"]
    assert match_blocks(Model(), "nothing.*") == []


def test_frozen_parameters_are_known_apart() -> None:
    model = Model()
    model.embed.weight.requires_grad_(False)
    unit = split_units(model, [])[0]
    assert [name for name, _ in unit.frozen] == ["embed.weight"]
    assert "norm.weight" in [name for name, _ in unit.trainable]


def test_a_model_without_blocks_is_one_unit() -> None:
    model = nn.Linear(2, 3)
    assert find_blocks(model) == []
    (unit,) = split_units(model, [])
    assert [name for name, _ in unit.params] == ["weight", "bias"]

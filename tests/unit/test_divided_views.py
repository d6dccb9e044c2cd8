"""Views to sizes of the whole are divided for a rank's part, and others are left alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from plait.divided_views import DividedViews, divide_views, positions_of


class Turned(nn.Module):
    """Heads of the features that a layer gives, by the width of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, positions, 8] -> [samples, positions, part of 8], heads turned twice."""
        samples, positions, width = x.shape
        heads = self.layer(x).view(samples, positions, 4, width // 4).transpose(1, 2)
        return heads.transpose(1, 2).reshape(samples, positions, width)


@pytest.mark.parametrize("samples", [3, 0])
def test_a_part_is_viewed_by_sizes_of_the_whole(samples: int) -> None:
    module = Turned()
    divide_views(module, {4: 2, 3: 2}, 2)
    x = torch.randn(samples, 5, 8)
    assert torch.equal(module(x), module.layer(x))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.view(4, 6),
        lambda x: x.view(-1, 6),
        lambda x: x.reshape((2, 12)),
        lambda x: torch.reshape(x, [24]),
        lambda x: x.view(torch.int32),
    ],
)
def test_what_fits_is_left_alone(view: object) -> None:
    x = torch.arange(24.0)
    with DividedViews({1: 0, 2: 0}, 2):
        inside = view(x)  # type: ignore[operator]
    assert torch.equal(inside, view(x))  # type: ignore[operator]


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.view(4, 12),
        lambda x: x.view([4, 12]),
        lambda x: x.view(size=(4, 12)),
        lambda x: x.reshape(4, 12),
        lambda x: x.reshape(shape=(4, 12)),
        lambda x: torch.reshape(x, (4, 12)),
    ],
)
def test_all_ways_to_say_a_view_are_divided(view: object) -> None:
    with DividedViews({2: 1}, 2):
        assert view(torch.zeros(24)).shape == (4, 6)  # type: ignore[operator]


def test_sizes_that_are_wrong_otherwise_still_fail() -> None:
    with DividedViews({2: 1}, 2), pytest.raises(RuntimeError, match=r"shape '.5, 12.' is invalid"):
        torch.zeros(24).view(5, 12)


def test_a_graph_has_no_break() -> None:
    module = Turned()
    divide_views(module, {4: 2, 3: 2}, 2)
    graph = torch.compile(module, backend="eager", fullgraph=True)
    for samples in (3, 2):
        x = torch.randn(samples, 5, 8)
        assert torch.equal(graph(x), module.layer(x))


def test_words_of_a_role() -> None:
    assert positions_of("share num_heads sinks:0 view/5:3 view/3:2") == {5: 3, 3: 2}
    assert positions_of("column 32+16") == {}

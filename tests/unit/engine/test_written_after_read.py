"""A network that follows another one inside the forward of a model, as MoCo's, under `ppN`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.comm import World
from tests.helpers.threaded import threaded


def assigned(kept: nn.Parameter, param: nn.Parameter) -> None:
    kept.data = kept.data * 0.9 + param.data * 0.1


def written(kept: nn.Parameter, param: nn.Parameter) -> None:
    kept.mul_(0.9).add_(param, alpha=0.1)


def hidden(kept: nn.Parameter, param: nn.Parameter) -> None:
    kept.data.mul_(0.9).add_(0.1 * param.detach().data)


def bounded(kept: nn.Parameter, param: nn.Parameter) -> None:
    """Changes each network by itself, and asks the other for its shape and its kind."""
    assert (param.shape, param.data.dtype) == (kept.shape, kept.data.dtype)
    kept.data.clamp_(-0.1, 0.1)
    kept.clamp_(-0.1, 0.1)


def lists(kept: nn.Parameter, param: nn.Parameter) -> None:
    """The same with functions of lists, which get all parameters at once."""


Move = Callable[[nn.Parameter, nn.Parameter], None]
MOVES = [assigned, written, hidden]


class Followed(nn.Module):
    """Two encoders, of which the second follows the first, before or after it is called."""

    def __init__(self, move: Move, *, late: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.move, self.late = move, late
        self.base = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 7))
        self.average = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 7))
        self.average.load_state_dict(self.base.state_dict())
        self.average.requires_grad_(False)
        if move is bounded:  # forwards of the build move nothing further
            self.follow()

    @torch.no_grad()
    def follow(self) -> None:
        if self.move is lists:
            kept, params = list(self.average.parameters()), list(self.base.parameters())
            torch._foreach_mul_(kept, 0.9)
            torch._foreach_add_(kept, params, alpha=0.1)
            return
        for kept, param in zip(self.average.parameters(), self.base.parameters(), strict=True):
            self.move(kept, param)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        if not self.late:
            self.follow()
        with torch.no_grad():
            aim: Tensor = self.average(x.flip(1))
        if self.late:
            self.follow()
        return out - aim


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    return [(torch.randn(8, 12, generator=draw), torch.zeros(8, 7)) for _ in range(4)]


def losses(
    world: World, models: list[Followed], plan: str, splits: tuple[str, ...] | None = None
) -> list[float]:
    sgd = lambda params: torch.optim.SGD(params, lr=0.5)  # noqa: E731
    model = models[world.rank]
    options = plait.Options(cutting=plait.Cutting(splits=splits))
    engine = plait.build(model, plan, loss=F.mse_loss, optimizer=sgd, options=options, world=world)
    return [engine.step(batch).loss for batch in engine.prepare(batches())]


@pytest.mark.parametrize("move", [*MOVES, bounded])
def test_a_network_that_follows_before_its_call_is_right(move: Move) -> None:
    (expected,) = threaded(1, losses, [Followed(move, late=False)], "dp1", plan="dp1")
    models = [Followed(move, late=False) for _ in range(2)]
    for found in threaded(2, losses, models, "pp2 mb1", plan="pp2 mb1"):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("move", [*MOVES, lists])
def test_a_network_that_would_follow_zeros_is_refused(move: Move) -> None:
    models = [Followed(move, late=True) for _ in range(2)]
    match = r"writes into the parameter 'average\.0\.weight' .* 'base\.0\.weight' .* stage 0 of 2"
    with pytest.raises(plait.errors.ModelError, match=match):
        threaded(2, losses, models, "pp2 mb1", plan="pp2 mb1")


@pytest.mark.parametrize("move", [assigned, hidden])
def test_a_cut_inside_the_network_that_follows_is_refused_and_one_before_it_is_right(
    move: Move,
) -> None:
    models = [Followed(move, late=False) for _ in range(2)]
    with pytest.raises(plait.errors.ModelError, match=r"whole in one stage: .*Cutting\(splits="):
        threaded(2, losses, models, "pp2 mb1", ("average.2",), plan="pp2 mb1")
    (expected,) = threaded(1, losses, [Followed(move, late=False)], "dp1", plan="dp1")
    models = [Followed(move, late=False) for _ in range(2)]
    for found in threaded(2, losses, models, "pp2 mb1", ("average.0",), plan="pp2 mb1"):
        assert found == pytest.approx(expected, rel=1e-5)


def test_what_each_network_does_by_itself_is_not_refused() -> None:
    (expected,) = threaded(1, losses, [Followed(bounded, late=True)], "dp1", plan="dp1")
    models = [Followed(bounded, late=True) for _ in range(2)]
    for found in threaded(2, losses, models, "pp2 mb1", plan="pp2 mb1"):
        assert found == pytest.approx(expected, rel=1e-5)

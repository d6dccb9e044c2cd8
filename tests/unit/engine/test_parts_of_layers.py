"""A model whose layers are split is neither copied by one rank nor split once more."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plait
from plait.comm import World
from plait.errors import ModelError
from plait.random_state import drawn_alone
from tests.helpers.threaded import threaded


def net() -> nn.Sequential:
    with drawn_alone(0):  # ranks that are threads make models at once
        return nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))


def build(world: World, model: nn.Module, plan: str) -> plait.Engine:
    sgd = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    options = plait.Options(cutting=plait.Cutting(example=torch.ones(1, 12)))
    return plait.build(model, plan, loss=F.mse_loss, optimizer=sgd, options=options, world=world)


def state(world: World, models: list[nn.Module], plan: str) -> list[str]:
    model = models[world.rank]
    build(world, model, plan)
    names = list(model.state_dict(keep_vars=True))
    return names if plan == "dp2" else list(model.state_dict())


def second(world: World, models: list[nn.Module], first: str, plan: str) -> None:
    build(world, models[world.rank], first)
    build(world, models[world.rank], plan)


def made(count: int) -> list[nn.Module]:
    return [net() for _ in range(count)]


@pytest.mark.parametrize("plan", ["tp2", "tp4:2d", "dp2:zero1 tp2"])
def test_a_state_dict_of_parts_is_refused(plan: str) -> None:
    size = plait.Plan.parse(plan).world_size
    match = r"'.*tp.*' has split its layers, .* engine\.save_pretrained\(path\) write all"
    with pytest.raises(ModelError, match=match):
        threaded(size, state, made(size), plan, plan=plan)


def test_a_state_dict_of_whole_layers_is_none_of_its_business() -> None:
    assert len(threaded(2, state, made(2), "dp2", plan="dp2")[0]) == 4


@pytest.mark.parametrize("first", ["tp2", "tp2 mb2"])
def test_a_second_engine_of_parts_is_refused(first: str) -> None:
    match = rf"were split by an engine that was built of it before \('{first}'\), .* engine\.load"
    for plan in ("tp2", "tp2 mb2"):
        with pytest.raises(ModelError, match=match):
            threaded(2, second, made(2), first, plan, plan=first)


def of_a_part(world: World, models: list[nn.Module], order: tuple[int, int]) -> None:
    inner = models[world.rank]
    whole = nn.Sequential(inner, net())
    for place in order:
        engine = build(world, (inner, whole)[place], "tp2")
        engine.step((torch.ones(4, 12), torch.zeros(4, 12)))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_second_engine_of_a_part_of_the_model_is_refused(order: tuple[int, int]) -> None:
    match = "were split by an engine that was built of it before"
    with pytest.raises(ModelError, match=match):
        threaded(2, of_a_part, made(2), order, plan="tp2")


@pytest.mark.filterwarnings("ignore:the Sequential was cut into stages")
@pytest.mark.parametrize("place", [0, 1])
def test_a_second_engine_of_a_part_of_a_cut_model_is_refused(place: int) -> None:
    def second_of_a_part(world: World, models: list[nn.Module]) -> None:
        whole = nn.Sequential(net(), net())
        build(world, whole, "pp2")
        engine = build(world, whole[place], "pp2")
        engine.step((torch.ones(4, 12), torch.zeros(4, 12)))

    with pytest.raises(ModelError, match="was cut into stages by an engine"):
        threaded(2, second_of_a_part, made(2), plan="pp2")


def test_a_layer_that_was_not_split_may_be_read() -> None:
    def read(world: World) -> list[int]:
        model = nn.Sequential(net(), nn.LayerNorm(12))
        build(world, model, "tp2")
        assert len(model[1].state_dict()) == 2
        with pytest.raises(ModelError, match="has split its layers"):
            model[0].state_dict()
        return []

    threaded(2, read, plan="tp2")


def test_a_second_engine_of_whole_layers_is_made() -> None:
    threaded(2, second, made(2), "dp2", "dp2:zero1", plan="dp2")


class Policy(nn.Module):
    """A mean by two layers, and a deviation that is a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = net()
        self.log_std = nn.Parameter(torch.zeros(1, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(x)

    def act(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.mean(x)
        return out + self.log_std.exp()


def trained(world: World | None, policy: Policy, plan: str) -> list[torch.Tensor]:
    """What code that holds a module and a parameter from before the build reads after two steps."""
    held = policy.log_std
    model = nn.Sequential(policy)
    x = torch.linspace(-1, 1, 48).view(4, 12)
    if world is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            F.mse_loss(model(x), 2 * x).backward()
            optimizer.step()
    else:
        engine = build(world, model, plan)
        for _ in range(2):
            engine.step((x, 2 * x))
    return [tensor.detach().clone() for tensor in (held, policy.log_std, policy.act(x))]


def trained_on(world: World, policies: list[Policy], plan: str) -> list[torch.Tensor]:
    return trained(world, policies[world.rank], plan)


@pytest.mark.parametrize("plan", ["tp2", "tp2:1d,sp"])
def test_a_module_and_a_parameter_that_code_holds_are_trained(plan: str) -> None:
    reference = trained(None, Policy(), plan)
    for read in threaded(2, trained_on, [Policy(), Policy()], plan, plan=plan):
        for got, expected in zip(read, reference, strict=True):
            torch.testing.assert_close(got, expected)


def read_before(world: World, models: list[nn.Sequential], plan: str, what: str) -> None:
    model = models[world.rank]
    layer, weight = model[0], model[0].weight
    assert isinstance(weight, nn.Parameter)
    build(world, model, plan)
    assert list(weight.shape) == [12, 12]
    if what == "norm":
        weight.norm()
    elif what == "write":
        with torch.no_grad():
            weight.mul_(0.5)
    else:
        layer(torch.ones(1, 12))


@pytest.mark.parametrize("what", ["norm", "write", "call"])
def test_a_cut_parameter_that_code_holds_has_no_numbers(what: str) -> None:
    match = r"'0\.weight' \[12, 12\] was taken from the model before 'tp2' cut it"
    with pytest.raises(ModelError, match=match):
        threaded(2, read_before, [net(), net()], "tp2", what, plan="tp2")

"""A plain script under a plan: what changes in it, its batches, its optimizer, its example."""

from __future__ import annotations

import contextlib
import difflib
import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import plait
from plait.comm import World
from plait.engine.optimizer_like import like
from plait.engine.prepare import share
from plait.errors import DataError, ModelError, OptimizerError
from plait.models.parameters import Parameters
from tests.helpers.threaded import threaded

SCRIPTS = Path(__file__).parents[3] / "examples" / "script"
PLAIN = SCRIPTS / "plain.py"
WITH_PLAIT = SCRIPTS / "with_plait.py"


def printed(path: str, plan: str, world: World | None) -> list[float]:
    """The losses that a script prints, under another plan than its own."""
    source = Path(path).read_text().replace('"dp2"', f'"{plan}"')
    out = io.StringIO()
    joined = patch("plait.engine.build.join_world", lambda plan: world)
    with contextlib.redirect_stdout(out), joined, torch.random.fork_rng(devices=[]):
        exec(compile(source, path, "exec"), {"__name__": "__main__"})
    return [float(number) for number in re.findall(r"loss (\S+)", out.getvalue())]


def in_a_world(world: World, plan: str) -> list[float]:
    return printed(str(WITH_PLAIT), plan, world)


@pytest.mark.parametrize("plan", ["dp2", "dp2:zero3 mb2", "pp2:1f1b mb2"])
def test_a_script_has_the_losses_of_plain_pytorch_under_a_plan(ranks: Any, plan: str) -> None:
    plain = printed(str(PLAIN), plan, None)
    assert len(plain) == 12
    for losses in ranks(2, in_a_world, plan, plan=plan):
        assert losses[:10] == pytest.approx(plain[:10], rel=1e-6)
        assert losses == pytest.approx(plain, rel=1e-5)


def test_six_lines_of_a_script_change_where_a_replaced_one_counts_once() -> None:
    lines = [path.read_text().splitlines() for path in (PLAIN, WITH_PLAIT)]
    lines = [[line for line in text[1:] if line.strip()] for text in lines]
    changes = [line for line in difflib.ndiff(*lines) if line[0] in "+-"]
    written = [line for line in changes if line[0] == "+"]
    gone = [line for line in changes if line[0] == "-"]
    replaced = [line for line in written if line.strip("+ ").startswith("loss = ")]
    assert len(written) + len(gone) - len(replaced) <= 6, "\n".join(changes)
    assert len(written) <= 3 and len(replaced) == 1, "\n".join(changes)


def world_of(size: int, rank: int) -> World:
    """As much of a world as a share needs."""

    def axis(name: str) -> Any:
        return SimpleNamespace(gather_objects=lambda item: [item])

    return SimpleNamespace(worker=(rank, size), size=size, membership=None, axis=axis)  # type: ignore[return-value]


class Stream(IterableDataset[Tensor]):
    """Numbers without indices."""

    def __iter__(self) -> Any:
        return iter(torch.arange(11.0).view(11, 1))


POINTS = TensorDataset(torch.arange(11.0).view(11, 1), torch.arange(11))
LOADERS = {
    "indexed": lambda: DataLoader(POINTS, batch_size=4, shuffle=True),
    "streamed": lambda: DataLoader(Stream(), batch_size=4),
    "plait": lambda: plait.Loader(POINTS, 4, seed=3),
    "a list": lambda: [{"x": torch.arange(4.0).view(4, 1)}, {"x": torch.arange(1.0).view(1, 1)}],
}


def inputs_of(batch: Any) -> Tensor:
    if isinstance(batch, Tensor):
        return batch
    return batch["x"] if isinstance(batch, dict) else batch[0]


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("size", [2, 5])
def test_the_shares_of_all_ranks_join_to_the_batches_of_one(name: str, size: int) -> None:
    def batches(loader: Any) -> list[Tensor]:
        torch.manual_seed(7)
        return [inputs_of(batch) for batch, _ in zip(loader, range(3), strict=False)]

    whole = batches(LOADERS[name]())
    parts = [batches(share(LOADERS[name](), world_of(size, rank))) for rank in range(size)]
    for index, batch in enumerate(whole):
        joined = torch.cat([part[index] for part in parts])
        assert torch.equal(joined, batch)


def orders(world: World) -> list[list[float]]:
    torch.manual_seed(world.rank)
    loader = DataLoader(POINTS, batch_size=11, shuffle=True)
    prepared = share(loader, world)
    return [[*map(float, inputs_of(batch))] for _ in range(2) for batch in prepared]


def test_first_dims_that_differ_are_those_of_the_whole_batch() -> None:
    """A part of them says other numbers, or agrees by chance as that of the first of 4 ranks."""
    prepared = share([(torch.ones(8, 3), torch.ones(7))], world_of(4, 0))
    with pytest.raises(DataError, match=r"they have \[7, 8\]"):
        list(prepared)


def test_a_loader_that_gives_each_rank_its_part_is_refused() -> None:
    data = TensorDataset(torch.ones(8, 3), torch.ones(8, 1))
    sampler = DistributedSampler(data, num_replicas=2, rank=0)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    with pytest.raises(DataError, match="DistributedSampler of the loader gives each of 2 ranks"):
        share(loader, SimpleNamespace(worker=(0, 2)))
    alone = DistributedSampler(data, num_replicas=1, rank=0)
    share(DataLoader(data, batch_size=2, sampler=alone), SimpleNamespace(worker=(0, 1)))


def test_ranks_of_different_random_states_shuffle_alike(ranks: Any) -> None:
    first, second = ranks(2, orders, plan="dp2")
    for left, right in zip(first, second, strict=True):
        assert sorted(left + right) == [*map(float, range(11))]


class Skips(nn.Module):
    """A model whose forward is no chain."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.third = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(self.first(x)))
        return self.third(x + hidden)


def uncut(world: World) -> tuple[str, str, float, int]:
    torch.manual_seed(0)
    model = Skips()
    engine = plait.build(
        model,
        "pp2 mb2",
        loss=F.mse_loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        world=world,
    )
    said = []
    for act in (lambda: engine.save("nowhere"), lambda: engine.prepare(iter([]))):
        with pytest.raises((ModelError, DataError)) as failure:
            act()
        said.append(str(failure.value))
    batch = (torch.ones(4, 3), torch.zeros(4, 3))
    loss = engine.evaluate(batch)
    assert len(list(engine.prepare([batch]))) == 1
    return said[0], said[1], loss, len(engine.local_parameters())


def test_a_model_that_is_not_cut_yet_says_so_and_is_cut_by_its_first_batch(ranks: Any) -> None:
    found = ranks(2, uncut, plan="pp2")
    torch.manual_seed(0)
    expected = F.mse_loss(Skips()(torch.ones(4, 3)), torch.zeros(4, 3)).item()
    for missing, once, loss, _ in found:
        assert "engine.prepare(loader)" in missing and "is read once" in once
        assert loss == pytest.approx(expected, rel=1e-6)
    assert sum(count for *_, count in found) == 6


def test_an_optimizer_of_the_whole_model_is_made_anew_with_its_groups() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(
        [{"params": [model.weight], "weight_decay": 0.5}, {"params": [model.bias], "lr": 0.25}],
        lr=0.125,
    )
    made = like(optimizer, model)
    piece = nn.Parameter(torch.ones(1))
    groups = made(Parameters([("bias", piece), ("weight", nn.Parameter(torch.ones(3)))]))
    assert [len(group["params"]) for group in groups.param_groups] == [1, 1]
    assert groups.param_groups[1]["params"][0] is piece
    assert [group["lr"] for group in groups.param_groups] == [0.125, 0.25]
    assert groups.param_groups[0]["weight_decay"] == 0.5


@pytest.mark.parametrize("plan", ["dp1", "dp2:zero3", "pp2 mb2"])
def test_groups_keep_what_the_caller_wrote_into_them(plan: str) -> None:
    """The rate of a layer is often computed from an entry of its group in every step."""

    def scaled(optimizer: torch.optim.Optimizer, step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * (step + 1) * group.get("lr_scale", 1.0)

    def grouped(model: nn.Module) -> torch.optim.Optimizer:
        named = list(model.named_parameters())
        scales = (0.25, 0.5, 1.0, 2.0)
        pairs = zip(named, scales, strict=True)
        return torch.optim.SGD([{"params": [one], "lr_scale": scale} for one, scale in pairs], 0.1)

    def net() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4)).double()
        with torch.no_grad():
            for param in model.parameters():
                values = torch.linspace(-1, 1, param.numel(), dtype=torch.float64)
                param.copy_(values.view_as(param))
        return model

    batch = torch.linspace(-1, 2, 16, dtype=torch.float64).view(4, 4), torch.ones(4, 4).double()

    def train(world: World) -> list[float]:
        model = net()
        text = f"{plan} precision:float64"
        engine = plait.build(model, text, loss=F.mse_loss, optimizer=grouped(model), world=world)
        losses = []
        for step, own in enumerate(engine.prepare([batch] * 3)):
            scaled(engine.update.optimizer, step)
            losses.append(engine.step(own, trace=False).loss)
        return losses

    model = net()
    optimizer, expected = grouped(model), []
    for step in range(3):
        scaled(optimizer, step)
        loss = F.mse_loss(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        expected.append(loss.item())
    size = plait.Plan.parse(plan).world_size
    for losses in threaded(size, train, plan=plan):
        assert losses == pytest.approx(expected, rel=1e-12)


def test_an_optimizer_made_anew_has_no_schedule() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    remade = like(optimizer, model, follows_schedule=True)
    (group,) = remade(Parameters(list(model.named_parameters()))).param_groups
    assert "initial_lr" not in group


def test_an_optimizer_that_cannot_be_made_anew_is_refused() -> None:
    model = nn.Linear(2, 2)
    part = torch.optim.SGD([model.weight], lr=0.1)
    with pytest.raises(OptimizerError, match="leaves out 1 of the model's parameters, as bias"):
        like(part, model)
    whole = torch.optim.AdamW(model.parameters())
    torch.optim.lr_scheduler.StepLR(whole, 1)
    with pytest.raises(OptimizerError, match="schedule of learning rates"):
        like(whole, model)
    used = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    used.step()
    with pytest.raises(OptimizerError, match="has made steps already"):
        like(used, model)


class OfSequences(nn.Module):
    """Numbers of the tokens of sequences (samples, tokens, 4) of unequal lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, sequences: Tensor) -> Tensor:
        tokens = sequences.values()
        for block in self.blocks:
            tokens = torch.tanh(block(tokens))
        return tokens


def of_nested(world: World | None, plan: str) -> list[float]:
    torch.manual_seed(0)
    lengths = [3, 2]
    inputs, targets = (
        torch.nested.as_nested_tensor([torch.randn(one, 4) for one in lengths], layout=torch.jagged)
        for _ in range(2)
    )
    engine = plait.build(
        OfSequences(),
        plan,
        loss=lambda output, wanted: F.mse_loss(output, wanted.values()),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        world=world,
    )
    return [engine.step(batch).loss for batch in engine.prepare([(inputs, targets)] * 2)]


@pytest.mark.parametrize("plan", ["tp2", "pp2 mb1"])
def test_a_nested_tensor_shows_how_to_cut_a_model_where_no_sample_is_divided(
    ranks: Any, plan: str
) -> None:
    expected = of_nested(None, "dp1")
    for losses in ranks(2, of_nested, plan, plan=plan):
        assert losses == pytest.approx(expected, rel=1e-5)

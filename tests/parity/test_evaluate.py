"""Evaluations before, between and after steps: the loss of one device, and steps that go on as if
there had been none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from plait.comm import World
from plait.engine.engine import Engine
from plait.models.losses import IGNORE, correct_classes
from plait.parallel.pipeline.schedules import SCHEDULES
from tests.parity.families import DEEP, Family
from tests.parity.generator.cell import Cell
from tests.parity.generator.draw import cells
from tests.parity.harness import TOLERANCE, _copies, join, make_engine, whole_model

Run = Callable[..., list[Any]]
SIZES = (8, 3, 16)  # of the batches that are evaluated; a step has 8 samples
EVEN_KEYS = {**DEEP["gpt-deep"].keys, "vocab_size": 32}
EVEN = replace(DEEP["gpt-deep"], keys=EVEN_KEYS, sample=(8,), classes=32)
DROPPING = replace(DEEP["gpt-deep"], keys={**DEEP["gpt-deep"].keys, "dropout": 0.3})


def batches(family: Family) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [family._batch(size, generator) for size in SIZES]


def share(engine: Engine, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    axis = engine.world.axis("dp")
    return tuple(tensor.tensor_split(axis.size)[axis.rank] for tensor in batch)


def trained(world: World, plan: str, family: Family) -> tuple[list[Any], list[Any], list[Any]]:
    """(loss, parameters) at each evaluation, the losses of the steps, and those of an engine that
    evaluates nothing.
    """
    engine = make_engine(world, f"{plan} precision:float64", family, {})
    alone = make_engine(world, f"{plan} precision:float64", family, {})
    evaluated: list[Any] = []
    losses: list[float] = []

    def evaluate() -> None:
        for batch in batches(family):
            loss = engine.evaluate(share(engine, batch))
            evaluated.append((loss, _copies(engine.local_parameters())))

    evaluate()
    for batch in family.batches(8):
        losses.append(engine.step(share(engine, batch), trace=False).loss)
        evaluate()
    engine.flush()
    evaluate()
    expected = [alone.step(share(alone, batch), trace=False).loss for batch in family.batches(8)]
    alone.flush()
    ends = [[part.values for part in each.local_parameters()] for each in (engine, alone)]
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))
    return evaluated, losses, expected


def check(ranks: Run, num_ranks: int, plan: str, family: Family) -> None:
    results = ranks(num_ranks, trained, plan, family, plan=plan)
    model = whole_model(family).eval()
    for index, at_ranks in enumerate(zip(*(result[0] for result in results), strict=True)):
        params = join([parts for _, parts in at_ranks])
        params = {name: params[name].view_as(param) for name, param in model.named_parameters()}
        inputs, targets = batches(family)[index % len(SIZES)]
        output = functional_call(model, params, (inputs,))
        expected = float(F.cross_entropy(output.flatten(0, -2), targets.flatten()))
        for loss, _ in at_ranks:
            assert abs(loss - expected) <= TOLERANCE * expected, (index, loss, expected)
    for _, losses, expected_losses in results:
        assert losses == expected_losses


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_evaluations_between_steps(ranks: Run, schedule: str) -> None:
    virtual = ",v2" if schedule == "interleaved" else ""
    check(ranks, 2, f"pp2:{schedule}{virtual} mb4", DEEP["mlp-deep"])


@pytest.mark.parametrize("plan", ["pp3:pipedream mb2", "pp3:2bw mb4"])
def test_micro_batches_under_way_over_several_steps(ranks: Run, plan: str) -> None:
    check(ranks, 3, plan, DEEP["mlp-deep"])


@pytest.mark.parametrize("plan", ["pp2:1f1b mb2", "dp2:zero3"])
def test_a_model_that_drops_in_training(ranks: Run, plan: str) -> None:
    """The random state travels with a step's tensors, and with no evaluation's."""
    check(ranks, 2, plan, DROPPING)


def measured(world: World, plan: str, family: Family) -> list[list[Any]]:
    engine = make_engine(world, f"{plan} precision:float64", family, {})
    return [engine.measure(share(engine, batch), [correct_classes]) for batch in batches(family)]


@pytest.mark.parametrize(
    ("size", "plan", "family"),
    [
        (2, "dp2:zero3", DEEP["mlp-deep"]),
        (2, "pp2:1f1b mb2", DEEP["mlp-deep"]),
        (2, "tp2", EVEN),
        (2, "tp2:1d,sp", EVEN),
        (4, "tp4:2d", EVEN),
        (2, "cp2:ring", EVEN),
        (4, "pp2:1f1b tp2 mb2", EVEN),
    ],
)
def test_a_measure_of_whole_outputs(ranks: Run, size: int, plan: str, family: Family) -> None:
    results = ranks(size, measured, plan, family, plan=plan)
    model = whole_model(family).eval()
    for index, (inputs, targets) in enumerate(batches(family)):
        with torch.no_grad():
            logits = model(inputs)
        expected = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")
        for rank in results:
            loss, correct = rank[index]
            assert correct.count == loss.count == int((targets != IGNORE).sum())
            assert correct.total == int((logits.argmax(-1) == targets).sum())
            assert abs(loss.total - float(expected)) <= TOLERANCE * float(expected)


def evaluated(world: World, cell: Cell) -> list[Any]:
    """The sums of the loss over batches, before any step."""
    engine = make_engine(world, cell.plan, cell.family, cell.options)
    return [engine.measure(share(engine, batch), [])[0] for batch in batches(cell.family)]


RANDOM = [cell for cell in cells(40, seed=19) if cell.kind != "moe"][:10]


@pytest.mark.parametrize("cell", RANDOM, ids=lambda cell: f"{cell.kind} {cell.plan}")
def test_an_evaluation_under_random_plans_is_that_of_one_device(ranks: Run, cell: Cell) -> None:
    results = ranks(cell.world_size, evaluated, cell, plan=cell.plan)
    model = whole_model(cell.family).eval()
    for index, (inputs, targets) in enumerate(batches(cell.family)):
        with torch.no_grad():
            logits = model(inputs)
        expected = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")
        for sums in results:
            assert sums[index].count == int((targets != IGNORE).sum())
            assert abs(sums[index].total - float(expected)) <= TOLERANCE * float(expected)

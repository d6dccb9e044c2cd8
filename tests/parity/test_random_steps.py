"""A step that draws random numbers is told from a wrong one: it differs from itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.verify import Report
from plait.verify.outside.source import parse
from tests.parity.test_outside import _check, report_of

FILE = """
import random

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F

RNG = numpy.random.default_rng(0)


class Noisy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(6, 8)
        self.down = torch.nn.Linear(8, 3)
        self.generator = torch.Generator()

    def forward(self, x):
        inner = torch.tanh(self.up(x))
        return self.down({inner})


def make():
    torch.manual_seed(0)
    batches = [(torch.randn(8, 6), torch.randint(0, 3, (8,))) for _ in range(2)]
    return Noisy(), batches, F.cross_entropy


def prepare(model):
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_step(state, batch, loss):
    model, optimizer = state
    inputs, targets = batch
    {before}
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    inputs, targets = inputs[mine], targets[mine]
    loss(model(inputs), targets).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= {divisor}
    optimizer.step()
    optimizer.zero_grad()
"""


def random_step(
    ranks, folder: Path, inner: str = "inner", before: str = "pass", divisor: str = "2"
) -> Report:
    path = folder / "steps.py"
    text = FILE.replace("{inner}", inner).replace("{before}", before)
    path.write_text(text.replace("{divisor}", divisor))
    return report_of(ranks, str(path))


def told(report: Report) -> list[str]:
    return [one.text for one in report.findings if one.cause == "random"]


@pytest.mark.parametrize(
    ("inner", "words"),
    [
        ("F.dropout(inner, 0.3)", "as it draws from torch: draw torch's numbers in make()"),
        ("inner * random.uniform(0.5, 1.5)", "draws from random: call random.seed(number)"),
        (
            "inner * numpy.random.uniform(0.5, 1.5)",
            "draws from numpy: call numpy.random.seed(number)",
        ),
        ("inner * RNG.uniform(0.5, 1.5)", "it has a generator of its own"),
        (
            "inner * torch.rand(inner.shape, generator=self.generator, dtype=x.dtype)",
            "it has a generator of its own",
        ),
    ],
)
def test_a_model_that_draws_is_random_and_no_axis_is_blamed(
    ranks, tmp_path: Path, inner: str, words: str
) -> None:
    report = random_step(ranks, tmp_path, inner)
    assert not report.ok
    assert len(report.findings) == 1 and report.axes == ()
    (text,) = told(report)
    assert text.startswith("the step is random: one device") and words in text


@pytest.mark.parametrize(
    ("before", "name"),
    [
        ("inputs = inputs + torch.randn_like(inputs)", "torch"),
        ("inputs = inputs * random.uniform(0.5, 1.5)", "random"),
        ("inputs = inputs * numpy.random.rand()", "numpy"),
    ],
)
def test_a_step_that_draws_outside_its_model_is_random(
    ranks, tmp_path: Path, before: str, name: str
) -> None:
    report = random_step(ranks, tmp_path, before=before)
    assert not report.ok and report.axes == ()
    (text,) = told(report)
    assert "the step differs from itself" in text and f"draws from {name}:" in text


def test_ranks_that_shuffle_apart_are_told_so_as_well(ranks, tmp_path: Path) -> None:
    before = "order = random.sample(range(8), 8); inputs, targets = inputs[order], targets[order]"
    report = random_step(ranks, tmp_path, before=before)
    causes = [one.cause for one in report.findings]
    assert causes == ["data-split", "random"], report.text()


def test_a_right_step_may_draw(ranks, tmp_path: Path) -> None:
    assert random_step(ranks, tmp_path, before="random.random(), torch.rand(3)").ok


def test_a_wrong_step_that_draws_is_wrong(ranks, tmp_path: Path) -> None:
    report = random_step(ranks, tmp_path, before="random.random(), torch.rand(3)", divisor="1")
    assert not report.ok and not told(report)
    assert "2.0000 times too large" in report.text()


def test_a_wrong_step_that_draws_a_little_keeps_its_cause(ranks, tmp_path: Path) -> None:
    report = random_step(ranks, tmp_path, "inner + 1e-7 * torch.randn_like(inner)", divisor="1")
    assert "2.0000 times too large" in report.text()
    assert "does not explain all of the difference" in told(report)[0]


def test_a_reference_of_the_users_own_is_asked_too(ranks, tmp_path: Path) -> None:
    path = tmp_path / "pair.py"
    path.write_text(
        "import random, torch\n"
        "random.seed(1)  # the first draws are those of every run of this test\n"
        "def reference_step(number):\n"
        "    value = torch.full((3,), random.uniform(1, 2), dtype=torch.float64)\n"
        "    return {'loss': 1.0, 'grads': {'w': value}, 'params': {'w': -value}}\n"
        "def parallel_step(number):\n"
        "    value = torch.full((3,), 1.0 + number, dtype=torch.float64)\n"
        "    return {'loss': 1.0, 'grads': {'w': value}, 'params': {'w': -value}}\n"
    )
    report = ranks(2, _check, parse(str(path)))[0]  # each rank has its own reference
    assert "draws from random: call random.seed(number)" in told(report)[0]
    assert len(report.findings) == 1

"""The fixture `plait_parity` in a test file of somebody else's project."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from plait.verify.outside.source import carried
from tests.parity.outside import ddp

TEST = """
import torch
import torch.distributed as dist
import torch.nn.functional as F


def make():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 3), [(torch.randn(4, 4), torch.randint(0, 3, (4,)))], F.cross_entropy


def step(model, batch, loss):
    inputs, targets = (part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch)
    loss(model(inputs), targets).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def averaged(model, batch, loss):
    model.weight.register_post_accumulate_grad_hook(mean)
    model.bias.register_post_accumulate_grad_hook(mean)
    step(model, batch, loss)


def mean(parameter):
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()


def test_right(plait_parity):
    assert plait_parity(make, averaged, steps=1).ok


def test_wrong(plait_parity):
    plait_parity(make, step, steps=1)
"""


@pytest.mark.slow
def test_a_wrong_step_fails_its_test_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(TEST)
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"]
    if not _is_installed():
        words += ["-p", "plait.pytest_plugin"]
    done = subprocess.run(
        words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=180
    )
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "every wrong gradient matches after a mean over dp" in done.stdout


def _is_installed() -> bool:
    from importlib.metadata import entry_points

    return any(one.value == "plait.pytest_plugin" for one in entry_points(group="pytest11"))


def test_functions_travel_by_value() -> None:
    source = carried(ddp.make, ddp.train_step, ddp.prepare)
    functions = source.functions()
    assert set(functions) == {"make", "train_step", "prepare"}
    assert functions["make"] is not ddp.make
    assert source.name == "train_step"

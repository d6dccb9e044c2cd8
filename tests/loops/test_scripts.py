"""A script of Accelerate or Fabric beside the same one under a plan: the diff and the losses."""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.comm import World
from tests.architecture.source import ROOT
from tests.loops import gpt2

pytest.importorskip("transformers")

FOLDER = ROOT / "examples" / "script"
STEPS = 10
PLANS = {"accelerate": "pp2 tp2 dp2:zero1", "fabric": "pp2 tp2"}

pytestmark = pytest.mark.filterwarnings("ignore")  # what the libraries say of their own


def losses(path: Path) -> list[float]:
    """The losses that a script prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), torch.random.fork_rng(devices=[]):
        exec(compile(path.read_text(), path, "exec"), {"__name__": "__main__"})
    return [float(number) for number in re.findall(r"loss (\S+)", out.getvalue())]


def under(world: World, name: str) -> list[float]:
    with gpt2.as_rank(world.rank, world.size), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Lightning says of its own, as where Slurm is there
        os.environ["GROUP_RANK"] = "0"
        return losses(FOLDER / f"{name}_with_plait.py")


@pytest.mark.parametrize("name", PLANS)
def test_ten_steps_of_a_script_have_the_losses_of_one_device(
    name: str, ranks: Callable[..., list[Any]]
) -> None:
    pytest.importorskip({"accelerate": "accelerate", "fabric": "lightning"}[name])
    with gpt2.as_rank(0, 1):
        wanted = losses(FOLDER / f"{name}_plain.py")
    assert len(wanted) == STEPS
    size = {"accelerate": 8, "fabric": 4}[name]
    for found in ranks(size, under, name, plan=PLANS[name]):
        assert found == pytest.approx(wanted, rel=1e-6)


def changed(name: str) -> list[str]:
    """The lines that differ, as in a diff, without the first one, which says what the file is."""
    plain, planned = (
        [line for line in (FOLDER / f"{name}_{end}.py").read_text().splitlines()[1:] if line]
        for end in ("plain", "with_plait")
    )
    lines = difflib.unified_diff(plain, planned, n=0, lineterm="")
    return [line for line in lines if re.match(r"[+-](?![+-])", line)]


@pytest.mark.parametrize("name", PLANS)
def test_two_lines_change_and_the_document_shows_them(name: str) -> None:
    lines = changed(name)
    assert len([line for line in lines if line.startswith("+")]) == 2
    text = (ROOT / "docs" / "other_loops.md").read_text()
    assert "\n".join(lines) in text

"""The start of a proof is plain PyTorch's, so that a fault in the engine's own shows."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from plait.engine.state import start
from plait.run import assemble
from plait.verify import Report
from plait.verify.problem import Problem
from plait.verify.run import VerifyTask, in_world
from tests.helpers.threaded import threaded
from tests.parity.verify_problems import problem

SOURCE = """
import torch
from torch import nn

def make(width=6):
    model = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 5))
    for param in model.parameters():
        nn.init.normal_(param, std=0.5)
    return model

def samples():
    noise = torch.Generator().manual_seed(0)
    return [(torch.randn(6, generator=noise), torch.tensor(i % 5)) for i in range(24)]
"""
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "vocab_size": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GPT2 |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Problem:
    """A problem with a model of the user's own."""
    name = f"start_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return replace(
        problem("mlp"), model={"python": f"{name}:make"}, data={"python": f"{name}:samples"}
    )


def hugging_face() -> Problem:
    pytest.importorskip("transformers")
    data = {"name": "random", "seq_len": 8}
    return replace(problem("even"), model={"name": "hf", "config": GPT2}, data=data)


def proof(given: Problem, *probes: str) -> Report:
    """One rank: ranks as threads share a generator, and each of several would draw."""
    task = VerifyTask(given, "dp1 precision:float64", 1, None, probes)
    report: Report = threaded(1, in_world, task, plan="dp1")[0]
    return report


def shifted(original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """The planted fault: one value of the start is another."""

    def make(*args: Any) -> nn.Module:
        model = original(*args)
        with torch.no_grad():
            next(model.parameters()).view(-1)[0] += 0.01
        return model

    return make


def test_a_users_model_that_starts_elsewhere_is_found(
    theirs: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert proof(theirs, "sgd", "frozen-unused").ok
    monkeypatch.setattr(assemble, "make_whole", shifted(start.make_whole))
    report = proof(theirs, "sgd")
    assert not report.ok
    assert {one.kind for one in report.parts[0].failed} >= {"start"}


def test_a_library_model_that_starts_elsewhere_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    given = hugging_face()
    assert proof(given, "sgd", "frozen-unused").ok
    monkeypatch.setattr(start, "make_whole", shifted(start.make_whole))
    report = proof(given, "sgd")
    assert not report.ok
    assert {one.kind for one in report.parts[0].failed} >= {"start"}


def test_what_is_expected_does_not_ask_the_engine(
    theirs: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its values are those of the user's function right after `torch.manual_seed`."""
    torch.manual_seed(theirs.train.seed)
    source: dict[str, Any] = {}
    exec(SOURCE, source)
    plain = source["make"]()
    whole = theirs.make_whole_model(torch.float64)
    for name, param in whole.named_parameters():
        assert torch.equal(param, plain.get_parameter(name).double()), name

"""Blocks as graphs under every axis, against one device. The tracing is torch's own; the code
generator of the default backend, which takes a C++ compiler and its time, runs in one test.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from plait.comm import World
from plait.engine import compiling
from plait.errors import ModelError, NotAvailable
from plait.models.layers import CausalAttention
from tests.parity.families import FAMILIES, Family, family_of
from tests.parity.harness import TOLERANCE, check

Run = Callable[..., list[Any]]


def small(name: str) -> Family:
    """One block, one step: what is compiled is the same for every other."""
    family = family_of(name)
    return replace(family, keys={**family.keys, "num_hidden_layers": 1}, num_steps=1)


@pytest.mark.parametrize(
    ("plan", "family"),
    [
        ("dp2:zero3 mb2 remat:full", "gpt"),
        ("dp2 remat:selective", "llama"),
        ("pp2:1f1b cp2:ulysses mb2", "long-gpt"),
        ("pp2:zb-h1 tp2:1d,sp mb2", "split-gpt-dropout"),
        ("tp4:2d", "split-gpt"),
        ("cp2:ring ep2", "mixtral-balanced"),
    ],
)
def test_equals_one_device(ranks: Run, plan: str, family: str) -> None:
    """What is no function of tensors runs between the graphs."""
    outcome = check(
        quietly(ranks),
        f"{plan} compile precision:float64",
        small(family),
        compile_backend="aot_eager",
    )
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.skipif(
    not any(shutil.which(name) for name in compiling.COMPILERS), reason="no C++ compiler here"
)
def test_with_generated_code_as_well(ranks: Run) -> None:
    """The default backend, once: a whole compiler in the smallest model."""
    outcome = check(
        quietly(ranks), "dp2 mb2 compile precision:float64", replace(FAMILIES["mlp"], num_steps=1)
    )
    assert outcome.largest <= TOLERANCE, outcome


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_what_drops_is_in_no_graph_however_it_says_so(rate: float) -> None:
    """Generated code draws numbers of its own; attention has its rate as a number, or in a dropout
    that it never calls.
    """
    from transformers import GPT2Config, LlamaConfig
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
    from transformers.models.llama.modeling_llama import LlamaAttention

    sizes = {"hidden_size": 8, "num_attention_heads": 2}
    with torch.device("meta"):
        modules = [
            nn.Dropout(rate),
            CausalAttention(rate),
            LlamaAttention(LlamaConfig(**sizes, attention_dropout=rate), 0),
            GPT2Attention(
                GPT2Config(n_embd=8, n_head=2, attn_pdrop=rate, resid_pdrop=0.0), layer_idx=0
            ),
        ]
    assert [compiling._is_alone(module) for module in modules] == [rate > 0] * 4


def quietly(run: Run) -> Run:
    """The tracer looks at `.grad` of what is no leaf, and torch warns of that: warnings are no
    errors here.
    """
    return lambda n, fn, *args, **options: run(n, without_warnings, fn, *args, **options)


def without_warnings(world: World, fn: Callable[..., Any], *args: Any) -> Any:
    """Of a rank that has compiled something, unless it has none of the blocks."""
    from torch._dynamo.utils import counters
    from torch._inductor import config

    config.compile_threads = 1
    before = counters["stats"]["calls_captured"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = fn(world, *args)
    captured = counters["stats"]["calls_captured"] - before
    least = 1 if "remat:selective" in args[0] else 4  # a block that selects is one call of its own
    assert world.mesh.pp > 1 or captured >= least, captured
    return found


def test_refused_without_blocks_in_several_graphs_and_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ModelError, match="block by block"):
        compiling.apply(torch.nn.Linear(2, 2), [])
    model = torch.nn.Sequential(
        torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5)), torch.nn.Linear(2, 2)
    )
    with pytest.raises(ModelError, match=r"'0\.1' cannot be in a graph"):
        compiling.apply(model, ["0"], backend="eager", as_one=True)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(NotAvailable, match=r"needs a C\+\+ compiler"):
        compiling.apply(FAMILIES["mlp"].model(), ["blocks.0"])

"""Three dimensions and more, end to end: the standard library's source, plan after plan, as one
device trains it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plait import datasets
from plait.comm import World
from plait.engine.build import Options, build
from plait.models.losses import cross_entropy
from plait.plan import Plan
from tests.parity import delayed, harness
from tests.parity.families import Family
from tests.parity.harness import SEED, TOLERANCE

Run = Callable[..., list[Any]]
KEYS = {
    "num_hidden_layers": 3,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 16,
    "vocab_size": 256,
    "max_position_embeddings": 16,
}
DENSE = Family("llama", KEYS, (16,), 256, tokens=True)
EXPERTS = Family(
    "llama", {**KEYS, "num_local_experts": 4, "num_experts_per_tok": 2}, (16,), 256, tokens=True
)
CHAIN = [
    "pp2:1f1b tp2 dp2:zero1 mb4",
    "pp2:zb-h1 tp4:2d mb4",
    "dp4:zero3 tp2:1d,sp",
    "pp2:zbv dp2:zero2 cp2 mb4",
    "dp1",
]
EXPERT_CHAIN = [
    "pp2 ep2 dp2 cp2",
    "dp4:zero3 ep4 mb2",
    "pp2:interleaved,v2 tp2 dp2 ep2 mb2",
    "cp2:ring dp2:zero1 ep4",
    "tp2 mb2",
]


@dataclass(frozen=True)
class Corpus(Family):
    """Batches of the standard library's source in place of random tokens."""

    def _batch(self, num_samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        dataset = datasets.make(
            {"name": "stdlib", "seq_len": self.sample[0]}, {"name": self.name, **self.keys}
        )
        seed = int(torch.randint(1 << 30, (1,), generator=generator))
        inputs, targets = next(datasets.Loader(dataset, num_samples, seed=seed))
        return inputs, targets


def corpus(
    world: World, family: Family, plan: str, span: tuple[int, int], folders: tuple[Any, Any]
) -> list[float]:
    """The losses of steps `span`, from one checkpoint (or none) to another (or none)."""
    engine = build(
        family.model(),
        f"{plan} precision:float64",
        loss=cross_entropy,
        optimizer=harness.optimizer,
        options=Options(seed=SEED, clip_grad_norm=1.0),
        world=world,
    )
    axis = world.axis("dp")
    dataset = datasets.make({"name": "stdlib", "seq_len": 16}, {"name": "llama", **family.keys})
    loader = datasets.Loader(dataset, 8, dp_size=axis.size, dp_rank=axis.rank)
    if folders[0] is not None:
        loader.load_state_dict(engine.load(folders[0])["loader"])
    losses = [engine.step(next(loader), trace=False).loss for _ in range(*span)]
    if folders[1] is not None:
        engine.save(folders[1], loader=loader.state_dict())
    return losses


@pytest.mark.parametrize(
    ("family", "chain"), [(DENSE, CHAIN), (EXPERTS, EXPERT_CHAIN)], ids=["dense", "experts"]
)
def test_a_chain_of_hybrid_plans_is_one_curve(
    ranks: Run, tmp_path: Path, family: Family, chain: list[str]
) -> None:
    """Two steps under each of five plans, handed on by checkpoints, against ten steps of one
    device.
    """
    truth = ranks(1, corpus, family, "dp1", (0, 2 * len(chain)), (None, None))[0]
    found: list[float] = []
    for number, plan in enumerate(chain):
        folders = (tmp_path / str(number - 1) if number else None, tmp_path / str(number))
        span = (2 * number, 2 * number + 2)
        by_rank = ranks(Plan.parse(plan).world_size, corpus, family, plan, span, folders, plan=plan)
        assert all(losses == by_rank[0] for losses in by_rank)
        found += by_rank[0]
    assert found == pytest.approx(truth, rel=TOLERANCE)
    assert truth[-1] < truth[0]


@pytest.mark.parametrize(
    "plan", ["pp2:2bw tp2 dp2", "pp2:pipedream tp2:1d,sp mb3", "pp2:2bw tp4:2d"]
)
def test_asynchronous_pipelines_compose_with_the_tensor_axis(ranks: Run, plan: str) -> None:
    """On the same corpus, against one device that applies the same delayed gradients."""
    family = Corpus("llama", KEYS, (16,), 256, tokens=True)
    text = f"{plan} precision:float64"
    parsed = Plan.parse(text)
    found = ranks(parsed.world_size, delayed.run_engine, text, family, 0, plan=text)
    stages = [
        [name for name, *_ in rank["parts"]]
        for rank in found[:: parsed.world_size // parsed.pp.size]
    ]
    expected = delayed.reference(text, family, stages)
    joined = harness.join([rank["parts"] for rank in found])
    for rank in found:
        assert rank["losses"] == pytest.approx(expected.losses, rel=TOLERANCE)
    assert expected.losses[-1] < expected.losses[0] - 0.2
    for name, value in expected.params.items():
        torch.testing.assert_close(
            joined[name].view_as(value), value, rtol=TOLERANCE, atol=TOLERANCE
        )

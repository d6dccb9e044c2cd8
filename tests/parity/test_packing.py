"""The parity table of packed documents: each alone on one device, against all in packed samples
under every axis.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.comm import World
from plait.datasets.packing import Packing
from plait.models import losses
from plait.plan import Plan
from plait.verify.record.observation import Record
from plait.verify.reference.one_device import Slice, run_reference
from plait.verify.reference.recipe import Recipe
from tests.parity.families import LONG, MIXTRAL, Family
from tests.parity.harness import TOLERANCE, compare, make_engine, optimizer, run_engine, whole_model
from tests.parity.hugging_face import EVEN, GPT2, GROUPED, causal

SEQ_LEN = 16
CHANGED = 1  # the second document of each sample
NUM_SAMPLES = 5
SIZES = (
    2,
    9,
    4,
    16,
    5,
    3,
    23,
    7,
    2,
    6,
    12,
    3,
    17,
    4,
    8,
    11,
)  # tokens; 23 is cut, 17 fills a sample

Run = Callable[..., list[Any]]
Documents = list[dict[str, Tensor]]


def documents_of(step: int, vocabulary: int) -> Documents:
    """Documents with some labels that count for nothing."""
    generator = torch.Generator().manual_seed(step)
    found = []
    for size in SIZES:
        tokens = torch.randint(0, vocabulary, (size,), generator=generator)
        masked = torch.rand(size, generator=generator) < 0.2
        found.append({"input_ids": tokens, "labels": tokens.masked_fill(masked, -100)})
    return found


@dataclass(frozen=True)
class Packed(Family):
    """A family that is trained on packed documents, in as many samples as they take."""

    def batches(self, num_samples: int) -> list[Any]:
        found = []
        for step in range(self.num_steps):
            samples = Packing(documents_of(step, self.classes), SEQ_LEN)
            found.append(samples.batch(torch.arange(len(samples))))
        return found


def packed(family: Family) -> Packed:
    return Packed(family.name, family.keys, (SEQ_LEN,), family.classes, tokens=True, num_steps=2)


GPT = {key: value for key, value in LONG.items() if key != "num_key_value_heads"}
FAMILIES = {
    "gpt": packed(Family("gpt", GPT, (16,), 32)),
    "llama": packed(Family("llama", LONG, (16,), 32)),
    "mixtral": packed(Family("llama", MIXTRAL, (16,), 32)),
    "hf-gpt2": packed(causal(**{**GPT2, "n_positions": 16, "vocab_size": 30})),
    "hf-llama": packed(causal(model_type="llama", **{**EVEN, "max_position_embeddings": 16})),
    "hf-windows": packed(
        causal(
            model_type="mistral", **{**GROUPED, "max_position_embeddings": 16, "sliding_window": 4}
        )
    ),
}


@functools.cache
def each_alone(name: str) -> Record:
    """One device, and every document in a forward of its own; losses summed over their tokens."""
    family = FAMILIES[name]

    def slices(step: int, batch: Any) -> list[Slice]:
        found = []
        for document in documents_of(step, family.classes):
            tokens = document["input_ids"]
            labels = document["labels"]
            for start in range(0, len(tokens) - 1, SEQ_LEN):
                stop = min(start + SEQ_LEN, len(tokens) - 1)
                piece = (tokens[None, start:stop], labels[None, start + 1 : stop + 1])
                found.append(Slice(0, len(found), piece))
        return found

    recipe = Recipe(losses.cross_entropy, optimizer)
    return run_reference(whole_model(family), family.batches(0), recipe, slices, by_slice=True)


PLANS = {
    "gpt": (
        "dp2:zero3 mb2", "cp4:ring mb2", "cp2:ulysses mb2", "pp2:zb-h1 cp2:ring mb2",
        "pp2:1f1b tp2:1d,sp mb2 remat:full",
    ),
    "llama": (
        "cp2:ring dp2:zero1", "cp4:ulysses remat:full", "tp4:2d", "tp8:3d",
        "pp2:interleaved,v2 mb2", "cp2:ring tp2:1d,sp",
    ),
    "mixtral": ("cp2:ring dp2 ep4", "pp2:1f1b dp2 ep2 mb2"),
    "hf-gpt2": ("dp1", "cp2:ring", "tp2:1d,sp", "pp2:1f1b dp2:zero1 mb2"),
    "hf-llama": ("cp4:ring", "cp2:ulysses", "pp2:1f1b cp2:ring mb2"),
    "hf-windows": ("cp2:ring",),
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "plan"), [(family, plan) for family, plans in PLANS.items() for plan in plans]
)
def test_packed_documents_are_as_if_each_were_alone(ranks: Run, family: str, plan: str) -> None:
    text = f"{plan} precision:float64"
    parsed = Plan.parse(text)
    results = ranks(parsed.world_size, run_engine, text, FAMILIES[family], 0, {}, plan=plan)
    outcome = compare(results, each_alone(family))
    assert outcome.largest <= TOLERANCE, outcome


def logits_before_and_after(world: World, plan: str, family: Packed) -> list[tuple[Tensor, Tensor]]:
    """(logits, documents) of this rank's positions, before and after one document is changed."""
    (tokens, documents, positions), _ = family.batches(0)[0]
    changed = torch.where(documents == CHANGED, (tokens + 1) % family.classes, tokens)
    engine = make_engine(world, f"{plan} precision:float64", family, {})
    seen: list[tuple[Tensor, Tensor]] = []

    def note(logits: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        seen.append((logits.clone(), numbers.clone()))
        return logits.new_zeros(()), logits.new_ones(())

    for ids in (tokens, changed):
        engine.measure(((ids, documents, positions), documents), [note])
    return seen


@pytest.mark.parametrize(
    ("family", "plan"),
    [
        ("gpt", "dp1"), ("gpt", "cp2:ring"), ("gpt", "cp4:ring"), ("gpt", "cp2:ulysses"),
        ("gpt", "cp4:ulysses"), ("gpt", "tp2:1d,sp"), ("gpt", "pp2"),
        ("llama", "cp2:ring tp2:1d,sp"), ("llama", "cp4:ring"), ("llama", "pp2 cp2:ulysses"),
        ("hf-llama", "cp2:ring"), ("hf-gpt2", "cp2:ulysses"), ("hf-windows", "pp2"),
    ],
)  # fmt: skip
def test_a_changed_document_changes_no_other(ranks: Run, family: str, plan: str) -> None:
    size = Plan.parse(plan).world_size
    num_changed = 0
    for seen in ranks(size, logits_before_and_after, plan, FAMILIES[family], plan=plan):
        half = len(seen) // 2  # a stage before the last has seen nothing
        for (before, documents), (after, _) in zip(seen[:half], seen[half:], strict=True):
            others = documents != CHANGED
            assert torch.equal(before[others], after[others])
            num_changed += int((before != after).any(-1).sum())
    assert num_changed > 0

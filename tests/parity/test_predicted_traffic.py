"""What the planner predicts that a rank sends is what the ledger counts, on every axis and to the
byte.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait import models
from plait.comm import World
from plait.config import Train
from plait.engine.build import build
from plait.engine.options import Options
from plait.models.losses import cross_entropy
from plait.plan import KeepGathered, Plan
from plait.run import optimizers
from tests.helpers.threaded import threaded

Run = Callable[..., list[Any]]
BATCH = 16
SEQ_LEN = 8
VOCABULARY = 64
FIRST_MIDDLE_LAST = 3
"""Layers where no pipeline wants more."""
SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "intermediate_size": 64,
}
SIZES |= {"vocab_size": VOCABULARY, "max_position_embeddings": 32}
LLAMA = {"name": "llama", "num_key_value_heads": 4, **SIZES}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"name": "gpt", **SIZES},
    "tied": {"name": "gpt", "tie_word_embeddings": True, **SIZES},
    "long table": {"name": "gpt", **SIZES, "max_position_embeddings": 1024},
    "llama": LLAMA,
    "experts": {
        **LLAMA,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "mlp": {
        "name": "mlp",
        "in_features": 16,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "out_features": 8,
    },
    "odd": {
        "name": "mlp",
        "in_features": 5,
        "hidden_size": 7,
        "num_hidden_layers": 3,
        "out_features": 3,
    },
}
TRANSFORMERS = [
    "dp4:ring mb2", "dp4:server", "dp2:zero1 mb2 precision:bf16", "dp4:zero3,replicate2 mb2",
    "dp2:zero3 mb2 remat:full",
    "tp4", "tp4:1d,sp dp2:zero3 mb2 remat:full", "tp2 remat:selective", "tp4:2d dp2:zero3",
    "tp4:2d remat:full mb2",
    "tp8:2.5d,depth2 dp2", "tp8:3d dp2:zero1 mb2", "cp4 mb2", "cp2:ulysses tp2:1d,sp",
    "cp2 tp4:2d dp2:zero2",
]  # fmt: skip
CASES = [(family, plan) for family in ("gpt", "llama") for plan in TRANSFORMERS]
CASES += [
    ("experts", plan) for plan in ("dp2:zero2 mb2", "tp2 dp2:zero1", "tp2 remat:full", "cp2 tp2")
]
UNEQUAL = ["tp2:1d,sp mb3", "tp4:2d mb3", "cp2:ring dp2 mb3", "tp2 dp2:zero3 mb5"]
"""Micro-batches of which some have a sample more than the others."""
CASES += [("gpt", plan) for plan in UNEQUAL]
CASES += [
    ("mlp", plan)
    for plan in ("tp2", "tp2:1d,sp remat:full", "tp4:2d dp2:zero2 mb2", "tp8:3d", "dp4:server")
]
CASES += [("experts", "dp2:server ep2"), ("experts", "dp4:server ep2 mb2")]
CASES += [("gpt", "dp2:local,every2"), ("odd", "dp4:ring"), ("odd", "dp2:ring mb2")]
KEPT = [
    ("gpt", "dp2:zero3"),
    ("gpt", "dp2:zero3 mb2 remat:full"),
    ("llama", "dp4:zero3,replicate2 mb2"),
    ("llama", "tp2 dp2:zero3 mb4 precision:bf16"),
    ("experts", "dp2:zero3 mb2"),
]
PIPELINES = [
    ("gpt", "pp2:1f1b tp2:1d,sp dp2:zero1 mb2"), ("tied", "pp2:gpipe dp2:zero2 mb2"), ("llama",
    "pp2:interleaved,v2 tp2 mb4"),
    ("tied", "pp2:zbv mb4"), ("mlp", "pp4:1f1b mb4"), ("gpt", "pp4:pipedream mb8"), ("gpt",
    "pp2:2bw dp2 mb4"),
    ("gpt", "pp2:interleaved,v2 tp2 mb6"), ("gpt", "pp2:1f1b cp2 mb3"),
    ("long table", "pp2:zbv tp2 mb4"),
]  # fmt: skip


# Plans under which matrices are in parts, and some under which they are whole.
WHOLE_MATRICES = [
    ("gpt", "dp2 mb2"), ("gpt", "dp2:zero1"), ("llama", "dp4:zero3,replicate2"),
    ("gpt", "tp2:1d,sp dp4:zero3"), ("llama", "tp2"), ("gpt", "tp4:2d dp2:zero1"),
    ("llama", "tp8:2.5d,depth2"), ("gpt", "tp8:3d"), ("experts", "dp2:zero2 mb2"),
    ("experts", "dp4:zero1 ep2"),
    ("gpt", "cp2 dp2:zero1"), ("mlp", "dp2:zero3"), ("odd", "dp3:zero1"),
]  # fmt: skip


def batches(keys: dict[str, Any], world: World) -> Iterator[tuple[Tensor, Tensor]]:
    """The same share of a global batch for every data rank."""
    share = BATCH // world.axis("dp").size
    generator = torch.Generator().manual_seed(world.axis("dp").rank)
    while True:
        if keys["name"] == "mlp":
            inputs = torch.randn(share, keys["in_features"], generator=generator)
            yield inputs, torch.randint(0, keys["out_features"], (share,), generator=generator)
        else:
            tokens = torch.randint(0, VOCABULARY, (share, SEQ_LEN + 1), generator=generator)
            yield tokens[:, :-1], tokens[:, 1:]


def class_loss(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return nn.functional.cross_entropy(output, targets, reduction="sum"), torch.tensor(
        float(targets.shape[0])
    )


def counted(
    world: World, family: str, text: str, optimizer: str = "adamw", keep: KeepGathered = None
) -> dict[str, float]:
    """Bytes that this rank sends in a step by axis, over as many steps as `local` has between two
    synchronisations.
    """
    plan = Plan.parse(text)
    keys = sizes(family, plan)
    with torch.device("meta"):
        model = models.make(
            keys["name"], **{key: value for key, value in keys.items() if key != "name"}
        )
    loss = class_loss if family in {"mlp", "odd"} else cross_entropy
    make = optimizers.from_config(Train(optimizer=optimizer))
    options = Options(keep_gathered=keep)
    engine = build(model, plan, loss=loss, optimizer=make, world=world, options=options)
    data = batches(keys, world)
    steps = plan.dp.every or 1
    if (
        plan.pp.size > 1 or steps > 1
    ):  # the shapes of a pipeline's tensors travel once; `local` counts from a synchronisation
        for _ in range(steps):
            engine.step(next(data))
    results = [engine.step(next(data)) for _ in range(steps)]
    totals: dict[str, float] = {}
    for result in results:
        for axis, sent in result.ledger.by_axis().items():
            totals[axis] = totals.get(axis, 0.0) + sent / steps
    return totals


def sizes(family: str, plan: Plan) -> dict[str, Any]:
    """The keys of the model that a plan is tried on."""
    short = (
        {}
        if plan.pp.size > 1 or family in {"mlp", "odd"}
        else {"num_hidden_layers": FIRST_MIDDLE_LAST}
    )
    return {**MODELS[family], **short}


def check(
    family: str,
    text: str,
    found: list[dict[str, float]],
    optimizer: str = "adamw",
    keep: KeepGathered = None,
) -> None:
    config = {
        "model": sizes(family, Plan.parse(text)),
        "data": {"seq_len": SEQ_LEN},
        "train": {"global_batch": BATCH, "optimizer": optimizer},
        "plan": {"keep_gathered": keep},
    }
    if family in {"mlp", "odd"}:
        config["data"] = {}
    predicted = plait.estimate(config, text, "h100x64").traffic
    if " ep" in text:  # tokens go where routers send them
        predicted.pop("ep")
        found = [{axis: sent for axis, sent in rank.items() if axis != "ep"} for rank in found]
    most = {axis: max(rank.get(axis, 0.0) for rank in found) for axis in predicted}
    assert {axis for rank in found for axis in rank} <= predicted.keys()
    assert most == {axis: math.floor(sent) for axis, sent in predicted.items()}


@pytest.mark.parametrize(("family", "text"), CASES)
def test_predicted_traffic_is_the_counted(family: str, text: str) -> None:
    plan = Plan.parse(text)
    check(family, text, threaded(plan.world_size, counted, family, text, plan=text))


@pytest.mark.parametrize(("family", "text"), PIPELINES)
def test_predicted_traffic_of_pipelines_is_the_counted(ranks: Run, family: str, text: str) -> None:
    plan = Plan.parse(text)
    check(family, text, ranks(plan.world_size, counted, family, text, plan=text))


@pytest.mark.parametrize("keep", [1, (0, 2), 3], ids=str)
@pytest.mark.parametrize(("family", "text"), KEPT)
def test_predicted_traffic_of_kept_blocks_is_the_counted(
    family: str, text: str, keep: KeepGathered
) -> None:
    plan = Plan.parse(text)
    found = threaded(plan.world_size, counted, family, text, "adamw", keep, plan=text)
    check(family, text, found, keep=keep)
    config = {"model": sizes(family, plan), "data": {"seq_len": SEQ_LEN}}
    whole = plait.estimate(config, text, "h100x64").traffic["dp"]
    assert max(rank["dp"] for rank in found) < whole


def test_predicted_traffic_of_kept_blocks_in_a_pipeline_is_the_counted(ranks: Run) -> None:
    text = "pp2:1f1b dp2:zero3 mb4"
    found = ranks(4, counted, "llama", text, "adamw", 3, plan=text)
    check("llama", text, found, keep=3)


@pytest.mark.parametrize(("family", "text"), WHOLE_MATRICES)
def test_predicted_traffic_of_muon_is_the_counted(family: str, text: str) -> None:
    plan = Plan.parse(text)
    found = threaded(plan.world_size, counted, family, text, "muon", plan=text)
    check(family, text, found, "muon")


def test_predicted_traffic_of_muon_in_a_pipeline_is_the_counted(ranks: Run) -> None:
    text = "pp2:1f1b dp2:zero1 mb2"
    check("gpt", text, ranks(4, counted, "gpt", text, "muon", plan=text), "muon")

"""Weights from safetensors: each rank reads what it keeps, the parallel model is the whole one, and
it comes back as files.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait import models
from plait.comm import World
from plait.engine.build import Options, build
from plait.engine.state.init import Initializer, place_holders
from plait.models import losses, weights
from plait.plan import Plan
from tests.parity.families import HUGGING_FACE
from tests.parity.harness import TOLERANCE, join, optimizer

transformers = pytest.importorskip("transformers")

Run = Callable[..., list[Any]]
CONFIGS = {
    "llama": HUGGING_FACE["hf-llama"],
    "tied": {**HUGGING_FACE["hf-llama"], "tie_word_embeddings": True},
    "gpt2": HUGGING_FACE["hf-gpt2"],
}
PLANS = ["dp2", "tp2 dp2:zero3", "tp4:2d dp2:zero1", "pp2 tp2:1d,sp mb2", "tp8:3d", "dp2:server"]


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 28, (12, 9), generator=torch.Generator().manual_seed(3))
    return tokens[:, :-1], tokens[:, 1:]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models that transformers has initialised and saved, in several files."""
    made = {}
    for name, config in CONFIGS.items():
        torch.manual_seed(1)
        settings = transformers.AutoConfig.for_model(**config)
        made[name] = tmp_path_factory.mktemp(name)
        transformers.AutoModelForCausalLM.from_config(settings).save_pretrained(
            made[name], max_shard_size="10KB"
        )
    return made


def whole(folder: Path) -> nn.Module:
    model = models.make("hf", config=folder, weights=folder)
    place_holders(model, torch.float64, torch.device("cpu"))

    def take(param: nn.Parameter, value: Tensor) -> None:
        param.data = value.clone()

    Initializer(model, 0, torch.float64, torch.device("cpu")).run(take)
    return model


def train(world: World, plan: str, folder: Path, out: Path) -> Any:
    read: list[int] = []
    close = weights.Reader.close

    def counting(reader: weights.Reader) -> None:
        read.append(reader.num_bytes)
        close(reader)

    weights.Reader.close = counting  # type: ignore[method-assign]
    try:
        model = models.make("hf", config=folder, weights=folder)
        engine = build(
            model,
            f"{plan} precision:float64",
            loss=losses.cross_entropy,
            optimizer=optimizer,
            options=Options(seed=5),
            world=world,
        )
    finally:
        weights.Reader.close = close  # type: ignore[method-assign]
    parts = [
        (part.name, part.global_shape, part.index(), part.values.clone())
        for part in engine.local_parameters()
    ]
    axis = world.axis("dp")
    loss = engine.step(
        tuple(part.tensor_split(axis.size)[axis.rank] for part in batch()), trace=False
    ).loss
    return read, parts, loss, engine.save_pretrained(out, dtype=torch.float32)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_saved_model_goes_on_in_parts_and_comes_back(
    ranks: Run, folders: dict[str, Path], tmp_path: Path, name: str, plan: str
) -> None:
    results = ranks(Plan.parse(plan).world_size, train, plan, folders[name], tmp_path, plan=plan)
    model = whole(folders[name])
    found = join([parts for _, parts, *_ in results])
    for key, param in model.named_parameters():
        assert torch.equal(found[key].view_as(param), param), key
    for (
        read,
        parts,
        *_,
    ) in results:  # four bytes an element in the files: no rank reads what it does not keep
        assert read == [4 * sum(value.numel() for *_, value in parts)]
    inputs, targets = batch()
    total, count = losses.cross_entropy(model(inputs), targets)
    (total / count).backward()
    expected = float((total / count).detach())
    for _, _, loss, _ in results:
        assert abs(loss - expected) <= TOLERANCE * expected
    with torch.no_grad():
        optimizer([(key, param) for key, param in model.named_parameters()]).step()
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in results[0][3]}
    assert back.config.model_type == CONFIGS[name]["model_type"]
    for key, param in model.named_parameters():
        torch.testing.assert_close(
            back.get_parameter(key.removeprefix("model.")), param.float(), rtol=1e-6, atol=1e-7
        )
    tied = back.get_output_embeddings().weight is back.get_input_embeddings().weight
    assert tied == (name != "llama")

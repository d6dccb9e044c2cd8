"""Hugging Face models of other tasks than causal: their inputs and the shape of their logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from plait import datasets, models
from plait.config import Config, Data
from plait.errors import ModelError
from plait.models import hf
from plait.run.assemble import make_dataset

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
BERT = {"model_type": "bert", "intermediate_size": 24, "vocab_size": 29, **SMALL}
VIT = {"model_type": "vit", "intermediate_size": 24, "image_size": 32, "num_labels": 3, **SMALL}
T5 = {"model_type": "t5", "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 4}
T5 |= {"vocab_size": 29, "decoder_start_token_id": 0}


@pytest.mark.parametrize(
    ("task", "config", "shape"),
    [("masked", BERT, (2, 8, 29)), ("seq2seq", T5, (2, 8, 29)), ("image", VIT, (2, 3))],
)
def test_random_data_fits_the_head_of_a_task(
    task: str, config: dict[str, Any], shape: tuple[int, ...]
) -> None:
    keys = {"name": "hf", "task": task, "config": config}
    data = datasets.make(Data(name="random", seq_len=8), keys)
    model = models.make(**keys)
    inputs = torch.stack([data[index][0] for index in range(2)])
    logits = model.make_start()(inputs)  # type: ignore[operator]
    assert tuple(logits.shape) == shape


@pytest.mark.parametrize(("task", "config"), [("masked", BERT), ("seq2seq", T5), ("image", VIT)])
def test_a_model_that_the_library_saved_is_read(
    task: str, config: dict[str, Any], tmp_path: Path
) -> None:
    """A T5 has a `base_model_prefix` that is in none of its names."""
    settings = transformers.AutoConfig.for_model(**config)
    theirs = getattr(transformers, hf.TASKS[task]).from_config(settings)
    theirs.save_pretrained(tmp_path)
    weights = hf.make(tmp_path, weights=tmp_path, task=task).weights
    assert weights is not None
    with weights.reading() as reader:
        for name, param in theirs.named_parameters():
            assert torch.equal(reader.read(f"model.{name}"), param)


@pytest.mark.parametrize(("task", "config"), [("masked", BERT), ("seq2seq", T5), ("image", VIT)])
def test_random_data_read_a_config_that_is_a_folder(
    task: str, config: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = []
    for place in (config, str(tmp_path)):
        model = {"name": "hf", "task": task, "config": place}
        data = {"name": "random", "seq_len": 8}
        found.append(make_dataset(Config.load({"model": model, "data": data}))[0])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_task_that_is_none_is_named() -> None:
    with pytest.raises(ModelError, match="did you mean 'masked'"):
        models.make("hf", config=BERT, task="maskd")


def test_random_tokens_come_from_the_vocabulary_of_a_nested_config() -> None:
    config = {"model_type": "gemma3", "text_config": {"vocab_size": 7}}
    data = datasets.make(Data(name="random", seq_len=8), {"name": "hf", "config": config})
    assert int(data[0][0].max()) < 7

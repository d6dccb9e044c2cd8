"""A vocabulary that is not bytes is not trained on bytes, unless the config says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plait.config import Config
from plait.errors import ConfigError, DataError
from plait.run.assemble import make_loader

SMALL = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1}


def config(model: Any, **data: Any) -> Config:
    return Config.load(
        {"model": {"name": "hf", "config": model}, "data": {"name": "stdlib", "seq_len": 8, **data}}
    )


@pytest.mark.parametrize("size", [257, 50257])
def test_the_vocabulary_of_a_tokenizer_is_refused_with_the_cure(size: int, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**SMALL, "vocab_size": size}))
    for model in ({**SMALL, "vocab_size": size}, str(file), str(tmp_path)):
        with pytest.raises(ConfigError, match=rf"vocab_size {size}, .* set vocab_size = 256"):
            config(model)
        assert config(model, tokenizer="bytes").data.tokenizer == "bytes"


def test_bytes_are_bytes() -> None:
    inputs, _ = next(iter(make_loader(config({**SMALL, "vocab_size": 256}))))
    assert int(inputs.max()) < 256


def test_the_vocabulary_of_the_family_is_one_too() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(DataError, match=r"vocabulary has 50257 tokens, .* set vocab_size = 256"):
        make_loader(config(SMALL))
    make_loader(config(SMALL, tokenizer="bytes"))

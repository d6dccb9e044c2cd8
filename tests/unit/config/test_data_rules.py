"""Keys of `[data]`, of its mixture and of `[eval] data`: one sentence for each that is wrong."""

from __future__ import annotations

import pytest

from plait.config import Config
from plait.errors import ConfigError

MODEL = {"name": "llama", "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
ONE = {"name": "files", "files": ["a"], "weight": 1}


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"name": "files"}, "data.files is missing; data 'files' needs files"),
        ({"name": "hf"}, "data.path is missing; data 'hf' needs path"),
        ({"name": "stdlib", "column": "a"}, "data.column belongs to data 'files' and 'hf', not to"),
        ({"name": "text", "files": ["a"], "tokenizer": "t"}, "data.tokenizer 't' belongs to data"),
        ({"name": "stdlib", "from_step": [0]}, "data.from_step belongs to a mixture"),
        ({"mixture": []}, "data.mixture has no source"),
        ({"mixture": 3}, "data.mixture = 3 is wrong: it must be a list of tables"),
        ({"mixture": [{"name": "files", "files": ["a"]}]}, "data.mixture[0].weight is missing"),
        ({"mixture": [{**ONE, "weight": -1}]}, "data.mixture[0].weight = -1 is wrong: it must be"),
        ({"mixture": [{**ONE, "fles": 1}]}, "unknown key data.mixture[0].fles; did you mean"),
        ({"mixture": [ONE, {"weight": 1}]}, "data.mixture[1].name is missing"),
        ({"mixture": [ONE, {**ONE, "weight": 0}]}, "data.mixture[1].weight is 0, so nothing is"),
        ({"mixture": [{**ONE, "weight": [1, 2]}]}, "data.mixture[0].weight has 2 numbers, and"),
        ({"mixture": [ONE], "name": "stdlib"}, "data.name and data.mixture are two sources"),
        ({"mixture": [ONE], "from_step": [1]}, "data.from_step [1] must begin with 0 and rise"),
        (
            {"mixture": [{**ONE, "weight": [1, 0]}], "from_step": [0, 5]},
            "data.mixture: all weights from step 5 on are 0",
        ),
    ],
)
def test_keys_that_do_not_go_together(data: dict[str, object], sentence: str) -> None:
    for tables in ({"data": data}, {"data": {"name": "stdlib"}, "eval": {"data": data}}):
        with pytest.raises(ConfigError) as raised:
            Config.load({"model": {**MODEL, "vocab_size": 256}, **tables})
        wanted = sentence if "eval" not in tables else sentence.replace("data.", "eval.data.", 1)
        assert wanted in str(raised.value)

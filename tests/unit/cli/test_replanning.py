"""The plan that a run goes on under when ranks are lost for good."""

from __future__ import annotations

import pytest

from plait.cli import replanning
from plait.config import Config
from plait.errors import ModelError, PlanError
from plait.plan import Plan


def config(text: str) -> Config:
    return Config.load(
        {
            "model": {
                "name": "gpt",
                "num_hidden_layers": 4,
                "hidden_size": 64,
                "num_attention_heads": 4,
                "vocab_size": 256,
                "max_position_embeddings": 64,
            },
            "data": {"name": "stdlib", "seq_len": 64},
            "train": {"global_batch": 16},
            "plan": {"text": text},
            "cluster": {"name": "h100x4"},
            "recovery": {"replan": "auto", "restarts": 0},
        }
    )


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_the_planner_keeps_the_precision_of_the_run(precision: str) -> None:
    """A preset's own precision is bf16, and a plan without the word is float32."""
    word = "" if precision == "float32" else f" precision:{precision}"
    given = config(f"dp4:zero1{word}")
    choose = replanning.policy(given, Plan.parse(given.plan.text)).choose
    assert choose is not None
    chosen = choose(2)
    assert chosen is not None
    assert Plan.parse(chosen.text).precision == precision
    assert chosen.size == 2


@pytest.mark.parametrize(
    ("keys", "error"),
    [({"counts": [1, 1, 1, 1]}, ModelError), ({"keep_gathered": 1}, PlanError)],
)
def test_a_listed_plan_that_the_keys_of_plan_exclude_is_refused_before_the_run(
    keys: dict[str, object], error: type[Exception]
) -> None:
    first = "pp4" if "counts" in keys else "dp4:zero3"
    tables = config(first).as_dict()
    listed = {**tables["recovery"], "replan": ["pp2"], "restarts": 1}
    if "keep_gathered" in keys:
        listed["replan"] = ["dp2"]
    given = Config.load({**tables, "plan": {"text": first, **keys}, "recovery": listed})
    with pytest.raises(error, match=next(iter(keys))):
        replanning.check(given, Plan.parse(first))

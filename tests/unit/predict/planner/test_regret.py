"""The search against the enumeration of every plan, for frameworks that offer little and much."""

import pytest
from benchmarks.planner.regret import exhaustive

from plait.predict.cost.frameworks import FRAMEWORKS
from plait.predict.planner.choose import decide
from plait.predict.planner.search import SearchSettings

CONFIG = {
    "model": {
        "name": "gpt",
        "num_hidden_layers": 24,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "vocab_size": 50304,
    },
    "data": {"seq_len": 2048},
    "train": {"global_batch": 64},
}


@pytest.mark.parametrize("name", ["torchtitan", "nanotron", "deepspeed", "fsdp"])
def test_no_plan_that_a_framework_offers_beats_the_choice(name):
    choice = decide(CONFIG, "a100-40gbx8", framework=name)
    settings = SearchSettings(framework=FRAMEWORKS[name])
    best, looked = exhaustive(choice.job, choice.machine, 8, settings, bounded=True)
    assert looked > 20 and best is not None
    assert choice.plans[0].step_seconds <= best.step_seconds * 1.01

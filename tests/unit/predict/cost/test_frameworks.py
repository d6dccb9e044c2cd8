"""Other frameworks by name: what they offer, and a prediction of the plan as they would run it."""

import json

import pytest

import plait
from plait.cli import main
from plait.errors import ConfigError
from plait.plan import Plan
from plait.predict.cost.frameworks import FRAMEWORKS, PLAIT, framework_of
from plait.predict.planner.export import export_plan
from tests.unit.predict.cost.shapes import LLAMA_8B, config

EXPORTS = {"megatron-core": "megatron-lm", "torchtitan": "torchtitan"}
"""The frameworks that a plan can be exported to."""


def test_names():
    assert framework_of("Megatron_Core") is framework_of("nemo") is FRAMEWORKS["megatron-core"]
    assert framework_of(PLAIT) is PLAIT
    with pytest.raises(ConfigError, match="did you mean 'torchtitan'"):
        framework_of("torchtitn")


def test_plait_is_what_is_asked_by_default():
    asked = config(LLAMA_8B), "tp4:1d,sp dp2:zero1 precision:bf16", "h100x8"
    assert plait.estimate(*asked) == plait.estimate(*asked, framework="plait")


@pytest.mark.parametrize(
    ("name", "plan", "offered"),
    [
        ("plait", "tp4:2d pp2:zbv cp2:ulysses", True),
        ("megatron-core", "tp8:1d,sp pp4:interleaved,v2 cp2 dp2:zero1", True),
        ("megatron-core", "tp4:2d", False),
        ("megatron-core", "pp4:zbv mb8", False),
        ("megatron-core", "dp8:zero3", False),
        ("megatron-deepspeed", "tp8:1d,sp", False),
        ("torchtitan", "pp4:zbv mb8 dp2:zero3", True),
        ("torchtitan", "cp2:ulysses", False),
        ("fsdp", "dp16:zero3,replicate2", True),
        ("fsdp", "tp2", False),
        ("nanotron", "ep2 dp2", False),
    ],
)
def test_what_a_framework_offers(name, plan, offered):
    assert FRAMEWORKS[name].offers(Plan.parse(plan).check()) is offered


def test_its_kernels_and_habits_change_the_prediction():
    plan = "tp8:1d,sp dp8:zero1 mb4 precision:bf16"
    cluster = "h100x64"
    own, core = (
        plait.estimate(config(LLAMA_8B), plan, cluster, framework=name)
        for name in ("plait", "megatron-core")
    )
    assert (
        core.step_seconds < own.step_seconds
    )  # fused kernels, products that hide their collectives
    assert core.memory.gradients < own.memory.gradients


def test_an_attention_that_the_config_names_stays():
    named = {**LLAMA_8B, "attn_implementation": "eager"}
    plan = "dp8:zero1 precision:bf16"
    cluster = "h100x8"
    eager, fused = (
        plait.estimate(config(keys), plan, cluster, framework="megatron-core")
        for keys in (named, LLAMA_8B)
    )
    assert eager.step_seconds > fused.step_seconds


@pytest.mark.parametrize("name", [name for name in FRAMEWORKS if name != "plait"])
def test_what_is_chosen_for_a_framework_is_offered_by_it(name):
    chosen = plait.choose(config(LLAMA_8B, seq_len=8192), "h100x32", framework=name)
    assert chosen and all(FRAMEWORKS[name].offers(one.plan) for one in chosen)
    again = plait.estimate(
        config(LLAMA_8B, seq_len=8192), chosen[0].plan, "h100x32", framework=name
    )
    assert again.step_seconds == chosen[0].step_seconds


@pytest.mark.parametrize(("name", "target"), EXPORTS.items())
def test_what_is_chosen_for_a_framework_can_be_written_in_its_words(name, target):
    for one in plait.choose(config(LLAMA_8B, seq_len=8192), "h100x32", framework=name):
        written = export_plan(one.plan, target)
        assert not written.other_ranks
        assert not [
            word for word in written.missing if not word.startswith(("remat", "a global batch"))
        ]


def test_the_verbs_take_it(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({**LLAMA_8B, "model_type": "llama", "max_position_embeddings": 4096})
    )
    asked = [str(path), "--cluster", "h100x16", "--framework", "torchtitan", "--json"]
    assert main(["plan", *asked]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["framework"] == "torchtitan"
    assert all(FRAMEWORKS["torchtitan"].offers(Plan.parse(one["plan"])) for one in told["plans"])
    assert main(["estimate", *asked, "--plan", "tp4:2d dp4"]) in {0, 1}
    assert "torchtitan does not offer" in json.loads(capsys.readouterr().out)["notes"][0]
    assert main(["plan", str(path), "--cluster", "h100x16", "--framework", "torchtitn"]) == 2
    assert "torchtitan" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "offered", "refused"),
    [
        ("deepspeed", "pp2 dp4:zero1 mb4", "pp2 dp4:zero2 mb4"),
        ("deepspeed", "cp2:ulysses dp4:zero3", "cp2 dp4:zero3"),
        ("accelerate", "tp2 dp2:zero3 cp2", "pp2 dp4 mb4"),
        ("Accelerate_FSDP2", "dp8:zero3,replicate2", "dp8:zero1"),
        ("maxtext", "pp2:gpipe tp2:1d,sp dp2:zero3 mb4", "pp2 dp4:zero3 mb4"),
    ],
)
def test_what_more_frameworks_offer(name, offered, refused):
    runs = framework_of(name)
    assert runs.offers(Plan.parse(offered)) and not runs.offers(Plan.parse(refused))


@pytest.mark.parametrize("name", ["deepspeed", "accelerate", "maxtext"])
def test_more_frameworks_choose_among_their_own_plans(name):
    plans = plait.choose(config(LLAMA_8B, 2048, 32), "h100x16", framework=name)
    assert plans and all(framework_of(name).offers(one.plan) for one in plans)

"""Configs of other frameworks become plans, and no key is dropped without a word."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path

import pytest

from plait.config import Config
from plait.errors import ConfigError, PlanError
from plait.interop import import_file, import_text
from plait.interop.source import Source
from plait.plan import Plan
from plait.predict.planner.export import EXPORTERS, export_plan

CONFIGS = Path(__file__).parent / "configs"
PLANS = {
    "deepspeed.json": ("deepspeed", "dp8:zero2,offload mb4 precision:bf16"),
    "megatron.sh": ("megatron-lm", "pp2:1f1b tp4:1d,sp dp4:zero1 mb32 precision:bf16"),
    "torchtitan.toml": (
        "torchtitan",
        "pp2:interleaved,v2 tp2:1d,sp dp8:zero3,replicate2 mb8 remat:selective precision:bf16 "
        "compile",
    ),
    "accelerate.yaml": ("accelerate", "dp8:zero3 remat:full precision:bf16"),
    "axolotl.yaml": ("axolotl", "tp2 dp4:zero3 mb4 remat:full precision:bf16"),
    "llama_factory.yaml": (
        "llama-factory",
        "pp4:1f1b ep2 dp2:zero1 mb8 remat:full precision:bf16",
    ),
    "nemo.yaml": (
        "nemo",
        "pp2:interleaved,v2 tp4:1d,sp cp2:ring dp2:zero1 mb32 remat:full precision:bf16",
    ),
    "megatron_bridge.yaml": ("nemo", "pp2:1f1b tp4:1d,sp ep4 dp4:zero1 mb32 precision:bf16"),
    "nanotron.yaml": ("nanotron", "pp2:1f1b tp2:1d,sp dp2:zero1 mb4 precision:bf16"),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("told", [True, False])
def test_a_config_becomes_its_plan(name: str, told: bool) -> None:
    framework, plan = PLANS[name]
    imported = import_file(CONFIGS / name, framework if told else None)
    assert imported.framework == framework
    assert imported.plan == str(Plan.parse(plan))
    assert imported.config["plan"]["text"] == imported.plan


@pytest.mark.parametrize("name", PLANS)
def test_every_key_is_mapped_or_named(name: str) -> None:
    imported = import_file(CONFIGS / name)
    named = {item.key for item in imported.unmapped}
    assert all(item.reason for item in imported.unmapped)
    if name.endswith(".json"):
        keys = Source.of("", json.loads((CONFIGS / name).read_text())).values
        assert set(keys) == named | set(imported.mapped)
    unknown = [item.key for item in imported.unmapped if item.kind == "unknown"]
    assert unknown == (["made-up-option"] if name == "megatron.sh" else [])


def test_values_of_training_and_model_are_carried_over() -> None:
    config = import_file(CONFIGS / "nanotron.yaml").config
    read = Config.load(config)
    assert read.train.lr == 0.0003
    assert read.train.betas == (0.9, 0.95)
    assert read.train.global_batch == 16
    assert config["model"]["num_key_value_heads"] == 2
    config = import_file(CONFIGS / "megatron.sh").config
    assert Config.load(config).train.weight_decay == 0.1
    assert config["model"]["name"] == "llama"
    assert config["train"]["warmup_steps"] == 5
    assert Config.load(import_file(CONFIGS / "torchtitan.toml").config).train.steps == 1000


def test_what_differs_there_is_said() -> None:
    def kinds(name: str) -> dict[str, str]:
        return {item.key: item.kind for item in import_file(CONFIGS / name).unmapped}

    assert kinds("deepspeed.json")["gradient_accumulation_steps"] == "different"
    assert kinds("deepspeed.json")["communication_data_type"] == "different"
    assert kinds("megatron.sh")["weight-decay"] == "different"
    assert kinds("torchtitan.toml")["model.converters"] == "different"
    assert kinds("axolotl.yaml")["load_in_4bit"] == "different"
    assert kinds("axolotl.yaml")["num_epochs"] == "ignored"


def test_a_base_in_four_bits_is_one_here() -> None:
    adapter = import_file(CONFIGS / "axolotl.yaml").config["adapter"]
    assert (adapter["kind"], adapter["base"], adapter["rank"]) == ("lora", "nf4", 16)


ROUND_TRIPS = [
    "dp1",
    "dp4",
    "dp8:zero1 mb2",
    "dp8:zero2 mb4 precision:bf16",
    "dp8:zero3 mb2",
    "dp4:zero1,offload",
    "tp4:1d,sp dp2:zero1 mb4",
    "tp2 dp2:zero1",
    "pp2:1f1b tp2:1d,sp dp2:zero1 mb8",
    "pp4:interleaved,v2 dp2 mb8 precision:bf16",
    "pp4:1f1b dp2:zero3 mb8",
    "cp2:ring dp2:zero1 mb2",
    "cp4:ulysses dp2:zero1",
    "tp2:1d,sp dp4:zero3 ep2 mb2",
    "dp8:zero3,replicate2 mb2",
    "pp2:gpipe dp2:zero3 mb4",
    "pp2:zbv dp4:zero3 mb8 compile",
    "dp4:zero3 remat:full precision:bf16 compile",
]


@pytest.mark.parametrize("framework", EXPORTERS)
@pytest.mark.parametrize("text", ROUND_TRIPS)
def test_export_then_import_is_the_identity_where_the_export_is_complete(
    text: str, framework: str
) -> None:
    plan = Plan.parse(text)
    exported = export_plan(plan, framework, global_batch=64)
    if exported.missing:
        return
    form = {"deepspeed": "json", "torchtitan": "toml", "megatron-lm": "shell"}[framework]
    assert import_text(exported.text, form, framework).plan == str(plan)


def test_most_of_the_round_trips_are_complete() -> None:
    complete = sum(
        not export_plan(Plan.parse(text), framework, 64).missing
        for text in ROUND_TRIPS
        for framework in EXPORTERS
    )
    assert complete >= 28


DATA = ("", ":zero1", ":zero2", ":zero3", ":zero3,replicate2", ":zero1,offload", ":zero3,offload")
PIPELINES = ("1f1b", "gpipe", "interleaved,v2", "zbv", "zb-h1", "dualpipev", "v-half")
TERMS = (
    [""] + [f"dp{size}{kind}" for size in (2, 4, 8) for kind in DATA],
    ["", "", "tp2:1d", "tp2:1d,sp", "tp4:1d", "tp4:1d,sp"],
    ["", *(f"pp{size}:{name}" for size in (2, 4) for name in PIPELINES)],
    ["", "", "", "cp2:ring", "cp4:ring", "cp2:ulysses"],
    ["", "", "", "ep2"],
    [f"mb{count}" for count in (1, 2, 4, 8)],
    ["", "", "remat:full", "remat:selective"],
    ["", "precision:bf16"],
    ["", "", "compile"],
)


def random_plans(count: int) -> list[Plan]:
    """Plans of any axes that pass their own rules."""
    rng = random.Random(0)
    plans: list[Plan] = []
    while len(plans) < count:
        plan = Plan.parse(" ".join(rng.choice(terms) for terms in TERMS))
        with contextlib.suppress(PlanError):
            plan.check()
            plans.append(plan)
    return plans


@pytest.mark.parametrize("framework", EXPORTERS)
def test_export_then_import_is_the_identity_on_random_plans(framework: str) -> None:
    form = {"deepspeed": "json", "torchtitan": "toml", "megatron-lm": "shell"}[framework]
    complete = 0
    for plan in random_plans(4000):
        exported = export_plan(plan, framework, global_batch=512)
        if not exported.missing:
            complete += 1
            assert import_text(exported.text, form, framework).plan == str(plan)
    assert complete >= 20


def test_the_number_of_ranks_fills_what_a_file_leaves_open() -> None:
    text = "[parallelism]\ntensor_parallel_degree = 2\n[training]\nlocal_batch_size = 1\n"
    imported = import_text(text, "toml", "torchtitan", world_size=8)
    assert imported.plan == "tp2:1d,sp dp4:zero3 precision:bf16"


BATCH = "--global-batch-size 64 --micro-batch-size 2"


@pytest.mark.parametrize(
    ("text", "framework", "plan", "ranks"),
    [
        (BATCH, "megatron-lm", "dp32", 32),
        (f"--pipeline-model-parallel-size 2 {BATCH}", "megatron-lm", "pp2 dp1 mb32", 2),
        ("--tensor-model-parallel-size 4 --lr 1e-4", "megatron-lm", "tp4", 4),
        ('{"zero_optimization": {"stage": 3}}', "deepspeed", "dp1:zero3", 1),
    ],
)
def test_ranks_that_a_file_does_not_say_are_assumed_with_a_word(
    text: str, framework: str, plan: str, ranks: int
) -> None:
    form = "json" if framework == "deepspeed" else "shell"
    imported = import_text(text, form, framework)
    assert imported.plan == str(Plan.parse(plan))
    (sentence,) = imported.as_dict()["assumed"]
    assert f"which makes {ranks}; say --gpus N" in sentence
    assert not import_text(text, form, framework, world_size=ranks).assumed


@pytest.mark.parametrize(("said", "count"), [("", 1), ("--vocab-size 64", 0)])
def test_a_vocabulary_that_a_file_does_not_say_is_assumed_with_a_word(
    said: str, count: int
) -> None:
    sizes = "--num-layers 2 --hidden-size 8 --num-attention-heads 2"
    imported = import_text(f"{sizes} {said}", "shell", "megatron-lm", world_size=1)
    assert len([one for one in imported.assumed if "vocabulary: 50257 is taken" in one]) == count
    assert len(imported.assumed) == count


def test_ranks_that_follow_from_the_batch_are_not_assumed() -> None:
    text = (
        '{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, '
        '"gradient_accumulation_steps": 4}'
    )
    imported = import_text(text, "json", "deepspeed")
    assert (imported.plan, imported.assumed) == ("dp4 mb4", [])


@pytest.mark.parametrize(
    ("text", "form", "framework", "words"),
    [
        ("{", "json", "deepspeed", "not valid JSON"),
        ("[1]", "json", "deepspeed", "not a table of keys"),
        ("{}", "json", "deepspeed", "no key in it"),
        ("a: [", "yaml", "axolotl", "not valid YAML"),
        ('{"hello": 1}', "json", None, "no key tells whose config it is"),
        ('{"train_batch_size": "x"}', "json", "deepspeed", "is no number"),
        (
            '{"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}',
            "json",
            "deepspeed",
            "does not",
        ),
        ("parallelism:\n  dp: 0\n", "yaml", "nanotron", "one rank or more"),
        ("--tensor-model-parallel-size 2", "shell", "colossal", "nothing is imported from"),
    ],
)
def test_bad_input_is_one_sentence(text: str, form: str, framework: str | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        import_text(text, form, framework)


def test_a_value_where_a_table_belongs_is_of_the_wrong_type() -> None:
    with pytest.raises(ConfigError, match="zero_optimization = 5 is of the wrong type; it must"):
        import_text('{"zero_optimization": 5}', "json", "deepspeed")


SCRIPT = """#!/bin/bash
GPUS_PER_NODE=8
NNODES=2
DISTRIBUTED_ARGS="--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES"
TRAINING_ARGS="--micro-batch-size 1 --global-batch-size 64 --lr 6.0e-5 \\
    --train-iters 500"
NAME="a run of mine"
PRECISION=bf16
if [ "$PRECISION" = bf16 ]; then
    TRAINING_ARGS+=(--bf16)
fi
PARALLEL_ARGS=(
    --tensor-model-parallel-size 4
    --pipeline-model-parallel-size
        2
    --seed 5
)
mkdir -p logs
cmd="torchrun $DISTRIBUTED_ARGS pretrain_gpt.py $TRAINING_ARGS --clip-grad 0.5"
echo "$cmd"
"""


def test_options_in_quotes_are_read_and_end_with_their_command() -> None:
    imported = import_text(SCRIPT, "shell")
    assert imported.plan == "pp2 tp4 dp2 mb32 precision:bf16"
    train = imported.config["train"]
    assert (train["lr"], train["steps"], train["global_batch"]) == (6e-5, 500, 64)
    assert (train["seed"], train["clip_grad_norm"]) == (5, 0.5)
    assert not [item for item in imported.unmapped if item.kind == "unknown"]


def test_options_alone_may_stand_one_to_a_line() -> None:
    text = "# WORLD_SIZE=4\n--tensor-model-parallel-size\n2\n--lr\n1e-4\n--bf16\n"
    imported = import_text(text, "shell")
    assert (imported.plan, imported.config["train"]["lr"]) == ("tp2 dp2 precision:bf16", 1e-4)


def test_ranks_that_the_file_contradicts_are_refused() -> None:
    text = "parallelism: {dp: 2, tp: 2, pp: 2}\ntokens: {micro_batch_size: 1}\n"
    with pytest.raises(ConfigError, match="which is 8 ranks, and 7 were asked for"):
        import_text(text, "yaml", "nanotron", world_size=7)
    assert import_text(text, "yaml", "nanotron", world_size=8).plan == "pp2 tp2 dp2 mb1"


def test_a_file_of_another_framework_is_refused_though_some_keys_are_named_alike() -> None:
    text = "[training]\nlocal_batch_size = 8\n[checkpoint]\nload_universal = true\n"
    with pytest.raises(ConfigError, match="they are those of torchtitan: say --from torchtitan"):
        import_text(text, "toml", "deepspeed")


def test_arguments_of_transformers_are_nobodys_config() -> None:
    text = "model_name_or_path: m\nbf16: true\ngradient_accumulation_steps: 2\n"
    with pytest.raises(ConfigError, match="no key tells whose config it is"):
        import_text(text, "yaml")

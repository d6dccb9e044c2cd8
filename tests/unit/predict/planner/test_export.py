"""Plans in other frameworks' words."""

import json

import pytest

from plait.errors import PlanError
from plait.plan import Plan
from plait.predict.planner.export import export_plan
from plait.predict.planner.export_section import with_section

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

THREE_D = Plan.parse("tp8:1d,sp pp8:interleaved,v2 dp4:zero1 mb64 precision:bf16")


def test_megatron_says_all_of_a_3d_plan():
    out = export_plan(THREE_D, "megatron-lm", 256)
    assert not out.missing
    for words in (
        "--tensor-model-parallel-size 8 --sequence-parallel",
        "--pipeline-model-parallel-size 8",
        "--bf16",
    ):
        assert words in out.text
    assert (
        "--num-virtual-stages-per-pipeline-rank 2" in out.text
        and "--use-distributed-optimizer" in out.text
    )
    assert "--micro-batch-size 1 --global-batch-size 256" in out.text


def test_deepspeed_is_json_whose_batches_multiply():
    out = export_plan(Plan.parse("dp4:zero3,offload mb2 precision:bf16"), "deepspeed", 64)
    config = json.loads(out.text)
    assert not out.missing
    assert config["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    }
    micro = config["train_micro_batch_size_per_gpu"]
    steps = config["gradient_accumulation_steps"]
    assert micro * steps * 4 == config["train_batch_size"] == 64


def test_torchtitan_is_toml_with_the_degrees():
    out = export_plan(
        Plan.parse("pp2:zbv tp4:1d,sp dp8:zero3,replicate2 mb8 remat:full compile"),
        "torchtitan",
        64,
    )
    table = tomllib.loads(out.text)
    assert not out.missing
    assert table["parallelism"]["data_parallel_shard_degree"] == 4
    assert table["parallelism"]["data_parallel_replicate_degree"] == 2
    assert table["parallelism"]["pipeline_parallel_schedule"] == "ZBVZeroBubble"
    assert table["activation_checkpoint"]["mode"] == "full" and table["compile"]["enable"] is True


@pytest.mark.parametrize("framework", ["megatron-lm", "deepspeed", "torchtitan"])
@pytest.mark.parametrize("text", ["tp4:2d", "dp4:server", "dp4:local,every8"])
def test_what_cannot_be_said_is_named(framework, text):
    plan = Plan.parse(text)
    missing = export_plan(plan, framework).missing
    assert any(str(plan.tp if plan.tp.size > 1 else plan.dp) in line for line in missing)


def test_an_unknown_framework_names_the_nearest():
    with pytest.raises(PlanError, match="did you mean 'megatron-lm'"):
        export_plan(THREE_D, "megatrn")
    assert export_plan(THREE_D, "Megatron").framework == "megatron-lm"


def test_torchtitan_adds_up_micro_batches_without_a_pipeline_and_cuts_them_with_one():
    alone = tomllib.loads(export_plan(Plan.parse("dp8:zero3 mb4"), "torchtitan", 256).text)
    assert (
        alone["training"]["local_batch_size"] == 8 and alone["training"]["global_batch_size"] == 256
    )
    piped = tomllib.loads(export_plan(Plan.parse("pp2 dp4:zero3 mb4"), "torchtitan", 256).text)
    assert (
        "layers_per_stage = layers / 8"
        in export_plan(Plan.parse("pp2:interleaved,v4 mb8"), "torchtitan", 16).text
    )
    assert (
        piped["training"]["local_batch_size"] == 64
        and piped["parallelism"]["pipeline_parallel_microbatch_size"] == 16
    )


@pytest.mark.parametrize(
    ("text", "framework", "said", "other_ranks"),
    [
        ("cp2 dp2", "deepspeed", "choose cp2:ulysses", True),
        ("tp4:2d dp2", "megatron-lm", "choose tp4:1d", True),
        ("precision:float64", "deepspeed", "float64", False),
        ("precision:float64", "torchtitan", "float64", False),
        ("precision:fp8", "deepspeed", "exported as bf16", False),
        ("precision:mxfp8", "torchtitan", "converters", False),
        ("dp4:zero3,offload", "torchtitan", "weights and gradients as well", False),
        ("dp4:zero1,offload", "torchtitan", "FSDP2 only", False),
        ("dp2 tp2:1d,sp", "torchtitan", "goes with no other axis", False),
        ("ep2 dp2 tp2", "megatron-lm", "sequence parallel beside experts", False),
        ("compile", "deepspeed", "engine.compile()", False),
    ],
)
def test_nothing_is_left_out_in_silence(text, framework, said, other_ranks):
    out = export_plan(Plan.parse(text), framework, 16)
    assert any(said in line for line in out.missing) and out.other_ranks == other_ranks


def test_megatron_has_words_for_eight_and_four_bits():
    for word, option in (("fp8", "tensorwise"), ("mxfp8", "mxfp8"), ("nvfp4", "nvfp4")):
        out = export_plan(Plan.parse(f"dp2 precision:{word}"), "megatron-lm", 16)
        assert "--bf16" in out.text and option in out.text and not out.missing


SHARDED = Plan.parse("dp8:zero3 mb2")


def section(plan, framework, keys, layers=4):
    tables = {"model": {"num_hidden_layers": layers}, "plan": keys}
    return with_section(export_plan(plan, framework, 16), plan, tables)


def test_layers_that_stay_gathered_are_written_or_said_to_be_lost():
    for keep in (4, [0, 1, 2, 3]):
        out = section(SHARDED, "torchtitan", {"keep_gathered": keep})
        written = tomllib.loads(out.text)["parallelism"]
        assert written["fsdp_reshard_after_forward"] == "never"
        assert any("each micro-batch gathers it" in line for line in out.missing)
    once = Plan.parse("dp8:zero3")
    assert not section(once, "torchtitan", {"keep_gathered": 4}).missing
    part = section(once, "torchtitan", {"keep_gathered": [0, 1]})
    assert "reshard" not in part.text
    assert part.missing == [
        "plan.keep_gathered (blocks 0 to 1): torchtitan keeps all layers or none; exported with "
        "none"
    ]
    for framework in ("deepspeed", "megatron-lm"):
        (line,) = section(once, framework, {"keep_gathered": 2}).missing
        assert line.startswith("plan.keep_gathered (blocks 2 to 3)")
    assert "auto" in section(once, "torchtitan", {"keep_gathered": "auto"}).missing[0]
    with pytest.raises(PlanError, match="4 blocks"):
        section(once, "torchtitan", {"keep_gathered": 5})
    with pytest.raises(PlanError, match="layers are whole"):
        section(Plan.parse("dp8"), "torchtitan", {"keep_gathered": 1})


def test_unequal_parts_and_activations_in_host_memory_are_said_to_be_lost():
    keys = {"shares": [3, 1], "counts": [3, 1], "offload_activations": True}
    out = section(Plan.parse("pp2 dp2 mb2"), "megatron-lm", keys)
    assert [line.partition(" ")[0].rstrip(":") for line in out.missing] == [
        "plan.shares",
        "plan.counts",
        "plan.offload_activations",
    ]
    assert not section(Plan.parse("dp4"), "megatron-lm", {"shares": [3, 1]}).missing

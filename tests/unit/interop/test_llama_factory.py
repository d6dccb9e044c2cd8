"""Files of LLaMA-Factory: what they say, and what transformers' Trainer takes where they do not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.config import Config
from plait.errors import ConfigError
from plait.interop import Imported, import_file, import_text
from plait.plan import Plan

BASE = "model_name_or_path: m\nstage: sft\nfinetuning_type: full\ncutoff_len: 512\nbf16: true\n"


def imported(lines: str = "", base: str = BASE, ranks: int | None = 4) -> Imported:
    return import_text(base + lines, "yaml", world_size=ranks)


def kinds(result: Imported) -> dict[str, str]:
    return {item.key: item.kind for item in result.unmapped}


def test_what_a_file_leaves_out_is_the_trainers() -> None:
    result = imported()
    assert result.framework == "llama-factory"
    assert result.plan == str(Plan.parse("dp4 mb1 remat:full precision:bf16"))
    train = Config.load(result.config).train
    assert (train.lr, train.schedule, train.clip_grad_norm, train.seed) == (5e-5, "linear", 1.0, 42)
    assert train.global_batch == 4 * 8
    assert result.config["data"]["seq_len"] == 512
    assert "adapter" not in result.config
    batch = imported("per_device_train_batch_size: 2\ngradient_accumulation_steps: 3\n")
    assert batch.config["train"]["global_batch"] == 4 * 2 * 3
    assert Plan.parse(batch.plan).micro_batches == 3


@pytest.mark.parametrize(
    ("lines", "plan"),
    [
        ("disable_gradient_checkpointing: true", "dp4 mb1 precision:bf16"),
        ("deepspeed: examples/deepspeed/ds_z3_config.json", "dp4:zero3 remat:full precision:bf16"),
        ("deepspeed: ds_z2_offload_config.json", "dp4:zero2 remat:full precision:bf16"),
        ("fsdp: full_shard auto_wrap", "dp4:zero3 remat:full precision:bf16"),
        ("fsdp: shard_grad_op offload", "dp4:zero2,offload remat:full precision:bf16"),
        (
            "tensor_model_parallel_size: 2\nsequence_parallel: true",
            "tp2:1d,sp dp2 remat:full precision:bf16",
        ),
        (
            "pipeline_model_parallel_size: 2\nvirtual_pipeline_model_parallel_size: 2\n"
            "gradient_accumulation_steps: 4",
            "pp2:interleaved,v2 dp2 mb4 remat:full precision:bf16",
        ),
        ("context_parallel_size: 2", "cp2:ring dp2 remat:full precision:bf16"),
    ],
)
def test_its_words_become_a_plan(lines: str, plan: str) -> None:
    assert imported(lines).plan == str(Plan.parse(plan))


def test_adapters_are_lora_on_all_layers_unless_it_says_other() -> None:
    plain = imported(base="model_name_or_path: m\ncutoff_len: 64\n")
    adapter = Config.load(plain.config).adapter
    assert adapter is not None
    assert (adapter.kind, adapter.rank, adapter.alpha, adapter.targets) == ("lora", 8, 16, None)
    lines = "lora_rank: 4\nlora_target: q_proj, v_proj\nlora_dropout: 0.1\nquantization_bit: 4\n"
    base = BASE.replace("full", "lora")
    named = imported(lines, base).config["adapter"]
    assert named["targets"] == ["q_proj", "v_proj"]
    assert (named["rank"], named["alpha"], named["dropout"], named["base"]) == (4, 8, 0.1, "nf4")
    assert imported("use_dora: true\n", base).config["adapter"]["kind"] == "dora"


def test_what_differs_there_is_said() -> None:
    result = imported("packing: true\nuse_galore: true\nneftune_noise_alpha: 5\nnovel: 1\n")
    found = kinds(result)
    assert [found[key] for key in ("packing", "use_galore", "neftune_noise_alpha")] == [
        "different"
    ] * 3
    assert found["novel"] == "unknown"
    other = imported(base=BASE.replace("sft", "dpo"))
    assert kinds(other)["stage"] == "different"
    decay = imported("weight_decay: 0.1\n").config["train"]
    assert (decay["weight_decay"], decay["no_decay"]) == (0.1, ["bias", "norm"])


def test_a_warm_up_is_counted_once_the_steps_are_known() -> None:
    assert kinds(imported("warmup_ratio: 0.1\n"))["warmup_ratio"] == "ignored"
    told = imported("warmup_ratio: 0.1\nmax_steps: 55\n").config["train"]
    assert (told["warmup_steps"], told["steps"]) == (6, 55)
    assert "steps" not in imported("max_steps: -1\n").config["train"]


def test_the_file_of_deepspeed_is_found_from_the_top_of_the_checkout(tmp_path: Path) -> None:
    examples = tmp_path / "examples"
    (examples / "train_full").mkdir(parents=True)
    (examples / "deepspeed").mkdir()
    config = {"zero_optimization": {"stage": 1}, "train_batch_size": "auto"}
    (examples / "deepspeed" / "ds_z3_config.json").write_text(json.dumps(config))
    file = examples / "train_full" / "sft.yaml"
    file.write_text(f"{BASE}deepspeed: examples/deepspeed/ds_z3_config.json\n")
    assert Plan.parse(import_file(file, world_size=4).plan).dp.strategy == "zero1"


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="4 ranks do not divide by tp3"):
        imported("tensor_model_parallel_size: 3\n")
    with pytest.raises(ConfigError, match="per_device_train_batch_size = 0"):
        imported("per_device_train_batch_size: 0\n")

"""YAML of NeMo and Megatron-Bridge, and files of frameworks that are known and not read."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.config import Config
from plait.errors import ConfigError
from plait.interop import import_file, import_text
from plait.plan import Plan

CONFIGS = Path(__file__).parent / "configs"
NEMO = (CONFIGS / "nemo.yaml").read_text()
BRIDGE = (CONFIGS / "megatron_bridge.yaml").read_text()


def test_values_of_nemo_are_carried_over() -> None:
    imported = import_file(CONFIGS / "nemo.yaml")
    read = Config.load(imported.config)
    assert (read.train.global_batch, read.train.steps, read.train.lr) == (64, 2000, 3e-4)
    assert (read.train.betas, read.train.min_lr, read.train.warmup_steps) == (
        (0.9, 0.95),
        3e-5,
        100,
    )
    model = imported.config["model"]
    assert (model["name"], model["num_key_value_heads"]) == ("llama", 8)
    assert model["max_position_embeddings"] == 4096 and model["tie_word_embeddings"] is False
    assert "trainer.devices" in imported.mapped
    assert imported.assumed == []


def test_what_nemo_leaves_out_is_lightning_s() -> None:
    text = NEMO.replace("  gradient_clip_val: 1.0\n", "").replace("bf16-mixed", "16-mixed")
    config = import_text(text, "yaml").config
    assert "clip_grad_norm" not in config["train"] and config["train"]["float16"] is True


def test_ranks_that_do_not_divide_are_named_by_their_own_keys() -> None:
    imported = import_text(NEMO.replace("devices: 8", "devices: 1"), "yaml")
    said = [item.key for item in imported.unmapped if item.kind == "contradictory"]
    assert said == ["trainer.devices", "trainer.num_nodes"]


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("tensor_model_parallel_size: [2]", r"model\.tensor_model_parallel_size = \[2\] is no num"),
        ("context_parallel_size: 0", r"model\.context_parallel_size = 0; an axis has one rank"),
        ("encoder_seq_length: 2.5", r"model\.encoder_seq_length = 2.5 is no whole number"),
    ],
)
def test_a_value_that_is_no_size_is_named_by_its_own_key(written: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"nemo: {said}"):
        import_text(f"trainer: {{max_steps: 2}}\nmodel: {{{written}, micro_batch_size: 1}}", "yaml")


def test_two_values_of_one_size_are_a_contradiction() -> None:
    text = BRIDGE.replace("scheduler:\n", "scheduler:\n  min_lr: 0.1\n")
    imported = import_text(text, "yaml", "megatron-bridge")
    (said,) = [item for item in imported.unmapped if item.kind == "contradictory"]
    assert said.key == "scheduler.min_lr" and "optimizer.min_lr = 3e-05" in said.reason
    assert imported.config["train"]["min_lr"] == 3e-5


def test_a_change_of_a_recipe_says_what_it_leaves_out() -> None:
    imported = import_text(BRIDGE, "yaml", world_size=64)
    assert Plan.parse(imported.plan).world_size == 64
    assert any("a recipe of Megatron-Bridge" in sentence for sentence in imported.assumed)


def test_the_strategy_of_nemo_2_holds_the_sizes() -> None:
    text = """
trainer:
  devices: 8
  num_nodes: 1
  strategy: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2}
data: {global_batch_size: 16, micro_batch_size: 2, seq_length: 128}
"""
    imported = import_text(text, "yaml")
    assert imported.plan == str(Plan.parse("pp2:1f1b tp2 dp2 mb4"))
    assert imported.config["data"]["seq_len"] == 128


@pytest.mark.parametrize(
    ("framework", "text"),
    [
        (
            "torchtune",
            "model: {_component_: torchtune.models.llama3_1.llama3_1_8b}\n"
            "optimizer: {_component_: torch.optim.AdamW, lr: 2e-5}\nbatch_size: 2\n",
        ),
        (
            "Lightning",
            "seed_everything: 1\ntrainer: {devices: 8, num_nodes: 2, strategy: fsdp}\n"
            "model: {class_path: x.Y}\n",
        ),
        ("MaxText", "base_emb_dim: 512\nper_device_batch_size: 4\nici_fsdp_parallelism: 8\n"),
    ],
)
@pytest.mark.parametrize("told", [None, "axolotl"])
def test_a_framework_that_is_not_read_is_named(framework: str, text: str, told: str | None) -> None:
    with pytest.raises(ConfigError, match=f"is a config of {framework} .*does not read"):
        import_text(text, "yaml", told)


def test_python_code_is_not_run(tmp_path: Path) -> None:
    file = tmp_path / "config.py"
    file.write_text("parallel = dict(pipeline=2, tensor=dict(size=4, mode='2d'))\n")
    with pytest.raises(ConfigError, match=r"config\.py is Python code"):
        import_file(file)

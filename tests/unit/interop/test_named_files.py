"""Files that name a DeepSpeed configuration: it is followed where it lies beside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.errors import ConfigError
from plait.interop import Imported, import_file, import_text

ACCELERATE = """
distributed_type: DEEPSPEED
num_processes: 8
deepspeed_config:
  deepspeed_config_file: {file}
"""
AXOLOTL = """
base_model: some/model
micro_batch_size: 2
gradient_accumulation_steps: 4
bf16: auto
deepspeed: {file}
"""
STAGE_3 = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True},
    "bf16": {"enabled": True},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 0.5,
    "mystery": 1,
}


def imported(folder: Path, text: str, table: object, file: str = "conf/ds.json") -> Imported:
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text(json.dumps(table))
    (folder / "mine.yaml").write_text(text.format(file=file))
    return import_file(folder / "mine.yaml", None, 8)


@pytest.mark.parametrize("text", [ACCELERATE, AXOLOTL])
def test_the_file_beside_says_the_plan(text: str, tmp_path: Path) -> None:
    found = imported(tmp_path, text, STAGE_3)
    assert found.plan.startswith("dp8:zero3,offload")
    assert found.plan.endswith("precision:bf16")
    assert found.config["train"]["clip_grad_norm"] == 0.5
    assert "conf/ds.json.zero_optimization.stage" in found.mapped
    kinds = {item.key: item.kind for item in found.unmapped}
    assert kinds["conf/ds.json.zero_optimization.overlap_comm"] == "ignored"
    assert kinds["conf/ds.json.mystery"] == "unknown"
    assert "unknown" not in {kind for key, kind in kinds.items() if "mystery" not in key}


@pytest.mark.parametrize("text", [ACCELERATE, AXOLOTL])
def test_a_file_without_a_stage_has_none(text: str, tmp_path: Path) -> None:
    plan = imported(tmp_path, text, {"bf16": {"enabled": True}}, "zero3.json").plan
    assert plan.split()[0] == "dp8"


@pytest.mark.parametrize("text", [ACCELERATE, AXOLOTL])
def test_a_file_that_is_not_there_leaves_the_stage_unknown(text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text.format(file="far/ds.json"))
    found = import_file(tmp_path / "mine.yaml", None, 8)
    words = [item for item in found.unmapped if "far/ds.json is not there" in item.reason]
    assert [item.kind for item in words] == ["different"]
    assert "its ZeRO stage is unknown" in words[0].reason


def test_a_number_that_both_files_say_is_named_where_they_differ(tmp_path: Path) -> None:
    found = imported(tmp_path, AXOLOTL, {"gradient_accumulation_steps": 2})
    assert "mb2" in found.plan.split()
    assert any(
        item.kind == "contradictory" and "says 4; 2 is taken" in item.reason
        for item in found.unmapped
    )


def test_keys_of_deepspeed_inside_axolotl_count() -> None:
    text = AXOLOTL.format(file="{zero_optimization: {stage: 1}}")
    assert import_text(text, "yaml", None, 8).plan == "dp8:zero1 mb4 precision:bf16"


def test_another_distributed_type_leaves_the_file_aside(tmp_path: Path) -> None:
    found = imported(tmp_path, ACCELERATE.replace("DEEPSPEED", "MULTI_GPU"), STAGE_3)
    assert found.plan == "dp8"
    assert all(item.kind == "ignored" for item in found.unmapped)


def test_a_damaged_file_beside_is_named(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text("{")
    (tmp_path / "mine.yaml").write_text(AXOLOTL.format(file="ds.json"))
    with pytest.raises(ConfigError, match=r"ds\.json: this is not valid JSON"):
        import_file(tmp_path / "mine.yaml")


def test_all_linear_layers_are_those_of_the_default() -> None:
    text = "{base_model: m, micro_batch_size: 1, adapter: lora, lora_r: 4, lora_target_linear: yes}"
    found = import_text(text, "yaml")
    word = next(item for item in found.unmapped if item.key == "lora_target_linear")
    assert word.kind == "ignored" and "every linear layer but the output" in word.reason
    assert "targets" not in found.config["adapter"]
    found = import_text(f"{text[:-1]}, lora_target_modules: [q_proj]}}", "yaml")
    assert "targets" not in found.config["adapter"]  # the union, as axolotl has it

"""Every known key of each framework is mapped or named, and a mapped one can change the result."""

from __future__ import annotations

import pytest
from benchmarks.imports.__main__ import ENDINGS, Row, import_values, known, own_rows

from plait.errors import ConfigError
from plait.interop import import_text
from plait.interop.effects import SILENT
from plait.plan import Plan
from plait.predict.planner.export import export_plan
from tests.architecture.source import ROOT


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return list(own_rows())


def test_no_known_key_is_lost_or_unknown(rows: list[Row]) -> None:
    assert {row.framework for row in rows} == set(ENDINGS)
    for row in rows:
        assert row.lost == 0, row
        assert row.unknown == 0, row
        assert row.mapped >= 8, row


def test_the_table_of_the_documents_has_these_rows(rows: list[Row]) -> None:
    text = (ROOT / "docs" / "coming_from.md").read_text()
    for row in rows:
        cells = [f"{row.framework}: {row.group}", row.files, row.refused, row.keys, row.mapped]
        cells += [row.named, row.unknown, row.lost]
        assert f"| {' | '.join(str(cell) for cell in cells)} |" in text


@pytest.mark.parametrize("framework", ENDINGS)
def test_a_key_that_nobody_knows_is_said(framework: str) -> None:
    keys, imported = import_values(framework, {**known(framework)[1], "made-up": 3})
    assert [item.key for item in imported.unmapped if item.kind == "unknown"] == ["made-up"]
    assert keys == {*imported.mapped, *(item.key for item in imported.unmapped)}


@pytest.mark.parametrize(
    ("text", "form", "framework", "key"),
    [
        ("--sequence-parallel", "shell", "megatron-lm", "sequence-parallel"),
        ("--bf16 --hidden-size 64", "shell", "megatron-lm", "hidden-size"),
        ("--bf16 --optimizer-cpu-offload", "shell", "megatron-lm", "optimizer-cpu-offload"),
        ("parallelism: {pp_engine: 1f1b}", "yaml", "nanotron", "parallelism.pp_engine"),
        (
            "[parallelism]\npipeline_parallel_schedule = '1F1B'",
            "toml",
            "torchtitan",
            "parallelism.pipeline_parallel_schedule",
        ),
        ("base_model: m\nbf16: true\nfp16: true", "yaml", "axolotl", "fp16"),
    ],
)
def test_a_key_that_changes_nothing_is_named(
    text: str, form: str, framework: str, key: str
) -> None:
    imported = import_text(text, form, framework)
    assert key not in imported.mapped
    assert {item.key: item.reason for item in imported.unmapped}[key] == SILENT


def test_offload_without_shards_is_contradictory_in_torchtitan() -> None:
    text = "[training]\nenable_cpu_offload = true\n[parallelism]\n"
    for degree, kind in ((1, "contradictory"), (4, "different")):
        imported = import_text(
            f"{text}data_parallel_shard_degree = {degree}\n", "toml", "torchtitan"
        )
        kinds = {item.key: item.kind for item in imported.unmapped}
        assert kinds["training.enable_cpu_offload"] == kind


@pytest.mark.parametrize("text", ["dp4:zero1", "dp4:zero2", "dp4:zero1,offload", "dp4:server"])
def test_an_export_that_loses_a_term_says_which(text: str) -> None:
    plan = Plan.parse(text)
    exported = export_plan(plan, "torchtitan")
    assert any(sentence.startswith(f"{plan.dp}: ") for sentence in exported.missing)
    assert import_text(exported.text, "toml", "torchtitan").plan != str(plan)


def test_numbers_that_contradict_each_other_are_still_one_sentence() -> None:
    with pytest.raises(ConfigError, match="does not divide"):
        import_text('{"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}', "json")


@pytest.mark.parametrize(
    ("parallelism", "ranks", "precision"),
    [
        ("", 8, "bf16"),
        ("", None, "bf16"),
        ("data_parallel_shard_degree = 1\ndata_parallel_replicate_degree = 8", None, "bf16"),
        ("context_parallel_degree = 8", 8, "bf16"),
        ("tensor_parallel_degree = 8", 8, "float32"),  # torchtitan casts with FSDP alone there
        ("data_parallel_shard_degree = 1\npipeline_parallel_degree = 4", None, "float32"),
    ],
)
def test_a_torchtitan_file_trains_in_the_precision_that_it_leaves_out(
    parallelism: str, ranks: int | None, precision: str
) -> None:
    text = f"[training]\nlocal_batch_size = 8\n[parallelism]\n{parallelism}\n"
    plan = Plan.parse(import_text(text, "toml", "torchtitan", ranks).plan)
    assert plan.precision == precision
    said = text.replace("[parallelism]", 'mixed_precision_param = "float32"\n[parallelism]')
    assert Plan.parse(import_text(said, "toml", "torchtitan", ranks).plan).precision == "float32"


def test_a_torchtitan_file_trains_with_the_values_that_it_leaves_out() -> None:
    text = "[training]\nlocal_batch_size = 1\nsteps = 1000\n[optimizer]\nlr = 3e-4\n"
    train = import_text(text, "toml", "torchtitan").config["train"]
    assert train["optimizer"] == "adamw"
    assert train["betas"] == [0.9, 0.95]
    assert (train["weight_decay"], train["clip_grad_norm"]) == (0.1, 1.0)
    assert (train["schedule"], train["warmup_steps"]) == ("linear", 200)
    short = text.replace("1000", "20") + "[lr_scheduler]\nmin_lr_factor = 0.1\n"
    train = import_text(short, "toml", "torchtitan").config["train"]
    assert train["warmup_steps"] == 20
    assert train["min_lr"] == pytest.approx(3e-5)


def test_an_axolotl_file_decays_and_clips_where_it_says_nothing() -> None:
    text = "base_model: x/y\nmicro_batch_size: 2\nlearning_rate: 2e-5\n"
    train = import_text(text, "yaml", "axolotl").config["train"]
    assert (train["schedule"], train["clip_grad_norm"]) == ("cosine", 1.0)
    train = import_text(f"{text}max_grad_norm: 0\n", "yaml", "axolotl").config["train"]
    assert "clip_grad_norm" not in train


def test_a_warm_up_of_megatron_is_a_part_of_the_decay() -> None:
    """`lr_warmup_fraction * lr_decay_steps` in its `training.py`."""
    line = "pretrain_gpt.py --train-iters 1000 --lr 1e-4 --lr-warmup-fraction 0.1 --fp16"
    train = import_text(line, "sh", "megatron-lm").config["train"]
    assert train["warmup_steps"] == 100
    train = import_text(f"{line} --lr-decay-iters 400", "sh", "megatron-lm").config["train"]
    assert train["warmup_steps"] == 40

"""`plait export`: plans for other frameworks, checkpoints for Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from plait.checkpoint import Shard, save
from plait.checkpoint.hugging_face import exported_names
from plait.cli import main

CONFIG = '[model]\nname = "mlp"\n[train]\nglobal_batch = 64\n[plan]\ntext = "dp4:zero3 mb2"\n'


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, object]]:
    code = main(["export", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("framework", "part"),
    [
        ("megatron", "--tensor-model-parallel-size 2 --sequence-parallel"),
        ("deepspeed", '"autotp_size": 2'),
        ("torchtitan", "tensor_parallel_degree = 2"),
    ],
)
def test_a_plan_for_each_framework(
    capsys: pytest.CaptureFixture[str], framework: str, part: str
) -> None:
    code, data = answer(capsys, "plan", "tp2:1d,sp dp2:zero1 mb4", "--to", framework)
    assert code == 0 and part in str(data["text"])
    assert data["complete"] is (not data["missing"])


def test_the_plan_and_the_batch_of_a_config(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "run.toml"
    out = tmp_path / "new" / "ds.json"
    config.write_text(CONFIG)
    code, data = answer(capsys, "plan", str(config), "--to", "deepspeed", "--out", str(out))
    table = json.loads(out.read_text())
    assert code == 0 and data["out"] == str(out) and data["plan"] == "dp4:zero3 mb2"
    assert table["train_batch_size"] == 64 and table["zero_optimization"]["stage"] == 3
    code, data = answer(
        capsys, "plan", str(config), "--to", "deepspeed", "--plan", "dp2", "--global-batch", "8"
    )
    assert code == 0 and json.loads(str(data["text"]))["train_micro_batch_size_per_gpu"] == 4


def test_a_config_without_a_model_has_a_plan_all_the_same(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "run.toml"
    config.write_text('[plan]\ntext = "dp2:zero3"\n')
    code, data = answer(capsys, "plan", str(config), "--to", "torchtitan")
    assert code == 0 and data["plan"] == "dp2:zero3"
    config.write_text('[plna]\ntext = "dp2:zero3"\n')
    assert main(["export", "plan", str(config), "--to", "torchtitan"]) == 2
    assert "did you mean 'plan'" in capsys.readouterr().err


def test_what_is_no_longer_the_plan_is_a_no(capsys: pytest.CaptureFixture[str]) -> None:
    code, data = answer(capsys, "plan", "tp4:2d dp2", "--to", "megatron-lm")
    assert code == 1 and "tp4:2d: Megatron-LM splits layers in one dimension only" in str(
        data["missing"]
    )
    assert (
        main(["export", "plan", "tp2:1d,sp dp8:zero1 mb4 precision:bf16", "--to", "megatron-lm"])
        == 0
    )
    assert (
        capsys.readouterr().out.rstrip("\n").endswith("--overlap-param-gather --bf16")
    )  # one line, whole
    assert main(["export", "plan", "dp2:zero3", "--to", "torchtitan"]) == 0
    assert "[parallelism]\n" in capsys.readouterr().out
    assert main(["export", "plan", "pp2:zb-h2 mb4", "--to", "megatron-lm"]) == 0
    assert "megatron-lm cannot express: pp2:zb-h2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "tp2"], "say for which framework"),
        (["plan", "--to", "deepspeed"], "say which plan"),
        (["plan", "tp2", "--to", "torchtitn"], "did you mean 'torchtitan'"),
        (["plan", "qq2", "--to", "deepspeed"], "qq2"),
        (["plan", "tp2", "--plan", "tp4", "--to", "deepspeed"], "two plans"),
        (["plan", "dp2", "--to", "deepspeed", "--global-batch", "0"], "one sample or more"),
        (["plan", "dp2", "--to", "deepspeed", "--dtype", "float32"], "belongs to a checkpoint"),
        (["plans", "dp2", "--to", "deepspeed"], "cannot be exported"),
        (["checkpoint", "here"], "say what and where"),
        (["checkpoint", "here", "--out", "there", "--to", "deepspeed"], "exported to huggingface"),
        (["checkpoint", "here", "--out", "there", "--plan", "dp2"], "belongs to a plan"),
        (["checkpoint", "/nowhere", "--out", "there"], "no folder"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    code, data = answer(capsys, *words)
    assert code == 2 and message in str(data["error"])


def test_a_checkpoint_without_its_optimizer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    weight = torch.arange(6.0).view(2, 3)
    names = ("blocks.0.attention.q.weight", "norm.weight", "optimizer/exp_avg/norm.weight")
    shards = [Shard.whole(name, weight) for name in names]
    save(
        tmp_path / "run" / "checkpoints" / "step-00000001",
        shards,
        {},
        rank=0,
        world_size=1,
        gather=lambda one: [one],
    )
    code, data = answer(
        capsys,
        "checkpoint",
        str(tmp_path / "run"),
        "--out",
        str(tmp_path / "hf"),
        "--dtype",
        "bfloat16",
    )
    assert code == 0 and data["num_tensors"] == 2
    loaded = load_file(tmp_path / "hf" / "model.safetensors")
    assert loaded.keys() == {"model.layers.0.self_attn.q_proj.weight", "model.norm.weight"}
    assert torch.equal(loaded["model.norm.weight"], weight.bfloat16())


def test_a_dense_llama_gets_every_name_of_the_library() -> None:
    transformers = pytest.importorskip("transformers")
    from plait import models

    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    sizes |= {"intermediate_size": 48, "vocab_size": 50, "max_position_embeddings": 16}
    with torch.device("meta"):
        theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    ours = {
        name: tuple(value.shape)
        for name, value in models.make("llama", **sizes).state_dict().items()
    }
    names = exported_names(list(ours))
    assert {names[name]: shape for name, shape in ours.items()} == {
        name: tuple(value.shape) for name, value in theirs.state_dict().items()
    }


def test_names_of_other_models_stay() -> None:
    assert exported_names(["model.model.norm.weight"]) == {
        "model.model.norm.weight": "model.norm.weight"
    }
    assert (
        exported_names(["norm.weight", "blocks.0.mlp.router.weight"])["norm.weight"]
        == "norm.weight"
    )


@pytest.mark.parametrize("tied", [False, True])
def test_a_gpt_is_a_gpt2_of_the_library(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tied: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    from plait import models

    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 24, "vocab_size": 30, "max_position_embeddings": 12}
    torch.manual_seed(1)
    with torch.device("cpu"):
        ours = models.make("gpt", **sizes, tie_word_embeddings=tied)
    for param in ours.parameters():
        torch.nn.init.normal_(param, std=0.3)
    run = tmp_path / "run"
    shards = [Shard.whole(name, param.detach()) for name, param in ours.named_parameters()]
    save(
        run / "checkpoints" / "step-00000001",
        shards,
        {},
        rank=0,
        world_size=1,
        gather=lambda one: [one],
    )
    keys = "\n".join(f"{key} = {value}" for key, value in sizes.items())
    text = f'[model]\nname = "gpt"\n{keys}\ntie_word_embeddings = {str(tied).lower()}\n'
    (run / "config.toml").write_text(text)
    code, data = answer(capsys, "checkpoint", str(run), "--out", str(tmp_path / "hf"))
    assert code == 0, data
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").double()
    ids = torch.randint(0, 30, (2, 12))
    with torch.no_grad():
        expected = ours.double()(ids)
        found = theirs(ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    names = {name for name, _ in theirs.named_parameters()}
    assert set(data["names"].values()) == names  # type: ignore[attr-defined]

"""A Hugging Face run that is exported loads in its library, and computes what it computed here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from plait import models
from plait.cli import main
from plait.comm import World
from plait.engine.build import Options, build
from plait.models import hf, losses
from tests.helpers.threaded import threaded
from tests.unit.checkpoint.edits import edit_index, strip_tokens
from tests.unit.models.test_hf import GPT2, LLAMA

transformers = pytest.importorskip("transformers")
TOKENS = torch.arange(12).view(2, 6)
GENERATION = {"bos_token_id": 0, "eos_token_id": 1, "max_new_tokens": 7}


def train(world: World, config: Any, run: Path) -> torch.Tensor:
    """Two steps, saved; the logits of the trained model."""
    engine = build(
        hf.make(config),
        "dp1",
        loss=losses.cross_entropy,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        options=Options(seed=1),
        world=world,
    )
    for _ in range(2):
        engine.step((TOKENS, TOKENS), trace=False)
    engine.save(run / "checkpoints" / "step-00000002")
    with torch.no_grad():
        logits: torch.Tensor = engine.model.eval()(TOKENS)
    return logits


@pytest.fixture(params=["gpt2", "llama"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, torch.Tensor]:
    """A run's folder, and the logits that it ended with."""
    source = tmp_path / "source"
    source.mkdir()
    table = {"gpt2": GPT2, "llama": LLAMA}[request.param]
    (source / "config.json").write_text(json.dumps(table))
    (source / "generation_config.json").write_text(json.dumps(GENERATION))
    folder = tmp_path / "run"
    logits = threaded(1, train, source, folder, plan="dp1")[0]
    shutil.rmtree(source)  # what is exported needs no other folder
    return folder, logits


def test_the_exported_folder_loads_and_computes_the_same_bits(
    run: tuple[Path, torch.Tensor], tmp_path: Path
) -> None:
    folder, expected = run
    out = tmp_path / "out"
    assert main(["export", "checkpoint", str(folder), "--out", str(out)]) == 0
    names = {path.name for path in out.iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors"}
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.float32
    assert model.generation_config.max_new_tokens == 7
    with torch.no_grad():
        logits = model.eval()(TOKENS).logits
    assert torch.equal(logits, expected)
    base, info = transformers.AutoModel.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    for name, value in base.state_dict().items():
        assert torch.equal(value, model.base_model.state_dict()[name]), name


def test_a_converted_export_says_its_type(
    run: tuple[Path, torch.Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["export", "checkpoint", str(run[0]), "--out", str(tmp_path / "out")]
    assert main([*words, "--dtype", "bfloat16", "--json"]) == 0
    assert str(tmp_path / "out" / "config.json") in json.loads(capsys.readouterr().out)["files"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_run_from_before_takes_the_config_of_its_folder(
    run: tuple[Path, torch.Tensor], tmp_path: Path
) -> None:
    folder, expected = run
    checkpoint = folder / "checkpoints" / "step-00000002"
    table: dict[str, Any] = {}
    strip_tokens(checkpoint)
    edit_index(checkpoint, lambda index: table.update(index["meta"].pop("huggingface")))
    inner = ", ".join(
        f"{key} = {json.dumps(value)}"
        for key, value in table["config.json"].items()
        if isinstance(value, (str, int, float)) and not key.startswith("_")
    )
    (folder / "config.toml").write_text(f'[model]\nname = "hf"\nconfig = {{{inner}}}\n')
    out = tmp_path / "out"
    assert main(["export", "checkpoint", str(folder), "--out", str(out)]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        assert torch.equal(model.eval()(TOKENS).logits, expected)


@pytest.mark.parametrize("tied", [False, True])
def test_a_llama_of_this_project_is_one_of_the_library(tied: bool, tmp_path: Path) -> None:
    """Grouped heads of a size of their own; the folder needs no config from anywhere else.

    The library's norms and rotations are float32 in any model, and it adds in orders of its own:
    a few last places of float32 may differ, which depend on the processor.
    """
    run = tmp_path / "run"
    keys = {**OWN, "tie_word_embeddings": tied}
    expected = threaded(1, train_own, keys, run, plan="dp1")[0]
    lines = [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    (run / "config.toml").write_text("\n".join(["[model]", 'name = "llama"', *lines, ""]))
    out = tmp_path / "out"
    assert main(["export", "checkpoint", str(run), "--out", str(out)]) == 0
    model, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        logits = model.eval()(TOKENS).logits
    last_place = torch.finfo(torch.float32).eps * float(expected.abs().max())
    torch.testing.assert_close(logits, expected, rtol=0.0, atol=8 * last_place)


OWN = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 24,
    "vocab_size": 32,
    "rope_theta": 500.0,
    "rms_norm_eps": 1e-4,
    "max_position_embeddings": 64,
}


def train_own(world: World, keys: dict[str, Any], run: Path) -> torch.Tensor:
    """One step of plait's Llama, saved; the logits of the trained model."""
    with torch.device("meta"):
        model = models.make("llama", **keys)
    engine = build(
        model,
        "dp1",
        loss=losses.cross_entropy,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        options=Options(seed=1),
        world=world,
    )
    engine.step((TOKENS, TOKENS), trace=False)
    engine.save(run / "checkpoints" / "step-00000001")
    with torch.no_grad():
        logits: torch.Tensor = engine.model.eval()(TOKENS)
    return logits


def library_model(out: Path) -> Any:
    """The library's own model, with its first values."""
    config = transformers.AutoConfig.from_pretrained(out)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_weights_go_out_in_torchs_forms_and_come_back_bit_for_bit(
    form: str, run: tuple[Path, torch.Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file

    folder, expected = run
    words = ["export", "checkpoint", str(folder), "--out"]
    assert main([*words, str(tmp_path / "hf")]) == 0
    out = tmp_path / ("model.pt" if form == "torch" else "dcp")
    assert main([*words, str(out), "--to", form]) == 0
    model = library_model(tmp_path / "hf")
    state = model.state_dict()
    if form == "torch":
        found = torch.load(out, weights_only=True)
    else:
        from torch.distributed.checkpoint.state_dict_loader import load

        wanted = load_file(tmp_path / "hf" / "model.safetensors")
        found = {name: torch.empty_like(value) for name, value in wanted.items()}
        load(found, checkpoint_id=out, no_dist=True)
    missing, unexpected = model.load_state_dict(found, strict=False)
    assert not unexpected
    assert all(name == "lm_head.weight" for name in missing)  # tied to the embedding
    model.tie_weights()
    assert state.keys() >= found.keys()
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, expected)
    assert main(["import", str(out), "--out", str(tmp_path / "back")]) == 0
    back = load_file(tmp_path / "back" / "model.safetensors")
    first = load_file(tmp_path / "hf" / "model.safetensors")
    assert back.keys() == first.keys()
    for name, value in first.items():
        assert back[name].dtype == value.dtype
        assert torch.equal(back[name], value), name
    capsys.readouterr()


def test_a_place_that_is_taken_is_not_written(
    run: tuple[Path, torch.Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["export", "checkpoint", str(run[0]), "--out", str(tmp_path), "--to"]
    for form in ("torch", "dcp"):
        assert main([*words, form]) == 2
        assert "is there already" in capsys.readouterr().err
    assert main([*words, "dcp", "--shard-gb", "1"]) == 2
    assert "belongs to safetensors" in capsys.readouterr().err

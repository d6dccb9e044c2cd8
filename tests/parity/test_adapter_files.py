"""Adapters alone are saved, as PEFT's files; any plan goes on from them, and they are merged."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from plait import models
from plait.checkpoint import Checkpoint, resolve
from plait.cli import main
from plait.comm import World
from plait.config import Config
from plait.engine.build import build, join_world
from plait.engine.engine import Engine
from plait.errors import CheckpointError
from plait.models import adapter_files, losses
from plait.models.adapter_parts import AdapterSettings
from plait.plan import Plan
from plait.run.assemble import assemble
from plait.run.job import TrainingRun, run
from plait.run.rundir import RunFolder
from tests.helpers.threaded import threaded
from tests.parity.families import HUGGING_FACE
from tests.parity.harness import optimizer

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

CONFIG = {**HUGGING_FACE["hf-llama"], "tie_word_embeddings": False}
TOKENS = torch.randint(0, 28, (8, 9), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of transformers in float64, with the file of a tokenizer beside it."""
    folder = tmp_path_factory.mktemp("weights")
    torch.manual_seed(1)
    settings = transformers.AutoConfig.for_model(**CONFIG)
    transformers.AutoModelForCausalLM.from_config(settings).double().save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def make(weights: Path, kind: str, start: Path) -> nn.Module:
    """On the meta device, its values in files: threads share their random numbers."""
    base = transformers.AutoModelForCausalLM.from_pretrained(weights)
    targets = ("q_proj", "up_proj")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, at what PEFT asks it
        config = peft.LoraConfig(
            r=4, lora_alpha=8, target_modules=[*targets], use_dora=kind == "dora"
        )
        peft.get_peft_model(base, config).save_pretrained(start)
    model = models.make("hf", config=weights, weights=weights)
    settings = AdapterSettings(kind, 4, 8.0, targets, weights=start)
    return adapter_files.with_adapters(model, settings)


def started(world: World, plan: str, model: nn.Module) -> Engine:
    return build(
        copy.deepcopy(model),
        f"{plan} precision:float64",
        loss=losses.cross_entropy,
        optimizer=optimizer,
        world=world,
    )


def stepped(engine: Engine) -> float:
    axis = engine.world.axis("dp")
    inputs = TOKENS[:, :-1].tensor_split(axis.size)[axis.rank]
    targets = TOKENS[:, 1:].tensor_split(axis.size)[axis.rank]
    return engine.step((inputs, targets), trace=False).loss


def from_peft(weights: Path, adapter: Path) -> Any:
    base = transformers.AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, at what PEFT asks it
        return peft.PeftModel.from_pretrained(base, adapter)


def loss_of(model: Any) -> float:
    with torch.no_grad():
        total, count = losses.cross_entropy(model(TOKENS[:, :-1]).logits, TOKENS[:, 1:])
    return float(total / count)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_run_is_saved_as_adapters_alone_and_goes_on_under_another_plan(
    weights: Path, tmp_path: Path, kind: str
) -> None:
    model = make(weights, kind, tmp_path / "start")

    def first(world: World, plan: str) -> list[float]:
        engine = started(world, plan, model)
        found = [stepped(engine), stepped(engine)]
        engine.save(tmp_path / "checkpoint")
        found.append(stepped(engine))
        engine.save_pretrained(tmp_path / "adapter")
        engine.save_pretrained(tmp_path / "merged", merge=True)
        return found

    def second(world: World, plan: str) -> float:
        engine = started(world, plan, model)
        engine.load(tmp_path / "checkpoint")
        return stepped(engine)

    *_, expected = threaded(4, first, "tp2 dp2:zero3", plan="tp2 dp2:zero3")[0]
    saved = Checkpoint.open(tmp_path / "checkpoint").names()
    assert {name.rpartition("/")[2] for name in saved} == set(adapter_files.peft_names(model))
    again = threaded(2, second, "dp2:zero1", plan="dp2:zero1")[0]
    assert again == pytest.approx(expected, rel=1e-12)
    theirs = loss_of(from_peft(weights, tmp_path / "adapter"))
    merged = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", dtype=torch.float64
    )
    assert loss_of(merged) == pytest.approx(theirs, rel=1e-12)
    assert theirs < expected


def test_a_run_of_adapters_is_exported_from_the_command_line(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """PEFT's two files, or the model whole; the tokenizer comes along."""
    config = Config.load(
        {
            "model": {"name": "hf", "config": CONFIG, "weights": str(weights)},
            "data": {"name": "random", "seq_len": 8, "num_samples": 8},
            "train": {"steps": 2, "global_batch": 4, "lr": 1e-2},
            "adapter": {"kind": "lora", "rank": 4, "targets": ["q_proj", "o_proj"]},
        }
    )
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    run(TrainingRun(config, "dp1", folder.path, shows_progress=False))
    found: dict[str, Tensor] = {}
    for merge in ([], ["--merge"]):
        out = tmp_path / ("merged" if merge else "adapter")
        export = ["export", "checkpoint", str(folder.path), "--out", str(out), *merge, "--json"]
        assert main(export) == 0
        names = {Path(file).name for file in json.loads(capsys.readouterr().out)["files"]}
        assert ("adapter_model.safetensors" in names) is not bool(merge)
        assert (out / "tokenizer_config.json").exists()
        theirs = from_peft(weights, out) if not merge else None
        theirs = theirs or transformers.AutoModelForCausalLM.from_pretrained(out)
        with torch.no_grad():
            found[out.name] = theirs.double()(TOKENS).logits
    torch.testing.assert_close(found["merged"], found["adapter"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("plan", ["dp1", "dp2:zero3", "pp2:1f1b mb2"])
def test_an_adapter_on_a_tied_output_is_not_lost_in_a_merge(tmp_path: Path, plan: str) -> None:
    """One weight cannot be the embedding's and the output's with its adapter; PEFT's files can."""
    torch.manual_seed(1)
    settings = transformers.AutoConfig.for_model(**{**CONFIG, "tie_word_embeddings": True})
    folder = tmp_path / "tied"
    transformers.AutoModelForCausalLM.from_config(settings).save_pretrained(folder)
    made = models.make("hf", config=folder, weights=folder)
    model = adapter_files.with_adapters(made, AdapterSettings("lora", 4, targets=("lm_head",)))

    def save(world: World, text: str) -> None:
        engine = started(world, text, model)
        with pytest.raises(CheckpointError, match="lm_head' is tied to another"):
            engine.save_pretrained(tmp_path / "merged", merge=True)
        engine.save_pretrained(tmp_path / "adapter")

    threaded(1 if plan == "dp1" else 2, save, plan, plan=plan)
    assert not list((tmp_path / "merged").iterdir())
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_merged_model_of_plait_is_opened_by_the_library(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its config and its names are written, as for a model without adapters."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 24, "vocab_size": 28}
    config = Config.load(
        {
            "model": {"name": family, **sizes},
            "data": {"name": "random", "seq_len": 8, "num_samples": 8},
            "train": {"steps": 3, "global_batch": 4, "lr": 0.1},
            "adapter": {"kind": "dora", "rank": 2, "targets": ["q", "v", "o", "up"]},
        }
    )
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    plan = Plan.parse("dp1")
    run(TrainingRun(config, str(plan), folder.path, shows_progress=False))
    out = tmp_path / "merged"
    words = ["export", "checkpoint", str(folder.path), "--merge", "--out", str(out), "--json"]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert {*told["names"].values()} == {*load_file(out / "model.safetensors")}
    engine = assemble(config, plan, join_world(plan)).engine
    before = engine.evaluate((TOKENS[:, :-1], TOKENS[:, 1:]))
    engine.load(resolve(folder.path))
    expected = engine.evaluate((TOKENS[:, :-1], TOKENS[:, 1:]))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    assert loss_of(theirs) == pytest.approx(expected, rel=1e-5)
    assert expected != pytest.approx(before, rel=1e-4)

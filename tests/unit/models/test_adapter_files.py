"""Files of adapters: the names that PEFT gives them for each task, and settings without words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.errors import ModelError
from plait.models import hf
from plait.models.adapter_files import form_of, with_adapters
from plait.models.adapter_parts import AdapterSettings
from plait.models.weights import weights_of
from tests.unit.models.test_hf_tasks import BERT, T5, VIT

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 29,
}


def saved(folder: Path, task: str, config: dict[str, Any], **settings: Any) -> Any:
    """A model of the library with PEFT's adapters, both in `folder`; its adapter as PEFT has it."""
    made = transformers.AutoConfig.for_model(**config)
    base = getattr(transformers, hf.TASKS[task]).from_config(made)
    base.save_pretrained(folder)
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, lora_alpha=2, **settings))
    model.save_pretrained(folder / "adapter")
    return model


@pytest.mark.parametrize(
    ("task", "config", "target", "words"),
    [
        ("causal", LLAMA, "q_proj", "CAUSAL_LM"),
        ("masked", BERT, "query", None),
        ("seq2seq", T5, "q", "SEQ_2_SEQ_LM"),
        ("image", VIT, "q_proj", None),
    ],
)
def test_adapters_of_every_task_have_the_names_of_peft(
    task: str, config: dict[str, Any], target: str, words: str | None, tmp_path: Path
) -> None:
    theirs = peft.get_peft_model_state_dict(saved(tmp_path, task, config, target_modules=[target]))
    start = AdapterSettings("lora", 2, targets=(target,), weights=tmp_path / "adapter")
    model = with_adapters(hf.make(tmp_path, weights=tmp_path, task=task), start)
    form = form_of(model)
    assert form.config["task_type"] == words
    assert set(form.names.values()) == theirs.keys()
    weights = weights_of(model)
    assert weights is not None
    with weights.reading() as reader:
        for ours, name in form.names.items():
            assert torch.equal(reader.read(ours), theirs[name])


@pytest.mark.parametrize(
    "setting",
    [
        {"alpha_pattern": {"q_proj": 64}},
        {"rank_pattern": {"q_proj": 4}},
        {"modules_to_save": ["lm_head"]},
        {"init_lora_weights": "pissa"},
        {"bias": "all"},
    ],
)
def test_settings_of_peft_that_have_no_words_are_refused(
    setting: dict[str, Any], tmp_path: Path
) -> None:
    """An alpha for some layers, or another start, would give other numbers without a sign."""
    saved(tmp_path, "causal", LLAMA, target_modules=["q_proj"], **setting)
    model = hf.make(tmp_path, weights=tmp_path)
    start = AdapterSettings("lora", 2, targets=("q_proj",), weights=tmp_path / "adapter")
    with pytest.raises(ModelError, match="has no words for") as refused:
        with_adapters(model, start)
    [(key, value)] = setting.items()
    assert f"{key} = {json.dumps(value)}" in str(refused.value)

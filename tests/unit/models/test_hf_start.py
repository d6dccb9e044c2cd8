"""Nothing that a Hugging Face model starts from is memory that nobody wrote."""

from __future__ import annotations

import pytest
import torch

from plait.errors import ModelError
from tests.unit.models import hf_families

pytest.importorskip("transformers")


@pytest.mark.parametrize("family", hf_families.SAMPLE)
@pytest.mark.filterwarnings("ignore")
def test_every_parameter_and_buffer_is_written(family: str) -> None:
    assert hf_families.unwritten(family) == []


@pytest.mark.parametrize(
    ("task", "family"),
    [
        ("causal", "dbrx"),  # numbers that only files have
        ("causal", "gpt_neo"),  # a list of kinds and how often
        ("causal", "zamba"),  # layers of two kinds
        ("seq2seq", "t5gemma"),  # two configs inside one
        ("image", "deit"),  # a family of two classes
        ("image", "siglip2"),  # made, though its inputs are others
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_configs_with_unusual_keys_are_looked_at_too(task: str, family: str) -> None:
    assert hf_families.unwritten(family, task) == []


@pytest.mark.filterwarnings("ignore")
def test_unwritten_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    bert = transformers.models.bert.modeling_bert.BertPreTrainedModel
    monkeypatch.setattr(bert, "_init_weights", lambda self, module: None)
    monkeypatch.setattr(torch.nn.Linear, "reset_parameters", lambda self: None)
    with pytest.raises(ModelError, match="without values"):
        hf_families.unwritten("bert", "masked")

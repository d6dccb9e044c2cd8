"""Packing: every token that can be guessed is guessed once, in samples that are well filled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait import config, datasets
from plait.datasets import Loader
from plait.datasets.files import load_documents
from plait.datasets.packing import Packing, lengths_of, plan_of
from plait.errors import ConfigError, DataError

LLAMA = {"name": "llama", "vocab_size": 256}


def documents_of(lengths: list[int]) -> list[dict[str, Any]]:
    """Documents whose tokens are all different."""
    tokens = torch.arange(1, sum(lengths) + 1)
    return [{"input_ids": part} for part in tokens.split(lengths)]


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=30).filter(lambda sizes: max(sizes) > 1),
    st.integers(1, 12),
    st.integers(1, 9),
)
def test_every_token_is_guessed_once_from_the_tokens_before_it(
    lengths: list[int], seq_len: int, window: int
) -> None:
    documents = documents_of(lengths)
    samples = Packing(documents, seq_len, window=window)
    (tokens, numbers, positions), labels = samples.batch(torch.arange(len(samples)))
    assert tokens.shape == numbers.shape == positions.shape == labels.shape
    counted = labels != -100
    expected = torch.cat([document["input_ids"][1:] for document in documents])
    assert labels[counted].sort().values.tolist() == expected.tolist()
    assert torch.equal(tokens[counted] + 1, labels[counted])  # tokens are numbered
    starts = torch.ones_like(numbers, dtype=torch.bool)
    starts[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    assert torch.equal(starts, positions == 0)
    assert torch.equal((positions[:, 1:] == positions[:, :-1] + 1), ~starts[:, 1:])


@given(st.lists(st.integers(2, 40), min_size=1, max_size=60), st.integers(2, 16))
def test_no_two_samples_of_a_window_fit_into_one(lengths: list[int], seq_len: int) -> None:
    """Best fit opens a sample only for what no open one takes."""
    plan = plan_of(torch.tensor(lengths), seq_len)
    filled = [sum(piece.length for piece in plan.of(s)) for s in range(plan.num_samples)]
    assert max(filled) <= seq_len
    assert sum(sorted(filled)[:2]) > seq_len or len(filled) == 1


def test_samples_are_those_of_the_documents_whenever_they_are_asked_for() -> None:
    documents = documents_of([5, 9, 3, 2, 8, 4])
    samples = Packing(documents, 8)
    again = Packing(documents, 8)
    (tokens, *_), labels = again.batch(torch.arange(len(again)).flip(0))
    for row, index in enumerate(reversed(range(len(samples)))):
        (one, _, _), label = samples[index]
        assert torch.equal(one, tokens[row]) and torch.equal(label, labels[row])
    with pytest.raises(IndexError):
        samples[len(samples)]
    assert samples.batch(torch.arange(0))[0][0].shape == (0, 8)
    assert samples.plan.fill == 25 / 32


def test_labels_that_do_not_count_stay_so_and_lengths_are_taken_as_given() -> None:
    ids = torch.arange(10, 16)
    labels = torch.tensor([10, 11, -100, -100, 14, 15])
    samples = Packing([{"input_ids": ids, "labels": labels}], 8)
    (tokens, numbers, positions), found = samples[0]
    assert tokens.tolist() == [10, 11, 12, 13, 14, 0, 0, 0]
    assert found.tolist() == [11, -100, -100, 14, 15, -100, -100, -100]
    assert numbers.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    assert positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]

    class Known(list[Any]):
        lengths = torch.tensor([7, 3])

    assert lengths_of(Known()).tolist() == [7, 3]
    with pytest.raises(DataError, match="no document of two tokens or more among 3"):
        Packing(documents_of([1, 1, 1]), 4)


def test_lines_of_a_text_are_documents(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc\n\nde\nf")
    (tmp_path / "b").write_bytes(b"ghij\n")
    files = [str(tmp_path / "a"), str(tmp_path / "b")]
    data = {"name": "text", "files": files, "seq_len": 8, "packing": True}
    samples = datasets.make(data, LLAMA)
    assert [bytes(samples[i][0][0].tolist()) for i in range(len(samples))] == [
        b"ghijabcf",
        b"de\0\0\0\0\0\0",
    ]
    loader = Loader(samples, 3)
    (tokens, numbers, _), labels = next(loader)
    assert tokens.shape == numbers.shape == labels.shape == (2, 8)
    stdlib = datasets.make({"name": "stdlib", "seq_len": 64, "packing": True}, LLAMA)
    assert stdlib.plan.fill > 0.98


def test_documents_of_files_are_packed_too(tmp_path: Path) -> None:
    rows = [json.dumps({"text": text}) for text in ("abc", "defghi")]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    source = {"name": "files", "files": [str(tmp_path / "a.jsonl")], "cache": str(tmp_path / "c")}
    documents, _ = load_documents(source, LLAMA)
    samples = datasets.make({**source, "seq_len": 256, "packing": True}, LLAMA)
    (tokens, numbers, _), labels = samples[0]
    assert len(samples) == 1
    by_length = sorted(documents, key=lambda document: -len(document["input_ids"]))
    assert [int((numbers == number).sum()) for number in (0, 1)] == [
        len(document["input_ids"]) - 1 for document in by_length
    ]
    for number, document in enumerate(by_length):
        assert torch.equal(tokens[numbers == number], document["input_ids"][:-1])
        assert torch.equal(labels[numbers == number], document["labels"][1:])
    assert samples.content == documents.facts.digest
    assert Loader(samples, 1).state_dict()["content"] == samples.content


def test_a_config_says_what_cannot_be_packed() -> None:
    model = {"name": "llama", "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    model |= {"intermediate_size": 8, "vocab_size": 256}
    data = {"name": "stdlib", "seq_len": 16, "packing": True}
    assert config.load({"model": model, "data": data}).data.packing
    model |= {"num_local_experts": 2, "capacity_factor": 1.0}
    with pytest.raises(ConfigError, match="the tokens of a sequence compete for experts"):
        config.load({"model": model, "data": data})
    with pytest.raises(ConfigError, match="data 'random' has none"):
        config.load({"model": model, "data": {**data, "name": "random"}})


@pytest.mark.parametrize(
    ("data", "model", "message"),
    [
        ({"name": "random"}, {}, "packing needs documents, and data 'random' has none"),
        ({"packed": True}, {}, "leave packed = True out"),
        ({"samples": "stream"}, {}, "leave samples = 'stream' out"),
        ({}, {"name": "mlp"}, "not for model 'mlp'"),
        ({}, {"name": "hf", "task": "masked"}, "not for task 'masked'"),
        (
            {},
            {"capacity_factor": 1.5},
            "capacity_factor = 1.5 lets the tokens of a sequence compete",
        ),
        ({}, {"topk_method": "expert_choice"}, "topk_method = 'expert_choice' lets the tokens"),
        ({}, {"vocab_size": 100}, "made of bytes and needs vocab_size = 256"),
    ],
)
def test_what_cannot_be_packed_is_said(
    data: dict[str, Any], model: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        datasets.make({"name": "stdlib", "packing": True, **data}, {**LLAMA, **model})

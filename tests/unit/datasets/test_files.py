"""Data `files` and `hf`: strangers' files become samples, tokens are made once, and faults are said
with file and row.
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plait import datasets
from plait.datasets import token_store
from plait.datasets.files import load_documents, load_sequences
from plait.errors import DataError, RunError

LLAMA = {"name": "llama", "vocab_size": 300}
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Any]:
    """A section whose tokens are kept in the test's own folder."""
    return {"name": "files", "cache": str(tmp_path / "kept"), "seq_len": 8}


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    """A tokenizer.json of bytes, with an end token."""
    return make_tokenizer(tmp_path / "tokenizer.json")


def make_tokenizer(path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    numbers = {letter: number for number, letter in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(numbers, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.enable_truncation(3)  # which plait switches off
    tokenizer.enable_padding(length=5)
    tokenizer.save(str(path))
    return path


def write_lines(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def texts_of(data: dict[str, Any]) -> list[str]:
    documents, _ = load_documents(data, LLAMA)
    return [bytes(one["input_ids"].tolist()).decode() for one in documents]


def test_globs_lines_and_whole_files(tmp_path: Path, data: dict[str, Any]) -> None:
    (tmp_path / "b.txt").write_text("three\n")
    (tmp_path / "a.txt").write_text("\ufeffone\n\ntwé", encoding="utf-8")
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write('{"text": "four"}\n\n{"text": "five", "more": 1}\n')
    data["files"] = [str(tmp_path / "*.txt"), str(tmp_path / "c*")]
    assert texts_of(data) == ["one\n", "twé\n", "three\n", "four\n", "five\n"]
    data |= {"files": [str(tmp_path / "a.txt")], "document": "file"}
    assert texts_of(data) == ["\ufeffone\n\ntwé\n"]


def test_windows_of_the_stream_and_one_document_each(tmp_path: Path, data: dict[str, Any]) -> None:
    (tmp_path / "a.txt").write_text("abcd\nefghijklmno\npq\n")
    data["files"] = [str(tmp_path / "a.txt")]
    stream: Any = datasets.make(data, LLAMA)
    assert len(stream) == 2
    inputs, labels = stream.batch(torch.tensor([1, 0]))
    assert bytes(inputs[1].tolist()) == b"abcd\nefg"
    assert bytes(labels[0].tolist()) == b"ijklmno\n"
    assert torch.equal(stream[1][0], inputs[0])
    padded: Any = datasets.make({**data, "samples": "documents"}, LLAMA)
    assert (len(padded), padded.num_truncated) == (3, 1)
    inputs, labels = padded.batch(torch.arange(3))
    assert bytes(inputs[1].tolist()) == b"efghijkl"
    assert bytes(labels[1].tolist()) == b"fghijklm"
    assert inputs[2].tolist() == [*b"pq\n", 0, 0, 0, 0, 0]
    assert labels[2].tolist() == [*b"q\n", *[-100] * 6]


def test_a_tokenizer_file_ends_documents_and_cuts_none(
    tmp_path: Path, data: dict[str, Any], vocabulary: Path
) -> None:
    write_lines(tmp_path / "a.jsonl", [{"body": "abcdefgh"}, {"body": "x"}])
    data |= {"files": [str(tmp_path / "a.jsonl")], "column": "body"}
    data |= {"tokenizer": str(vocabulary), "end_token": "</s>"}
    documents, tokenizer = load_documents(data, LLAMA)
    assert documents.lengths.tolist() == [9, 2]
    assert documents[1]["input_ids"][-1] == 256
    assert tokenizer.vocab_size == 257
    with pytest.raises(DataError, match=r"257 tokens, and the model's vocabulary 256; set vocab"):
        load_documents(data, {"name": "llama", "vocab_size": 256})
    with pytest.raises(DataError, match=r"end_token = '</t>': tokenizer .* has no such token"):
        load_documents({**data, "end_token": "</t>"}, LLAMA)
    with pytest.raises(DataError, match=r"neither a tokenizer.json nor a folder"):
        load_documents({**data, "tokenizer": "nowhere"}, LLAMA)


def test_a_column_of_tokens_is_taken_as_it_is(tmp_path: Path, data: dict[str, Any]) -> None:
    data["files"] = [
        write_lines(tmp_path / "a.jsonl", [{"input_ids": [7, 299]}, {"input_ids": []}])
    ]
    documents, _ = load_documents(data, LLAMA)
    assert [one["input_ids"].tolist() for one in documents] == [[7, 299]]
    with pytest.raises(DataError, match="has the token 299, and the model's vocabulary 299; set"):
        load_documents(data, {"name": "gpt", "vocab_size": 299})


@pytest.mark.parametrize("marked", [False, True])
def test_only_answers_are_learnt(tmp_path: Path, data: dict[str, Any], marked: bool) -> None:
    folder = saved_tokenizer(tmp_path, marked)
    chat = [("user", "hi"), ("assistant", "yes"), ("user", "ok"), ("assistant", "no")]
    messages = [{"role": role, "content": content} for role, content in chat]
    data["files"] = [write_lines(tmp_path / "a.jsonl", [{"messages": messages}])]
    data |= {"tokenizer": str(folder), "seq_len": 64}
    documents, tokenizer = load_documents(data, LLAMA)
    labels = documents[0]["labels"]
    learnt = labels[labels != -100].tolist()
    inner: Any = tokenizer
    assert inner._inner.decode(learnt) == "yes</s>no</s>"
    samples = load_sequences(data, LLAMA, 64)
    assert type(samples).__name__ == "PaddedDocuments"
    inputs, targets = samples[0]
    assert inner._inner.decode(targets[targets != -100].tolist()) == "yes</s>no</s>"
    first = int((targets != -100).nonzero()[0])
    assert inner._inner.decode(inputs[: first + 1].tolist()).endswith("[assistant]")


def saved_tokenizer(tmp_path: Path, marked: bool) -> Path:
    transformers = pytest.importorskip("transformers")
    file = make_tokenizer(tmp_path / "tokenizer.json")
    made = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token="</s>")
    made.chat_template = TEMPLATE
    if marked:
        made.chat_template = (
            "{% for m in messages %}[{{ m['role'] }}]{% if m['role'] == 'assistant' %}"
            "{% generation %}{{ m['content'] }}</s>{% endgeneration %}"
            "{% else %}{{ m['content'] }}</s>{% endif %}{% endfor %}"
        )
    made.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def test_a_conversation_needs_a_template(
    tmp_path: Path, data: dict[str, Any], vocabulary: Path
) -> None:
    rows = [{"messages": [{"role": "user", "content": "hi"}]}]
    data["files"] = [write_lines(tmp_path / "a.jsonl", rows)]
    for tokenizer in (None, str(vocabulary)):
        with pytest.raises(DataError, match="conversations need a tokenizer with a chat template"):
            load_documents({**data, "tokenizer": tokenizer}, LLAMA)


def test_tokens_are_made_once_and_again_when_a_file_changes(
    tmp_path: Path, data: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one\ntwo\n")
    data["files"] = [str(file)]
    assert texts_of(data) == ["one\n", "two\n"]
    with monkeypatch.context() as patch:
        patch.setattr(token_store, "_keep", None)  # whatever makes tokens fails
        assert texts_of(data) == ["one\n", "two\n"]
    file.write_text("one\nsix\n")
    os.utime(file, ns=(1, 1))
    assert texts_of(data) == ["one\n", "six\n"]
    assert len(list((tmp_path / "kept").iterdir())) == 2


def test_tokenizing_tells_how_far_it_is(
    tmp_path: Path,
    data: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(token_store, "QUIET_SECONDS", 0.0)
    (tmp_path / "a.txt").write_text("line\n" * (token_store.BATCH + 1))
    data["files"] = [str(tmp_path / "a.txt")]
    texts_of(data)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[2] for line in lines] == [
        "512 documents, 2,560 tokens",
        "513 documents, 2,565 tokens",
        "513 documents, 2,565 tokens",
    ]
    assert "a.txt" in lines[0]
    texts_of(data)  # from what was kept
    assert capsys.readouterr().err == ""


def test_a_full_disk_ends_the_run(
    tmp_path: Path, data: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "a.txt").write_text("one\ntwo\n")
    data["files"] = [str(tmp_path / "a.txt")]
    monkeypatch.setattr(np, "save", full)
    with pytest.raises(RunError, match=r"tokens cannot be kept in .*No space left on device; free"):
        texts_of(data)
    assert list((tmp_path / "kept").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_said(
    tmp_path: Path, data: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("one\n")
    data |= {"files": [str(tmp_path / "a.txt")], "cache": str(tmp_path / "a.txt" / "kept")}
    assert texts_of(data) == ["one\n"]
    assert "Not a directory" in capsys.readouterr().err


def test_a_damaged_cache_is_said(tmp_path: Path, data: dict[str, Any]) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    data["files"] = [str(tmp_path / "a.txt")]
    texts_of(data)
    (tokens,) = (tmp_path / "kept").glob("*/tokens.bin")
    tokens.write_bytes(b"one")
    with pytest.raises(DataError, match=r"cannot be read \(tokens.bin is not whole\); remove that"):
        texts_of(data)


BAD = [
    ('{"text": "a"}\n{"text": \n', "row 2: this is no JSON"),
    ('{"text": "a"}\n[1]\n', "row 2: a list instead of a JSON object"),
    ('{"text": "a"}\n{"txt": "b"}\n', "row 2: there is no column 'text'; did you mean 'txt'?"),
    ('{"text": "a"}\n{"text": null}\n', "row 2: nothing is neither a text nor"),
    ('{"text": "a"}\n{"text": [1, 2]}\n', "row 2: this is tokens, and the first row is text"),
    ('{"input_ids": [1]}\n{"input_ids": [-2]}\n', "row 2: the token -2 is not in 0"),
    ('{"text": "a"}\n{"text": "\udcff"}\n', "row 2: byte 0xff at 10 is not UTF-8"),
]


@pytest.mark.parametrize(("content", "sentence"), BAD)
def test_a_bad_row_is_named_or_left_out(
    tmp_path: Path, data: dict[str, Any], content: str, sentence: str
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(content.encode(errors="surrogateescape"))
    data["files"] = [str(file)]
    with pytest.raises(DataError) as raised:
        load_documents(data, LLAMA)
    assert f"{file}, {sentence}" in str(raised.value)
    assert "skip_bad = N" in str(raised.value)
    documents, _ = load_documents({**data, "skip_bad": 1}, LLAMA)
    assert (len(documents), documents.facts.num_bad) == (1, 1)
    with pytest.raises(DataError, match="row 2"):  # also where the tokens are kept
        load_documents(data, LLAMA)


@pytest.mark.parametrize(
    ("name", "content", "keys", "sentence"),
    [
        ("a.txt", b"", {}, "there is no document in it"),
        ("a.txt", b"ab\n", {}, "3 tokens are too few for one sample of seq_len"),
        ("a.txt", b"a\xffb\n", {}, "row 1: byte 0xff at 1 is not UTF-8"),
        ("a.csv", b"a,b", {}, "not in '.csv'"),
        ("a.jsonl", b'{"body": "a"}', {}, "name one by column: body"),
        ("a.jsonl", b'{"body": "a"}', {"column": "bdy"}, "did you mean 'body'?"),
        ("a.txt.gz", b"no gzip", {}, "cannot be read: Not a gzipped file"),
        ("b.txt", b"a", {}, r"no file matches '.*a\.\*'"),
    ],
)
def test_what_is_wrong_is_one_message(
    tmp_path: Path, data: dict[str, Any], name: str, content: bytes, keys: Any, sentence: str
) -> None:
    (tmp_path / name).write_bytes(content)
    data |= {"files": [str(tmp_path / "a.*")], **keys}
    with pytest.raises(DataError, match=sentence) as raised:
        datasets.make(data, LLAMA)
    assert raised.value.exit_code == 2


def test_a_model_with_another_alphabet_takes_no_bytes(tmp_path: Path, data: dict[str, Any]) -> None:
    (tmp_path / "a.txt").write_text("0123456789")
    data["files"] = [str(tmp_path / "a.txt")]
    model = {"name": "hf", "vocab_size": 50257}
    with pytest.raises(DataError, match="is read as bytes; name the tokenizer"):
        load_documents(data, model)
    assert len(load_documents({**data, "tokenizer": "bytes"}, model)[0]) == 1


def test_columns_of_parquet_and_arrow(tmp_path: Path, data: dict[str, Any]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import ipc, parquet

    chat = [{"role": "user", "content": "a"}]
    table = pyarrow.table({"n": [1, 2, 3], "text": ["one", None, "three"], "messages": [chat] * 3})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    with ipc.new_file(tmp_path / "b.arrow", table.schema) as file:
        file.write(table)
    with ipc.new_stream(tmp_path / "c.arrow", table.schema) as file:
        file.write(table)
    for name in ("a.parquet", "b.arrow", "c.arrow"):
        one = {**data, "files": [str(tmp_path / name)]}
        with pytest.raises(DataError, match=f"{name}, row 2: nothing is neither"):
            texts_of(one)
        assert texts_of({**one, "skip_bad": 1}) == ["one\n", "three\n"]
        with pytest.raises(DataError, match=r"there is no column 'txt'; did you mean 'text'?"):
            texts_of({**one, "column": "txt"})
        with pytest.raises(DataError, match="conversations need a tokenizer"):
            texts_of({**one, "column": "messages"})
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(DataError, match=f"{name}' cannot be read as (Parquet|Arrow): "):
            texts_of({**one, "skip_bad": 9})


@pytest.mark.filterwarnings("ignore")  # the library's own, when it makes a set
def test_a_saved_set_of_the_library(tmp_path: Path, data: dict[str, Any]) -> None:
    library = pytest.importorskip("datasets")
    one = library.Dataset.from_dict({"text": ["one", "two", "three"]})
    one.save_to_disk(tmp_path / "one")
    library.DatasetDict({"train": one, "test": one.select([2])}).save_to_disk(tmp_path / "two")
    data |= {"name": "hf", "path": str(tmp_path / "one")}
    assert texts_of(data) == ["one\n", "two\n", "three\n"]
    data["path"] = str(tmp_path / "two")
    assert texts_of(data) == ["one\n", "two\n", "three\n"]
    assert texts_of({**data, "split": "test"}) == ["three\n"]
    with pytest.raises(DataError, match=r"has no split 'tset'; did you mean 'test'?"):
        texts_of({**data, "split": "tset"})
    with pytest.raises(DataError, match="there is no folder"):
        texts_of({**data, "path": str(tmp_path / "three")})
    with pytest.raises(DataError, match="is no folder of save_to_disk"):
        texts_of({**data, "path": str(tmp_path)})


def test_a_missing_library_is_one_sentence(
    tmp_path: Path, data: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("datasets", "pyarrow"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(DataError, match=r"pyarrow, which is not installed here: pip install"):
        texts_of({**data, "files": [str(tmp_path / "a.parquet")]})
    with pytest.raises(DataError, match=r"datasets, which is not installed here: pip install"):
        texts_of({**data, "name": "hf", "path": str(tmp_path)})

"""`make`: each kind of data fits its model, is the same each time, and says what is wrong where it
cannot.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plait import datasets, models
from plait.datasets.text import sources, stdlib
from plait.errors import DataError
from plait.models.losses import cross_entropy

GPT = {
    "name": "gpt",
    "vocab_size": 256,
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 2,
}
MLP = {
    "name": "mlp",
    "in_features": 64,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "out_features": 10,
}
RESNET = {"name": "resnet", "in_channels": 1, "num_classes": 10, "width": 8}


@pytest.mark.parametrize(
    ("data", "model"),
    [
        ({"name": "stdlib", "seq_len": 16}, GPT),
        ({"name": "random", "seq_len": 16}, GPT),
        ({"name": "random"}, MLP),
        ({"name": "random", "image_size": 16}, RESNET),
        ({"name": "digits"}, MLP),
        ({"name": "digits"}, RESNET),
    ],
)
def test_data_fits_its_model_and_is_the_same_each_time(
    data: dict[str, Any], model: dict[str, Any]
) -> None:
    dataset = datasets.make(data, model, seed=5)
    again = datasets.make(data, model, seed=5)
    inputs, targets = next(datasets.Loader(dataset, 3))
    _, count = cross_entropy(models.make(**model)(inputs), targets)
    assert int(count) == targets.numel()
    indices = torch.tensor([4, 0, 7])
    inputs, targets = dataset.batch(indices)
    for part, other in zip((inputs, targets), again.batch(indices), strict=True):
        assert torch.equal(part, other)
    for row, index in enumerate(indices.tolist()):
        x, y = dataset[index]
        assert torch.equal(x, inputs[row])
        assert torch.equal(y, targets[row])


def test_random_data_depends_on_its_seed() -> None:
    first, other = (
        datasets.make({"name": "random", "seq_len": 16}, GPT, seed=seed)[0][0] for seed in (0, 1)
    )
    assert not torch.equal(first, other)
    assert torch.equal(
        datasets.make({"name": "random", "seq_len": 16, "seed": 1}, GPT, seed=0)[0][0], other
    )


def test_sections_may_be_objects() -> None:
    data = SimpleNamespace(name="random", seq_len=7, seed=None)
    model = SimpleNamespace(**GPT)
    assert datasets.make(data, model)[0][0].shape == (7,)


def test_stdlib_is_python_source() -> None:
    corpus = stdlib(64, max_bytes=2**16)
    assert len(corpus) == (2**16 - 1) // 64
    text = b"".join(bytes(corpus[index][0].tolist()) for index in range(200)).decode()
    assert "import" in text


def test_sources_come_by_name_and_leave_out_tests_and_what_is_installed(tmp_path: Path) -> None:
    for name in (
        "z.py",
        "a.py",
        "c.txt",
        "_sysconfigdata_x.py",
        "pack/b.py",
        "pack/test/t.py",
        "site-packages/s.py",
        "lib/l.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert [path.relative_to(tmp_path).as_posix() for path in sources(tmp_path)] == [
        "a.py",
        "z.py",
        "lib/l.py",
        "pack/b.py",
    ]


def test_windows_stand_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abcde")
    (tmp_path / "b.txt").write_bytes(b"fghij")
    windows = datasets.make(
        {"name": "text", "files": [tmp_path / "a.txt", str(tmp_path / "b.txt")], "seq_len": 3}, GPT
    )
    pairs = [
        tuple(bytes(part.tolist()) for part in windows[index]) for index in range(len(windows))
    ]
    assert pairs == [(b"abc", b"bcd"), (b"def", b"efg"), (b"ghi", b"hij")]


def test_files_that_cannot_serve_are_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    short = tmp_path / "short.txt"
    empty.touch()
    short.write_text("abc")
    for files, message in [
        ([], "needs files"),
        ([tmp_path / "none.txt"], r"none\.txt' cannot be read: No such file"),
        ([tmp_path], "cannot be read: Is a directory"),
        ([short, empty], r"empty\.txt' is empty"),
        ([short], r"short\.txt': 3 bytes are too few for one window of seq_len \+ 1 = 17"),
    ]:
        with pytest.raises(DataError, match=message):
            datasets.make({"name": "text", "files": files, "seq_len": 16}, GPT)


@pytest.mark.parametrize(
    ("data", "model", "message"),
    [
        ({"name": "stdlb"}, GPT, "there is no data 'stdlb'; did you mean 'stdlib'?"),
        ({}, GPT, "needs a name or python"),
        ({"name": "stdlib"}, GPT | {"vocab_size": 100}, "needs vocab_size = 256 or more, not 100"),
        (
            {"name": "stdlib", "seq_len": 2000},
            GPT,
            "seq_len = 2000 is not in 1 .. max_position_embeddings = 1024",
        ),
        ({"name": "stdlib"}, MLP, "'mlp' takes no text"),
        ({"name": "digits"}, GPT, "'gpt' takes tokens, not images"),
        ({"name": "digits"}, MLP | {"in_features": 63}, "in_features = 64 in [model], not 63"),
        ({"name": "digits"}, RESNET | {"num_classes": 9}, "num_classes = 10 in [model], not 9"),
        ({"name": "digits"}, {"name": "resnet"}, "in_channels = 1 in [model], not 3"),
        ({"name": "random"}, {"name": "hf"}, "needs its vocab_size"),
        ({"name": "random"}, {"python": "a:b"}, "needs a model by name"),
    ],
)
def test_what_does_not_fit_is_named(
    data: dict[str, Any], model: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError) as caught:
        datasets.make(data, model)
    assert message in str(caught.value)


def test_an_encoder_decoder_has_the_vocabulary_of_its_decoder() -> None:
    model = {"name": "hf", "task": "seq2seq", "config": {"decoder": {"vocab_size": 7}}}
    tokens = datasets.make({"name": "random", "seq_len": 64}, model)[0][0]
    assert 4 <= int(tokens.max()) < 7


def test_data_by_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_data.py").write_text(
        "def pairs(): return [([1.0, 2.0], 3), ([4.0, 5.0], 6)]\n"
        "def none(): return []\n"
        "def number(): return 3\n"
        "def single(): return [1, 2]\n"
        "def mapping(): return [{'input_ids': [1, 2], 'labels': 0}]\n"
        "def image(): return [{'image': [1.0], 'target': [2.0]}]\n"
        "def points(): return [{'x': [1.0], 'z': [2.0]}]\n"
        "def broken(): raise KeyError('x')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    inputs, targets = next(datasets.Loader(datasets.make({"python": "users_data:pairs"}), 2))
    assert sorted(targets.tolist()) == [3, 6]
    assert inputs.shape == (2, 2)
    for name, message in [
        ("none", "returned no samples"),
        ("number", "must have a length"),
        ("single", "sample 0 is a int, not a pair"),
        ("mapping", r"sample 0 is a dict, .*; return \(sample, sample\['labels'\]\)"),
        ("image", r"; return \({'image': sample\['image'\]}, sample\['target'\]\)"),
        ("points", "; its keys are x, z: return what the model takes, and the target"),
        ("broken", "failed: KeyError"),
        ("pair", "did you mean 'pairs'"),
    ]:
        with pytest.raises(DataError, match=message):
            datasets.make({"python": f"users_data:{name}"})


def test_packed_text_knows_where_its_files_end(tmp_path: Path) -> None:
    for name, content in (("a", b"abcde"), ("b", b"fg"), ("c", b"hijklmnop")):
        (tmp_path / name).write_bytes(content)
    data = {
        "name": "text",
        "files": [str(tmp_path / name) for name in "abc"],
        "seq_len": 5,
        "packed": True,
    }
    for name in ("gpt", "llama"):
        assert len(datasets.make(data, {"name": name, "vocab_size": 256}))
    with pytest.raises(DataError, match="takes documents: gpt or llama, not 'hf'"):
        datasets.make(data, {"name": "hf", "vocab_size": 256})
    llama = {"name": "llama", "vocab_size": 256}
    (inputs, documents), labels = datasets.make(data, llama).batch(torch.arange(3))
    assert bytes(inputs.flatten().tolist()) == b"abcdefghijklmno"
    assert documents.tolist() == [[0, 0, 0, 0, 0], [1, 1, 2, 2, 2], [2, 2, 2, 2, 2]]
    assert [bytes(max(label, 0) for label in row) for row in labels.tolist()] == [
        b"bcde\0",
        b"g\0ijk",
        b"lmnop",
    ]
    assert (labels == -100).sum() == 2
    (one, document), label = datasets.make(data, llama)[1]
    assert (
        torch.equal(one, inputs[1])
        and torch.equal(document, documents[1])
        and torch.equal(label, labels[1])
    )


def test_digits_without_their_package_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"pip install \"plait\[digits\]\""):
        datasets.make({"name": "digits"}, MLP)

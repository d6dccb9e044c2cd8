"""Data `hf`: saved folders, streams and functions of the library `datasets` become tokens once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from plait import datasets
from plait.config import Config
from plait.datasets.files import load_documents
from plait.datasets.library_set import library_set
from plait.errors import ConfigError, DataError
from tests.unit.datasets.test_files import LLAMA, texts_of, write_lines

library = pytest.importorskip("datasets")
pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own

READ: list[str] = []
"""Rows that a generator of this module has given."""
FILES: list[str] = []
"""Files that it reads."""


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Any]:
    READ.clear()
    FILES.clear()
    return {"name": "hf", "cache": str(tmp_path / "kept"), "seq_len": 8}


def rows_of(files: list[str]) -> Iterator[dict[str, str]]:
    for file in files:
        for line in Path(file).read_text().splitlines():
            READ.append(line)
            if line == "broken":
                raise ConnectionError("the line was cut\nat a relay")
            yield {"text": line}


def stream() -> Any:
    """An iterable that says no columns, with a step behind it."""
    made = library.IterableDataset.from_generator(rows_of, gen_kwargs={"files": list(FILES)})
    return made.map(lambda row: {"text": row["text"].upper()})


def splits() -> Any:
    return library.IterableDatasetDict({"train": stream(), "test": stream().take(1)})


def indexable() -> Any:
    return library.Dataset.from_dict({"text": ["one", "two", "three"]})


def endless() -> Any:
    def numbers() -> Iterator[dict[str, str]]:
        for number in count():
            yield {"text": f"{number}"}

    return library.IterableDataset.from_generator(numbers)


def in_order() -> Any:
    """Two streams, drawn from in turn, behind a buffer that shuffles."""
    files = [{"files": [file]} for file in FILES]
    parts = [library.IterableDataset.from_generator(rows_of, gen_kwargs=one) for one in files]
    return library.interleave_datasets(parts).shuffle(seed=3, buffer_size=3)


def no_set() -> Any:
    return [1, 2]


def of(name: str) -> str:
    return f"{__name__}:{name}"


def test_a_stream_of_a_function_is_read_once(tmp_path: Path, data: dict[str, Any]) -> None:
    for name, text in (("a.txt", "one\ntwo\n"), ("b.txt", "three\n")):
        (tmp_path / name).write_text(text)
        FILES.append(str(tmp_path / name))
    data["python"] = of("stream")
    assert texts_of(data) == ["ONE\n", "TWO\n", "THREE\n"]
    READ.clear()
    assert texts_of(data) == ["ONE\n", "TWO\n", "THREE\n"]
    assert len(READ) <= 1  # the first row says the columns
    (tmp_path / "b.txt").write_text("four\n")
    assert texts_of(data)[-1] == "FOUR\n"
    assert texts_of({**data, "rows": 2}) == ["ONE\n", "TWO\n"]


def test_sets_of_a_function_have_splits_an_index_or_no_end(
    tmp_path: Path, data: dict[str, Any]
) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    FILES.append(str(tmp_path / "a.txt"))
    assert texts_of({**data, "python": of("splits")}) == ["ONE\n", "TWO\n"]
    assert texts_of({**data, "python": of("splits"), "split": "test"}) == ["ONE\n"]
    assert texts_of({**data, "python": of("indexable")}) == ["one\n", "two\n", "three\n"]
    assert texts_of({**data, "python": of("endless"), "rows": 3}) == ["0\n", "1\n", "2\n"]


def test_a_shuffled_mixture_of_streams_has_one_order(tmp_path: Path, data: dict[str, Any]) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text("".join(f"{name}{number}\n" for number in range(6)))
        FILES.append(str(tmp_path / name))
    data["python"] = of("in_order")
    found = texts_of(data)
    assert len(set(found)) == len(found) == 11  # the library stops with the first of the two
    assert found != sorted(found)
    assert texts_of({**data, "cache": str(tmp_path / "other")}) == found


def test_a_folder_of_data_files_is_streamed(tmp_path: Path, data: dict[str, Any]) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    write_lines(folder / "train-1.jsonl", [{"text": "one"}, {"text": "two"}])
    write_lines(folder / "train-2.jsonl", [{"text": "three"}])
    write_lines(folder / "test.jsonl", [{"text": "four"}])
    data |= {"path": str(folder), "streaming": True}
    assert texts_of(data) == ["one\n", "two\n", "three\n"]
    assert texts_of({**data, "split": "test"}) == ["four\n"]
    files = {path.name for path in library_set(data).files}
    assert {"train-1.jsonl", "train-2.jsonl"} <= files
    write_lines(folder / "train-2.jsonl", [{"text": "changed"}])
    assert texts_of(data)[-1] == "changed\n"
    with pytest.raises(DataError, match=r"no split 'tset'; did you mean 'test'\?"):
        texts_of({**data, "split": "tset"})
    with pytest.raises(DataError, match=r"there is no column 'txt'; did you mean 'text'\?"):
        texts_of({**data, "column": "txt"})


def test_samples_of_a_stream_have_places(tmp_path: Path, data: dict[str, Any]) -> None:
    data |= {"python": of("endless"), "rows": 400}
    samples: Any = datasets.make(data, LLAMA)
    loader = datasets.Loader(samples, 3, seed=1)
    for _ in range(4):
        next(loader)
    place = loader.state_dict()
    wanted = [next(loader)[0].tolist() for _ in range(300)]  # over an epoch's end
    parts = [
        datasets.Loader(datasets.make(data, LLAMA), 3, seed=1, dp_size=2, dp_rank=rank, workers=2)
        for rank in range(2)
    ]
    for part in parts:
        part.load_state_dict(place)
    found = [[row for part in parts for row in next(part)[0].tolist()] for _ in range(300)]
    assert found == wanted


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"python": "no_set"}, "returned a list; data 'hf' takes a Dataset or an IterableDataset"),
        ({"python": "broken"}, "has no 'broken'"),
        ({"python": "indexable", "split": "test"}, "has no splits; leave split = 'test' out"),
        ({"path": "nowhere", "streaming": True}, "data 'hf': 'nowhere' failed: "),
        ({"python": "stream"}, "there is no document in it"),
    ],
)
def test_what_is_wrong_is_one_message(
    tmp_path: Path,
    data: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    keys: dict[str, Any],
    sentence: str,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if "python" in keys:
        keys = {**keys, "python": of(keys["python"])}
    with pytest.raises(DataError) as raised:
        load_documents({**data, **keys}, LLAMA)
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_stream_that_breaks_off_is_said_with_its_row(
    tmp_path: Path, data: dict[str, Any]
) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\nbroken\n")
    FILES.append(str(tmp_path / "a.txt"))
    sentence = r"failed behind row 0: ConnectionError: the line was cut$"
    with pytest.raises(DataError, match=sentence):
        texts_of({**data, "python": of("stream")})
    assert not list((tmp_path / "kept").glob("*/facts.json"))


CONFIG: dict[str, Any] = {
    "model": {
        "name": "gpt",
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 1,
        "vocab_size": 256,
    },
    "train": {"steps": 1, "global_batch": 2},
    "plan": {"text": "dp1"},
}


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"python": "a:b", "path": "c"}, "data.path 'c' and data.python 'a:b' are two sources"),
        ({"python": "a:b", "streaming": True}, "data.streaming reads data.path"),
        ({"path": "c", "subset": "en"}, "data.subset belongs to data.streaming"),
        ({}, "data.path is missing"),
        ({"name": "files", "files": ["a.txt"], "rows": 3}, "data.rows belongs to data 'hf'"),
        ({"name": "files", "files": ["a.txt"], "python": "a:b"}, "are two sources; keep one"),
    ],
)
def test_keys_that_do_not_go_together_are_said(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Config.load({**CONFIG, "data": {"name": "hf", **keys}})
    assert sentence in str(raised.value)

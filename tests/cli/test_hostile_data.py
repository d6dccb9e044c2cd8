"""Hostile data for `plait train`: one sentence and exit code 2, and nothing is written.

A full disk under the tokens is no fault of the data, and ends the run with code 1.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from plait.cli import main
from tests.unit.datasets.test_files import make_tokenizer

CONFIG = """
[model]
name = "llama"
num_hidden_layers = 1
hidden_size = 8
num_attention_heads = 2
vocab_size = 256
[data]
seq_len = 8
cache = "CACHE"
KEYS
[train]
steps = 1
global_batch = 2
[plan]
text = "dp1"
"""


def truncated_parquet(folder: Path) -> str:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = folder / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": ["some words"] * 999}), path)
    path.write_bytes(path.read_bytes()[:-100])
    return 'name = "files"\nfiles = ["rows.parquet"]'


def no_utf8(folder: Path) -> str:
    (folder / "a.txt").write_bytes("first\ncafé\n".encode("latin-1"))
    return 'name = "files"\nfiles = ["a.txt"]'


def large_vocabulary(folder: Path) -> str:
    make_tokenizer(folder / "tokenizer.json")
    (folder / "a.txt").write_text("some words are here\n" * 9)
    return 'name = "files"\nfiles = ["a.txt"]\ntokenizer = "tokenizer.json"'


def empty_set(folder: Path) -> str:
    (folder / "a.jsonl").write_text("\n\n")
    return 'name = "files"\nfiles = ["a.jsonl"]'


def weight_of_nothing(folder: Path) -> str:
    (folder / "a.txt").write_text("some words are here\n" * 9)
    part = '[[data.mixture]]\nname = "files"\nfiles = ["a.txt"]\nweight = {}\n'
    return part.format(1) + part.format(0)


def damaged_cache(folder: Path) -> str:
    (folder / "a.txt").write_text("some words are here\n" * 9)
    keys = 'name = "files"\nfiles = ["a.txt"]'
    assert main(["train", str(written(folder, keys)), "--out", str(folder / "before")]) == 0
    (tokens,) = (folder / "kept").glob("*/tokens.bin")
    tokens.write_bytes(tokens.read_bytes()[:-1])
    return keys


def written(folder: Path, keys: str) -> Path:
    path = folder / "tiny.toml"
    path.write_text(CONFIG.replace("CACHE", str(folder / "kept")).replace("KEYS", keys))
    return path


def contents(folder: Path) -> dict[Path, bytes]:
    """The files that a user has; the kept tokens are plait's own."""
    files = [one for one in folder.rglob("*") if one.is_file()]
    return {one: one.read_bytes() for one in files if "kept" not in one.parts}


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (truncated_parquet, "rows.parquet' cannot be read as Parquet: "),
        (no_utf8, "a.txt, row 2: byte 0xe9 at 3 is not UTF-8"),
        (large_vocabulary, "has 257 tokens, and the model's vocabulary 256; set vocab_size = 257"),
        (empty_set, "a.jsonl': there is no document in it"),
        (weight_of_nothing, "data.mixture[1].weight is 0, so nothing is drawn from it"),
        (damaged_cache, "tokens.bin is not whole); remove that folder"),
    ],
)
def test_bad_data_is_one_sentence_before_the_run(
    make: Callable[[Path], str],
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = written(tmp_path, make(tmp_path))
    before = contents(tmp_path)
    capsys.readouterr()
    assert main(["train", str(config), "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert len(said.splitlines()) == 1
    assert contents(tmp_path) == before
    assert not (tmp_path / "run").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    place = tmp_path / "kept"
    place.mkdir()
    words = ("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place))
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(("umount", str(place)), check=True)


@pytest.mark.slow
def test_a_full_disk_under_the_tokens_is_one_sentence(
    small_disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("some words are here\n" * 9999)
    config = written(tmp_path, 'name = "files"\nfiles = ["a.txt"]')
    assert main(["train", str(config), "--out", str(tmp_path / "run")]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert f"tokens cannot be kept in {small_disk}: No space left on device; free some" in said
    assert not [one for one in small_disk.rglob("*") if one.is_file()]
    assert not (tmp_path / "run").exists()

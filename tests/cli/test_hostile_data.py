"""Data that cannot serve: one message and exit code 2 before a rank starts, and no folder of a run.
A full disk under the tokens ends nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from plait.cli import main
from tests.unit.datasets.test_files import make_tokenizer

MODEL = """
[model]
name = "llama"
num_hidden_layers = 1
hidden_size = 8
num_attention_heads = 2
vocab_size = 256
[train]
steps = 2
global_batch = 2
[plan]
text = "dp1"
[data]
seq_len = 8
cache = "CACHE"
"""
FILES = 'name = "files"\nfiles = ["{}"]\n'
LIMIT_KIB = 1024


def truncated_parquet(folder: Path) -> str:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = folder / "a.parquet"
    parquet.write_table(arrow.table({"text": ["a text"] * 100}), path)
    path.write_bytes(path.read_bytes()[:-20])
    return FILES.format(path.name)


def no_utf8(folder: Path) -> str:
    (folder / "a.txt").write_bytes(b"good\nb\xffd\n")
    return FILES.format("a.txt")


def large_tokenizer(folder: Path) -> str:
    make_tokenizer(folder / "tokenizer.json")
    (folder / "a.txt").write_text("some text\n")
    return FILES.format("a.txt") + f'tokenizer = "{folder / "tokenizer.json"}"\n'


def broken_tokenizer(folder: Path) -> str:
    pytest.importorskip("tokenizers")
    (folder / "tokenizer.json").write_text('{"version": "1.0", ')
    (folder / "a.txt").write_text("some text\n")
    return FILES.format("a.txt") + f'tokenizer = "{folder / "tokenizer.json"}"\n'


def no_tokenizer(folder: Path) -> str:
    (folder / "a.txt").write_text("some text\n")
    return FILES.format("a.txt") + 'tokenizer = "nowhere/tokenizer.json"\n'


def empty(folder: Path) -> str:
    (folder / "a.jsonl").write_text("")
    return FILES.format("a.jsonl")


def mixture_of_nothing(folder: Path) -> str:
    (folder / "a.txt").write_text("some text\n")
    source = f"[[data.mixture]]\n{FILES.format('a.txt')}"
    return f"{source}weight = 0\n{source}weight = 0\n"


def source_without_weight(folder: Path) -> str:
    (folder / "a.txt").write_text("some text\n")
    source = f"[[data.mixture]]\n{FILES.format('a.txt')}"
    return f"{source}weight = 1\n{source}weight = 0\n"


def no_column(folder: Path) -> str:
    (folder / "a.jsonl").write_text(json.dumps({"body": "some text"}) + "\n")
    return FILES.format("a.jsonl") + 'column = "bdy"\n'


def no_file(folder: Path) -> str:
    return FILES.format("nowhere/*.txt")


HOSTILE: dict[Callable[[Path], str], str] = {
    truncated_parquet: "a.parquet' cannot be read as Parquet: ",
    no_utf8: "a.txt, row 2: byte 0xff at 1 is not UTF-8",
    large_tokenizer: "257 tokens, and the model's vocabulary 256; set vocab_size = 257 or more",
    broken_tokenizer: "tokenizer.json",
    no_tokenizer: "nowhere/tokenizer.json",
    empty: "there is no document in it",
    mixture_of_nothing: "data.mixture: all weights from step 0 on are 0",
    source_without_weight: "data.mixture[1].weight is 0, so nothing is drawn from it",
    no_column: "there is no column 'bdy'; did you mean 'body'?",
    no_file: "no file matches",
}


def config_of(folder: Path, section: str) -> Path:
    path = folder / "run.toml"
    path.write_text(MODEL.replace("CACHE", str(folder / "kept")) + section)
    return path


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda hostile: hostile.__name__)
def test_data_that_cannot_serve_are_one_message(
    hostile: Callable[[Path], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, hostile(tmp_path))
    before = sorted(tmp_path.iterdir())
    assert main(["train", str(config), "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr()
    assert HOSTILE[hostile] in said.err
    assert said.err.count("plait train: ") == 1
    assert "Traceback" not in said.err
    assert said.out == ""
    left = {path for path in tmp_path.iterdir() if path not in before}
    assert left <= {tmp_path / "kept"}
    assert not any((tmp_path / "kept").glob("*.*"))  # a folder half made, or a lock


@pytest.mark.slow
def test_a_full_disk_under_the_tokens_ends_nothing(tmp_path: Path) -> None:
    """No file may be larger than the limit, and the tokens would be."""
    line = "a line of some length that comes again\n"
    (tmp_path / "a.txt").write_text(line * (3 * LIMIT_KIB * 1024 // len(line)))
    config = config_of(tmp_path, FILES.format("a.txt"))
    command = f'ulimit -f {LIMIT_KIB}; exec "$0" -m plait train "$1" --out "$2" --json'
    ended = subprocess.run(
        ["bash", "-c", command, sys.executable, str(config), str(tmp_path / "run")],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    assert "tokens cannot be kept in" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert json.loads(ended.stdout)["steps"] == 2
    assert not any((tmp_path / "kept").glob("*"))

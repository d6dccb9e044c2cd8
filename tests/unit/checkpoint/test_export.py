"""Exports: whole tensors, in files that the safetensors library reads, sharded as Hugging Face
shards them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from plait.checkpoint import Shard, export_safetensors, save
from plait.errors import CheckpointError
from tests.unit.checkpoint.cuttings import cut_shards, save_on

TENSORS = {
    "model/a": torch.arange(24.0).view(4, 6),
    "model/b": torch.arange(10, dtype=torch.bfloat16),
    "model/n": torch.tensor(3),
    "optimizer/a": torch.ones(4, 6),
}
NAMES = {"model/a": "layer.weight", "model/b": "layer.bias", "model/n": "count"}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    shards: list[list[Shard]] = [[], []]
    for name, full in TENSORS.items():
        for index, shard in enumerate(cut_shards(lambda numel: [numel // 3], name, full)):
            shards[index % 2].append(shard)
    shards[1].append(Shard.whole("random/00001/cpu", torch.zeros(5, dtype=torch.uint8)))
    save_on(tmp_path / "c", shards)
    return tmp_path / "c"


def test_one_file_with_the_names_that_were_asked_for(saved: Path, tmp_path: Path) -> None:
    assert export_safetensors(saved, tmp_path / "out" / "x.safetensors", names=NAMES) == [
        tmp_path / "out" / "x.safetensors"
    ]
    found = load_file(tmp_path / "out" / "x.safetensors")
    assert sorted(found) == sorted(NAMES.values())
    for source, name in NAMES.items():
        assert torch.equal(found[name], TENSORS[source])
    with safe_open(tmp_path / "out" / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["x.safetensors"]


def test_everything_but_random_states_by_default(saved: Path, tmp_path: Path) -> None:
    (file,) = export_safetensors(saved, tmp_path / "out")
    assert file.name == "model.safetensors"
    assert sorted(load_file(file)) == sorted(TENSORS)


def test_shards_and_their_index(saved: Path, tmp_path: Path) -> None:
    *shards, index = export_safetensors(saved, tmp_path / "out", names=NAMES, max_shard_bytes=30)
    assert [path.name for path in shards] == [f"model-0000{k}-of-00002.safetensors" for k in (1, 2)]
    listed = json.loads(index.read_text())
    assert listed["metadata"] == {"total_size": 96 + 20 + 8}
    for source, name in NAMES.items():
        assert torch.equal(
            load_file(index.parent / listed["weight_map"][name])[name], TENSORS[source]
        )


def test_floating_tensors_are_converted(saved: Path, tmp_path: Path) -> None:
    export_safetensors(saved, tmp_path / "x.safetensors", names=NAMES, dtype=torch.float64)
    found = load_file(tmp_path / "x.safetensors")
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "layer.weight": torch.float64,
        "layer.bias": torch.float64,
        "count": torch.int64,
    }


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"model/c": "c"}, "'model/c' is not in .*did you mean"),
        ({"model/a": "x", "model/b": "x"}, "would both be exported as 'x'"),
    ],
)
def test_names_that_cannot_be_exported(
    saved: Path, tmp_path: Path, names: dict[str, str], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        export_safetensors(saved, tmp_path / "out", names=names)


def test_a_folder_that_cannot_be_made(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="a file has the name of this folder, or"):
        export_safetensors(saved, tmp_path / "file" / "out")
    with pytest.raises(CheckpointError, match="a file has the name of this folder, or"):
        export_safetensors(saved, tmp_path / "file")


def test_no_shard_size(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="at least 1"):
        export_safetensors(saved, tmp_path / "out", max_shard_bytes=0)


def test_an_empty_checkpoint_exports_an_empty_file(tmp_path: Path) -> None:
    save(tmp_path / "c", [], {})
    (file,) = export_safetensors(tmp_path / "c", tmp_path / "out")
    assert load_file(file) == {}

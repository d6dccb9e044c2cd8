"""Any cutting saved, any other loaded: what comes back is what was there, or an error that says
what is not.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from plait.checkpoint import Box, Checkpoint, Shard, previous, resolve, save
from plait.checkpoint import file as file_module
from plait.errors import CheckpointError
from tests.unit.checkpoint.cuttings import blank, cut_shards, save_on

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8]


def cutter(data: st.DataObject) -> Callable[[int], list[int]]:
    return lambda numel: sorted(
        data.draw(st.lists(st.integers(0, numel), max_size=2), label=f"cuts of {numel}")
    )


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 9).to(dtype)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 5), max_size=3).map(tuple), st.sampled_from(DTYPES)),
        min_size=1,
        max_size=3,
    ),
    st.integers(1, 4),
    st.data(),
)
def test_saved_under_one_cutting_loads_under_another(
    forms: list[tuple[tuple[int, ...], torch.dtype]], world_size: int, data: st.DataObject
) -> None:
    tensors = {
        f"t{index}": values(shape, dtype, index) for index, (shape, dtype) in enumerate(forms)
    }
    cut = cutter(data)
    shards: list[list[Shard]] = [[] for _ in range(world_size)]
    for name, full in tensors.items():
        for shard in cut_shards(cut, name, full):
            for rank in data.draw(
                st.sets(st.integers(0, world_size - 1), min_size=1), label="holders"
            ):
                shards[rank].append(shard)
    with tempfile.TemporaryDirectory() as folder:
        saved = save_on(Path(folder) / "any", shards)
        assert all(isinstance(one, Path) for one in saved), saved
        checkpoint = Checkpoint.open(Path(folder) / "any")
        assert sorted(checkpoint.names()) == sorted(tensors)
        for name, full in tensors.items():
            for wanted in cut_shards(cut, name, full):
                target = blank(wanted)
                checkpoint.load([target])
                assert torch.equal(target.values, wanted.values), (name, wanted)
            assert torch.equal(checkpoint.tensor(name), full)


def save_two(folder: Path) -> Checkpoint:
    meta = {
        "step": 3,
        "plan": "dp2:zero1",
        "loader": {"epoch": 1, "seen": [1, 2]},
        "lr": 0.125,
        "none": None,
    }
    shards = [
        Shard.whole("weight", values((4, 6), torch.float32)),
        Shard.whole("step", torch.tensor(7.0)),
    ]
    save(folder / "step-00000003", shards, meta)
    return Checkpoint.open(folder)


def test_meta_scalars_and_names(tmp_path: Path) -> None:
    checkpoint = save_two(tmp_path)
    assert checkpoint.meta == {
        "step": 3,
        "plan": "dp2:zero1",
        "loader": {"epoch": 1, "seen": [1, 2]},
        "lr": 0.125,
        "none": None,
    }
    assert checkpoint.tensor("step").item() == 7.0
    assert checkpoint.global_shape("step") == ()
    assert "weight" in checkpoint
    assert "bias" not in checkpoint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000003"]


def test_the_files_are_plain_safetensors_and_json(tmp_path: Path) -> None:
    save_two(tmp_path)
    found = load_file(tmp_path / "step-00000003" / "rank-00000-of-00001.safetensors")
    assert torch.equal(found["000000/weight"].view(4, 6), values((4, 6), torch.float32))
    assert {path.suffix for path in (tmp_path / "step-00000003").iterdir()} == {
        ".json",
        ".safetensors",
    }
    index = json.loads((tmp_path / "step-00000003" / "checkpoint.json").read_text())
    assert index["tensors"]["weight"] == {"shape": [4, 6], "dtype": "float32", "files": [0]}


@pytest.mark.parametrize("block_bytes", [8, 64, 1 << 20])
def test_only_the_blocks_that_are_needed_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(file_module, "BLOCK_BYTES", block_bytes)
    full = values((16, 8), torch.float32)  # a row has 32 bytes
    save(tmp_path / "c", [Shard.whole("w", full)], {})
    checkpoint = Checkpoint.open(tmp_path / "c")
    row = torch.zeros(8)
    checkpoint.fill(Shard("w", (16, 8), Box((5, 0), (1, 8)), 0, 8, row))
    assert torch.equal(row, full[5])
    assert sum(checkpoint._reader(0)._checked) == max(1, 32 // block_bytes)
    checkpoint.verify()
    assert all(checkpoint._reader(0)._checked)


def test_a_view_is_saved_and_filled_in_place(tmp_path: Path) -> None:
    bucket = torch.arange(20.0)
    box = Box.whole((2, 5))
    ranges = [(2, 7, bucket[10:15]), (0, 2, bucket[:2]), (7, 10, bucket[:3])]
    save(tmp_path / "c", [Shard("w", (2, 5), box, *part) for part in ranges], {})
    target = torch.zeros(2, 5, requires_grad=True)
    Checkpoint.open(tmp_path / "c").fill(Shard.whole("w", target))
    assert target.detach().flatten().tolist() == [0, 1, 10, 11, 12, 13, 14, 0, 1, 2]


@pytest.mark.parametrize("size", [1, 3])  # torch calls one element contiguous whatever its stride
def test_tensors_of_a_strided_view_are_saved(tmp_path: Path, size: int) -> None:
    column = torch.arange(12.0).view(3, 4)[:size, 1]
    save(tmp_path / "c", [Shard("w", (size,), Box.whole((size,)), 0, size, column)], {})
    assert Checkpoint.open(tmp_path / "c").tensor("w").tolist() == [1, 5, 9][:size]


def test_every_tensor_is_aligned_in_its_file(tmp_path: Path) -> None:
    tensors = [
        torch.zeros(3, dtype=torch.uint8),
        torch.ones(1, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.float64),
    ]
    save(
        tmp_path / "c",
        [Shard.whole(f"t{index}", tensor) for index, tensor in enumerate(tensors)],
        {},
    )
    reader = Checkpoint.open(tmp_path / "c")._reader(0)
    for index, tensor in enumerate(tensors):
        assert reader.tensor(f"{index:06d}/t{index}").data_ptr() % tensor.itemsize == 0


@pytest.mark.parametrize(
    ("source", "target"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float64)]
)
def test_types_are_converted_when_asked(
    tmp_path: Path, source: torch.dtype, target: torch.dtype
) -> None:
    full = values((3, 3), source)
    save(tmp_path / "c", [Shard.whole("w", full)], {})
    checkpoint = Checkpoint.open(tmp_path / "c")
    wanted = torch.zeros(3, 3, dtype=target)
    with pytest.raises(
        CheckpointError, match=rf"'w' is {source} in .* and {target} here; .*convert=True"
    ):
        checkpoint.fill(Shard.whole("w", wanted))
    checkpoint.fill(Shard.whole("w", wanted), convert=True)
    assert torch.equal(wanted, full.to(target))
    with pytest.raises(CheckpointError, match=r"torch\.int64 here"):
        checkpoint.fill(Shard.whole("w", torch.zeros(3, 3, dtype=torch.int64)), convert=True)


def test_another_model_is_refused_with_all_that_differs(tmp_path: Path) -> None:
    save(
        tmp_path / "c",
        [Shard.whole(name, torch.zeros(2, 3)) for name in ("a", "b", "random/00000/cpu")],
        {},
    )
    checkpoint = Checkpoint.open(tmp_path / "c")
    checkpoint.check({"a": (2, 3), "b": (2, 3)})
    checkpoint.check({"a": (2, 3)}, complete=False)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.check({"a": (3, 2), "new": (1,)})
    message = str(caught.value)
    assert "not in the checkpoint: 'new'" in message
    assert "in the checkpoint only: 'b'" in message
    assert "'a' has shape (2, 3) there and (3, 2) here" in message
    assert "random" not in message
    with pytest.raises(CheckpointError, match=r"'a' has shape \(2, 3\) in .* and \(3, 2\) here"):
        checkpoint.fill(Shard.whole("a", torch.zeros(3, 2)))
    with pytest.raises(CheckpointError, match=r"'weigth' is not in .*; known: a, b"):
        checkpoint.fill(Shard.whole("weigth", torch.zeros(1)))


def test_elements_that_no_rank_saves_are_refused_on_every_rank(tmp_path: Path) -> None:
    box = Box.whole((2, 3))
    shards = [
        [Shard("w", (2, 3), box, 0, 2, torch.zeros(2))],
        [Shard("w", (2, 3), box, 4, 6, torch.zeros(2))],
    ]
    for error in save_on(tmp_path / "c", shards):
        assert isinstance(error, CheckpointError)
        assert "'w' has 6 elements and the shards of all ranks hold 4" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_elements_that_are_in_no_file_are_named(tmp_path: Path) -> None:
    box = Box.whole(
        (2, 3)
    )  # overlapping shards: as many elements as the tensor has, and not all of them
    save(
        tmp_path / "c",
        [
            Shard("w", (2, 3), box, 0, 4, torch.zeros(4)),
            Shard("w", (2, 3), box, 1, 4, torch.zeros(3)),
        ],
        {},
    )
    with pytest.raises(
        CheckpointError,
        match=r"'w' \(2, 3\): elements \(1, 1\) to \(1, 2\) are in no file .*2 of 6",
    ):
        Checkpoint.open(tmp_path / "c").tensor("w")


@pytest.mark.parametrize(
    "other",
    [Shard.whole("w", torch.zeros(3)), Shard.whole("w", torch.zeros(2, dtype=torch.float64))],
)
def test_ranks_that_disagree_are_refused(tmp_path: Path, other: Shard) -> None:
    for error in save_on(tmp_path / "c", [[Shard.whole("w", torch.zeros(2))], [other]]):
        assert isinstance(error, CheckpointError)
        assert "'w' is float32 [2] on rank 0 and" in str(error)


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"rng": {"state": torch.zeros(1)}}, "meta.rng.state is a Tensor"),
        ({"a": [{1: 2}]}, r"meta.a\[0\] has the key 1"),
    ],
)
def test_meta_that_is_not_json_is_refused(
    tmp_path: Path, meta: dict[str, object], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        save(tmp_path / "c", [], meta)
    assert list(tmp_path.iterdir()) == []


def test_a_type_without_a_name_in_the_format_is_refused(tmp_path: Path) -> None:
    results = save_on(
        tmp_path / "c", [[], [Shard.whole("z", torch.zeros(2, dtype=torch.complex128))]]
    )
    assert all("rank 1: 'z' is torch.complex128" in str(error) for error in results)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Shard("w", (2,), Box((1,), (2,)), 0, 2, torch.zeros(2)), "lies outside the shape"),
        (lambda: Shard("w", (2,), Box.whole((2,)), 1, 3, torch.zeros(2)), "is no range"),
        (
            lambda: Shard("w", (2,), Box.whole((2,)), 0, 2, torch.zeros(3)),
            "needs a tensor of shape",
        ),
        (lambda: Shard.whole("w", torch.zeros(2, 3).t()), "not contiguous"),
        (lambda: Shard.of_box("w", (4,), Box((0,), (2,)), torch.zeros(3)), "needs that shape"),
        (lambda: Shard.whole("", torch.zeros(2)), "needs a name"),
    ],
)
def test_what_is_no_shard(make: Callable[[], Shard], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_resolve_follows_latest_and_not_the_largest_number(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    for step in (100, 300, 200):  # taken up again at 100
        save(folder / f"step-{step:08d}", [], {"step": step})
    latest = folder / "step-00000200"
    assert resolve(tmp_path / "run") == resolve(folder) == resolve(latest) == latest
    assert resolve(folder / "step-00000100").name == "step-00000100"
    assert previous(folder / "step-00000300") == latest
    assert previous(folder / "step-00000100") is None
    (folder / "latest").write_text("step-00000777\n")
    assert resolve(folder).name == "step-00000300"
    (folder / "latest").write_text("../../elsewhere\n")
    assert resolve(folder).name == "step-00000300"


@pytest.mark.parametrize("name", ["", "nothing"])
def test_resolve_says_when_there_is_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        CheckpointError, match="holds no checkpoint" if not name else "is no folder"
    ):
        resolve(tmp_path / name)


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        save(tmp_path / "step-1", [Shard.whole("w", torch.tensor(value))], {"value": value})
    assert Checkpoint.open(tmp_path).tensor("w").item() == 2.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1"]


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"x" * 100_000, b"..", b"step-1\0"])
def test_a_damaged_latest_names_nothing_and_the_newest_is_found(
    text: bytes, tmp_path: Path
) -> None:
    for step in (1, 2):
        save(tmp_path / f"step-{step}", [Shard.whole("a", torch.ones(2))], {"step": step})
    (tmp_path / "latest").write_bytes(text)
    assert resolve(tmp_path) == tmp_path / "step-2"


def test_adapters_and_a_whole_model_are_told_apart(tmp_path: Path) -> None:
    low, whole = "a.lora_A.weight", "a.weight"
    cases = (
        (low, {whole: (2,)}, "holds adapters alone, .* give the .adapter. section"),
        (whole, {whole: (2,), low: (2,)}, "holds a whole model, .* leave .adapter. out"),
    )
    for number, (saved, wanted, message) in enumerate(cases):
        folder = tmp_path / str(number)
        save(folder, [Shard.whole(saved, torch.zeros(2))], {})
        with pytest.raises(CheckpointError, match=message):
            Checkpoint.open(folder).check(wanted)

"""Files of two saves, indices that were edited: refused in a sentence, or nothing has changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.checkpoint import Checkpoint
from plait.checkpoint.folder import INDEX
from plait.comm import World
from plait.datasets import Loader
from plait.engine.build import Options, build
from plait.engine.engine import Engine
from plait.errors import CheckpointError, PlaitError
from plait.models import losses, make
from tests.helpers.threaded import threaded
from tests.unit.checkpoint.edits import edit_header, edit_index, random_edit, strip_tokens

FILE = "rank-00001-of-00002.safetensors"
SAMPLES = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
DATA = [(sample, torch.tensor(at % 3)) for at, sample in enumerate(SAMPLES)]


def engine_on(world: World, plan: str) -> Engine:
    with torch.device("meta"):
        model = make("mlp", in_features=4, hidden_size=8, num_hidden_layers=1, out_features=3)

    def optimizer(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-2)

    options = Options(seed=1)
    loss = losses.cross_entropy
    return build(model, plan, loss=loss, optimizer=optimizer, options=options, world=world)


def train(world: World, folder: Path) -> None:
    """Two steps on two ranks, saved after each."""
    engine = engine_on(world, "dp2:zero1")
    loader = Loader(DATA, 4, dp_size=2, dp_rank=world.rank)
    for step in (1, 2):
        engine.step(next(loader), trace=False)
        engine.save(folder / f"step-{step:08d}", loader=loader.state_dict())


def load(checkpoint: Path) -> tuple[Any, ...]:
    """Everything that a run on one rank takes from a checkpoint."""

    def on(world: World) -> tuple[Any, ...]:
        engine = engine_on(world, "dp1")
        loader = Loader(DATA, 4)
        meta = engine.load(checkpoint)
        loader.load_state_dict(meta.get("loader", {}), meta["step"])
        states = [
            {key: torch.as_tensor(value) for key, value in state.items()}
            for state in engine.update.optimizer.state.values()
        ]
        return engine.step_index, loader.state_dict(), dict(engine.model.state_dict()), states

    found: tuple[Any, ...] = threaded(1, on, plan="dp1")[0]
    return found


def equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        same_keys = first.keys() == second.keys()
        return same_keys and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(equal, first, second))
    return bool(first == second)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of steps 1 and 2; not to be changed."""
    folder = tmp_path_factory.mktemp("saved")
    threaded(2, train, folder, plan="dp2:zero1")
    return folder


@pytest.fixture
def two(saved: Path, tmp_path: Path) -> Path:
    """A copy of them."""
    return Path(shutil.copytree(saved, tmp_path / "two"))


def test_the_index_and_every_file_carry_one_token(saved: Path) -> None:
    tokens = set()
    for step in (1, 2):
        checkpoint = saved / f"step-{step:08d}"
        index = json.loads((checkpoint / INDEX).read_text())
        heads = [(checkpoint / file["name"]).read_bytes() for file in index["files"]]
        assert len(heads) == 2
        assert all(f'"save":"{index["save"]}"'.encode() in head for head in heads)
        tokens.add(index["save"])
    assert len(tokens) == 2


@pytest.mark.parametrize("name", [FILE, INDEX])
def test_a_file_of_another_save_is_refused(two: Path, name: str) -> None:
    shutil.copy(two / "step-00000001" / name, two / "step-00000002" / name)
    with pytest.raises(
        CheckpointError, match=r"files of two saves are mixed; .*step-00000001|named for step 2"
    ):
        load(two / "step-00000002")


def test_a_file_of_another_save_at_one_step_is_refused(two: Path, tmp_path: Path) -> None:
    threaded(2, train, tmp_path / "again", plan="dp2:zero1")
    source = tmp_path / "again" / "step-00000002"
    for name in (FILE, INDEX):
        copy = Path(shutil.copytree(two, tmp_path / f"two-{name}"))
        shutil.copy(source / name, copy / "step-00000002" / name)
        with pytest.raises(CheckpointError, match="files of two saves are mixed"):
            load(copy / "step-00000002")


def test_a_checkpoint_from_before_the_token_loads_with_one_line(
    two: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = load(two / "step-00000002")
    strip_tokens(two / "step-00000002")
    assert capfd.readouterr().err == ""
    assert equal(load(two / "step-00000002"), expected)
    (line,) = capfd.readouterr().err.splitlines()
    assert "from before saves had a token" in line


@pytest.mark.parametrize("name", [FILE, INDEX])
def test_a_mixture_with_and_without_tokens_is_refused(two: Path, tmp_path: Path, name: str) -> None:
    old = Path(shutil.copytree(two, tmp_path / "old"))
    strip_tokens(old / "step-00000002")
    for first, second in ((old, two), (two, old)):
        copy = Path(shutil.copytree(first, tmp_path / f"{first.name}-mixed"))
        shutil.copy(second / "step-00000002" / name, copy / "step-00000002" / name)
        if name == FILE:  # of the size that the index says, as in a mixture by chance
            size = (second / "step-00000002" / name).stat().st_size

            def resize(index: dict[str, Any], size: int = size) -> None:
                index["files"][1]["size_bytes"] = size

            edit_index(copy / "step-00000002", resize)
        with pytest.raises(CheckpointError, match="files of two saves are mixed"):
            load(copy / "step-00000002")


@pytest.mark.parametrize("has_token", [True, False])
def test_edited_indices_are_refused_or_change_nothing(
    saved: Path, tmp_path: Path, has_token: bool
) -> None:
    source = tmp_path / "step-00000002"
    shutil.copytree(saved / "step-00000002", source)
    if not has_token:
        strip_tokens(source)
    expected = load(source)
    index = (source / INDEX).read_bytes()
    refused = 0
    for seed in range(50):
        (source / INDEX).write_bytes(index)
        edit_index(source, random_edit(seed))
        try:
            assert equal(load(source), expected), f"edit {seed} was believed"
        except PlaitError:
            refused += 1
    assert refused >= 40


def _meta(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda index: index["meta"].update(changes)


def _place(**changes: int) -> Callable[[dict[str, Any]], None]:
    return lambda index: index["meta"]["loader"].update(changes)


def _weight(**changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(index: dict[str, Any]) -> None:
        name = next(name for name in index["tensors"] if name.endswith("weight"))
        index["tensors"][name].update(changes)

    return change


EDITS = {
    "negative step": (_meta(step=-5), "meta.step is -5"),
    "other step": (_meta(step=1), "meta.step is 1 and the folder is named for step 2"),
    "step in words": (_meta(step="2"), "meta.step is '2'"),
    "no step": (lambda index: index["meta"].pop("step"), "says no step"),
    "position beyond the data": (_place(position=10**12), "sample 1000000000000 of epoch"),
    "epoch beyond the steps": (_place(epoch=10**12), "at most 2 epochs"),
    "negative position": (_place(position=-1), "sample -1"),
    "huge shape": (_weight(shape=[10**6, 10**6]), "bytes and its files"),
    "negative shape": (_weight(shape=[-8, 4]), "has the shape"),
    "other shape": (_weight(shape=[4, 8]), "of another model"),
    "other type": (_weight(dtype="int32"), "is torch.int32 in"),
    "unknown type": (_weight(dtype="load"), "has the type 'load'"),
    "no file": (_weight(files=[]), "lies in files"),
    "missing slices": (_weight(files=[0]), "are in no file"),
    "file that is not there": (_weight(files=[0, 7]), r"lies in files \[0, 7\]"),
    "file elsewhere": (lambda index: index["files"][0].update(name="../../x"), "in this folder"),
}


def test_another_model_is_told_in_a_few_names(two: Path) -> None:
    saved = Checkpoint.open(two / "step-00000002")
    wanted = {name: (7, *saved.global_shape(name)) for name in saved.names()}
    with pytest.raises(CheckpointError, match="of another model") as caught:
        saved.check(wanted)
    message = str(caught.value)
    assert message.count("has shape") == 3
    assert "more have other shapes. " in message
    assert message.endswith("the same settings, such as those of --set")


@pytest.mark.parametrize(("change", "message"), EDITS.values(), ids=EDITS)
def test_values_that_no_save_writes_are_named(two: Path, change: Any, message: str) -> None:
    checkpoint = two / "step-00000002"
    strip_tokens(checkpoint)  # else the token says already that the text was changed
    edit_index(checkpoint, change)
    with pytest.raises(PlaitError, match=message):
        load(checkpoint)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("offset", [0, 0], "are in no file|other elements"),  # over another rank's slice
        ("offset", [99, 0], "outside its shape"),
        ("offset", [-1, 0], "lies nowhere"),
        ("stop", 1, "is no range"),
        ("start", 0.5, "lies nowhere"),
        ("shape", [1], "another shape"),
        ("dtype", "int64", "another shape or type"),
        ("name", "nothing", "nothing"),
    ],
)
def test_pieces_that_do_not_fit_are_named(two: Path, key: str, value: Any, message: str) -> None:
    checkpoint = two / "step-00000002"
    strip_tokens(checkpoint)

    def change(metadata: dict[str, Any]) -> None:
        pieces = json.loads(metadata["pieces"])
        piece = next(one for one in pieces if len(one["shape"]) == 2)
        piece[key] = value
        if key == "offset" and value == [0, 0]:
            rows = piece["extent"][0]
            assert rows < piece["shape"][0] or piece["start"] > 0, piece
            piece["stop"] -= piece["start"]
            piece["start"] = 0
        metadata["pieces"] = json.dumps(pieces, separators=(",", ":"))

    edit_header(checkpoint, 1, change)
    with pytest.raises(CheckpointError, match=message):
        load(checkpoint)


def test_pieces_that_were_edited_do_not_fit_the_token(two: Path) -> None:
    checkpoint = two / "step-00000002"

    def change(metadata: dict[str, Any]) -> None:
        metadata["pieces"] = metadata["pieces"].replace('"start":0', '"start":1', 1)

    edit_header(checkpoint, 0, change)
    with pytest.raises(CheckpointError, match="not the one that was saved"):
        Checkpoint.open(checkpoint).tensor(Checkpoint.open(checkpoint).names()[0])

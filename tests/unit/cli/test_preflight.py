"""What a config names and is not there is said before a folder is made or a rank is started."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from plait import launcher
from plait.cli import common, main, train
from plait.config import load
from plait.errors import ModelError
from plait.plan import Plan
from plait.predict.cost import estimate
from plait.run.preflight import check_code

MODULE = """
import torch

def model():
    return torch.nn.Sequential(torch.nn.Linear(8, {size}), torch.nn.Linear({size}, 4))

def data():
    return torch.utils.data.TensorDataset(torch.randn(16, 8), torch.randint(4, (16,)))
"""
CONFIG = """
[model]
python = "{model}"
[data]
python = "{data}"
[train]
steps = 1
global_batch = 8
{train}
[plan]
text = "{plan}"
"""


@pytest.fixture(autouse=True)
def search() -> Iterator[None]:
    """The path and the modules of before, afterwards."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    sys.modules.pop("mine", None)


def write(folder: Path, size: int | None = 6, **keys: str) -> Path:
    """A config, with a module beside it unless it has no size."""
    folder.mkdir(exist_ok=True)
    if size is not None:
        (folder / "mine.py").write_text(MODULE.format(size=size))
    words = {"model": "mine:model", "data": "mine:data", "plan": "dp2", "train": "", **keys}
    config = folder / "tiny.toml"
    config.write_text(CONFIG.format(**words))
    return config


def width(config: Path) -> int:
    """The hidden size of the model that a config names."""
    from plait.run.assemble import make_model, model_keys

    model = make_model(model_keys(load(config)))
    return int(model.get_parameter("0.weight").shape[0])


def test_a_module_beside_the_config_comes_before_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = write(tmp_path / "first", 6)
    second = write(tmp_path / "second", 7)
    bare = write(tmp_path / "bare", None)
    write(tmp_path / "here", 5)
    monkeypatch.chdir(tmp_path / "here")
    assert [width(first), width(second), width(first)] == [6, 7, 6]
    assert estimate(second, "dp1", "h100x1").step_seconds > 0
    sys.path[:] = [folder for folder in sys.path if not folder.startswith(str(tmp_path))]
    assert width(bare) == 5


def test_a_config_that_names_no_module_leaves_the_search_alone(tmp_path: Path) -> None:
    config = tmp_path / "tiny.toml"
    config.write_text('[model]\nname = "mlp"\nin_features = 4\nhidden_size = 4\n')
    with config.open("a") as file:
        file.write("num_hidden_layers = 1\nout_features = 4\n")
    before = list(sys.path)
    load(config)
    assert sys.path == before


MISSING = {
    "module": ({"model": "nowhere:model"}, "there is no module 'nowhere' in "),
    "function": ({"model": "mine:modle"}, "'mine' has no 'modle'; did you mean 'model'?"),
    "data": ({"data": "nowhere:data"}, "there is no module 'nowhere'"),
    "loss": ({"train": 'loss = "nowhere:loss"'}, "train.loss = 'nowhere:loss': there is no module"),
    "optimizer": ({"train": 'optimizer = "mine:sdg"'}, "train.optimizer = 'mine:sdg': 'mine' has"),
}


@pytest.mark.parametrize(("keys", "message"), MISSING.values(), ids=MISSING)
def test_what_is_missing_is_said_before_anything_is_started(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    keys: dict[str, str],
    message: str,
) -> None:
    def never(*args: object, **options: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(train, "launch", never)
    monkeypatch.setattr(launcher, "launch", never)
    monkeypatch.chdir(tmp_path)
    config = write(tmp_path / "configs", **keys)
    for verb in (
        ["train", str(config)],
        ["verify", str(config), "--plan", keys.get("plan", "dp2")],
    ):
        assert main(verb) == 2
        err = capsys.readouterr().err
        assert message in err
        assert " on 2 ranks" not in err
    assert not (tmp_path / "runs").exists()


def test_a_package_that_the_module_imports_is_named(tmp_path: Path) -> None:
    config = write(tmp_path)
    (tmp_path / "mine.py").write_text("import no_such_package\n")
    with pytest.raises(Exception, match="'mine' imports 'no_such_package', which is not installed"):
        check_code(load(config), Plan.parse("dp2"))


def test_a_missing_transformers_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "tiny.toml"
    config.write_text('[model]\nname = "hf"\nconfig = {model_type = "llama", vocab_size = 256}\n')
    monkeypatch.setattr("plait.run.preflight.find_spec", lambda name: None)
    with pytest.raises(Exception, match="needs the package transformers"):
        check_code(load(config), Plan.parse("dp2"))


def test_a_users_model_has_to_take_the_documents_that_are_packed(tmp_path: Path) -> None:
    config = write(tmp_path / "packing", data="mine:data")
    told = config.read_text().replace('"mine:data"', '"mine:data"\npacking = true')
    config.write_text(told)
    with pytest.raises(ModelError, match="Sequential takes no documents and no positions"):
        check_code(load(config), Plan.parse("dp2"))


OWN = """
[model]
name = "llama"
num_hidden_layers = 4
hidden_size = 32
num_attention_heads = 4
intermediate_size = 64
vocab_size = 256
{experts}
[data]
name = "random"
seq_len = 16
[train]
steps = 1
global_batch = 8
[plan]
{key}
"""
EXPERTS = "num_local_experts = 4\nnum_experts_per_tok = 2\nmoe_intermediate_size = 32"


@pytest.mark.parametrize(
    ("plan", "experts", "key", "message"),
    [
        ("tp4:2d", EXPERTS, "", "tp4:2d cuts the tokens or features .* experts run under tp4:1d"),
        ("tp8:3d", EXPERTS, "", "experts run under tp8:1d"),
        ("dp2 ep2", "", "", "ep2: the model has no experts to split"),
        ("dp2:zero3", "", "keep_gathered = 9", "keep_gathered 9 .* give 0 to 4"),
        ("dp2:zero3", "", "keep_gathered = [7]", "has block 7, .* numbers are 0 to 3"),
        ("pp2", "", "counts = [1]", r"plan.counts \[1\] has 1 numbers, .* has 2 stages"),
        ("pp2", "", "splits = ['a']", "plan.splits: no layer is called 'a'; layers: embed, blocks"),
        ("pp2", "", "splits = ['a', 'b']", "makes 3 stages, and plan 'pp2' has 2; name the first"),
        ("pp2", "", "counts = [2, 2]\nsplits = ['blocks.2']", "leave one of them out"),
    ],
)
@pytest.mark.parametrize("verb", ["train", "compare"])
def test_what_the_model_does_not_have_is_refused_before_a_rank_starts(
    verb: str,
    plan: str,
    experts: str,
    key: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(launcher, "launch", _no_rank)
    monkeypatch.setattr("plait.cli.compare.launched", _no_rank)
    monkeypatch.setattr(train, "kept_alive", _no_rank)
    config = tmp_path / "own.toml"
    config.write_text(OWN.format(experts=experts, key=key))
    words = ["--plan", plan] if verb == "train" else ["--plans", "dp1", plan]
    assert main([verb, str(config), *words]) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("plan", "key"),
    [
        ("pp2:interleaved,v2", "counts = [1, 1, 1, 1]"),
        ("pp2", "splits = ['blocks.2']"),
        ("dp2:zero3", "keep_gathered = [0, 3]"),
        ("dp2", "counts = [1]"),
    ],
)
def test_what_the_model_has_is_taken(plan: str, key: str, tmp_path: Path) -> None:
    config = tmp_path / "own.toml"
    config.write_text(OWN.format(experts="", key=key))
    common.plan_of(load(config), plan)


def _no_rank(*_: object) -> None:
    raise AssertionError("a rank would start")

"""Weights of other frameworks' checkpoints, bit for bit; nothing else is unpickled."""

from __future__ import annotations

import enum
import json
import os
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from plait.checkpoint.elsewhere import read_elsewhere, write_dcp
from plait.cli import main
from plait.errors import CheckpointError

RANKS = 3


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "embed.weight": torch.randn(7, 5, generator=generator),
        "norm.weight": torch.randn(5, generator=generator),
        "scale": torch.randn((), generator=generator),
        "head.weight": torch.randn(4, 5, generator=generator),
    }


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


def write_zero3(folder: Path, values: dict[str, Tensor], strange: Any) -> None:
    """Files as DeepSpeed writes them: two groups, each parameter in equal parts on all ranks."""
    names = list(values)
    groups = [names[:1], names[1:]]
    folder.mkdir()
    for rank in range(RANKS):
        flats = []
        for group in groups:
            parts = []
            for name in group:
                flat = values[name].reshape(-1)
                size = -(-flat.numel() // RANKS)
                padded = torch.cat([flat, torch.zeros(size * RANKS - flat.numel())])
                parts.append(padded[rank * size : (rank + 1) * size])
            flats.append(torch.cat(parts))
        shapes = [OrderedDict((name, values[name].shape) for name in group) for group in groups]
        buffer = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
        model = {
            "module": {"rotary": buffer},
            "param_shapes": shapes,
            "buffer_names": ["rotary"],
            "shared_params": {"tied.weight": "embed.weight"},
            "ds_version": "0.17.0",
        }
        torch.save(model, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        state = {"zero_stage": strange, "partition_count": RANKS, "fp32_flat_groups": flats}
        file = folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": state, "ds_config": {"a": 1}}, file)


def test_a_distributed_checkpoint_goes_in_and_out_bit_for_bit(tmp_path: Path) -> None:
    wanted = {**weights(), "half": torch.randn(3).bfloat16()}
    write_dcp(wanted, tmp_path / "dcp")
    kind, found = read_elsewhere(tmp_path / "dcp")
    assert kind == "dcp"
    same(found, wanted)
    write_dcp({f"model.{name}": value for name, value in wanted.items()} | {"step": torch.ones(1)},
              tmp_path / "state")  # fmt: skip
    same(read_elsewhere(tmp_path / "state")[1], wanted)


def test_a_librarys_names_that_begin_like_a_key_stay(tmp_path: Path) -> None:
    wanted = {f"model.{name}": value for name, value in weights().items()}
    wanted["lm_head.weight"] = torch.ones(3, 5)
    torch.save(wanted, tmp_path / "model.pt")
    write_dcp(wanted, tmp_path / "dcp")
    torch.save({f"module.{name}": value for name, value in wanted.items()}, tmp_path / "ddp.pt")
    for name in ("model.pt", "dcp", "ddp.pt"):
        same(read_elsewhere(tmp_path / name)[1], wanted)
    nested: Any = {"model": weights(), "optimizer": {"state": torch.ones(2)}}
    write_dcp(nested, tmp_path / "nested")
    same(read_elsewhere(tmp_path / "nested")[1], weights())
    torch.save(nested, tmp_path / "nested.pt")
    same(read_elsewhere(tmp_path / "nested.pt")[1], weights())


def test_shards_of_zero_3_become_whole_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("deepspeed")

    class ZeroStageEnum(enum.Enum):
        weights = 3

    ZeroStageEnum.__module__ = "deepspeed"
    ZeroStageEnum.__qualname__ = "ZeroStageEnum"
    module.ZeroStageEnum = ZeroStageEnum  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed", module)
    write_zero3(tmp_path / "global_step5", weights(), ZeroStageEnum.weights)
    monkeypatch.delitem(sys.modules, "deepspeed")
    (tmp_path / "latest").write_text("global_step5")
    kind, found = read_elsewhere(tmp_path)
    assert kind == "deepspeed"
    more = {"rotary": torch.tensor([1.0, 2.0]), "tied.weight": weights()["embed.weight"]}
    same(found, {**weights(), **more})


def test_a_file_of_torch_is_imported_as_safetensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"epoch": 3, "state_dict": weights()}, tmp_path / "model.pt")
    words = ["import", str(tmp_path / "model.pt"), "--out", str(tmp_path / "out"), "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == len(weights())
    same(load_file(tmp_path / "out" / "model.safetensors"), weights())
    assert main(["import", str(tmp_path / "model.pt")]) == 2


class Evil:
    def __reduce__(self) -> Any:
        return (os.mkdir, (os.environ["EVIL"],))


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    monkeypatch.setenv("EVIL", str(tmp_path / "evil"))
    torch.save({"weight": Evil()}, tmp_path / "model.pt")
    write_zero3(tmp_path / "zero", weights(), Evil())
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Evil()))
    for name in ("model.pt", "zero", "dcp"):
        with pytest.raises(CheckpointError, match="mkdir"):
            read_elsewhere(tmp_path / name)
    assert not (tmp_path / "evil").exists()
    (tmp_path / "empty").mkdir()
    for name in ("empty", "missing.pt"):
        with pytest.raises(CheckpointError):
            read_elsewhere(tmp_path / name)
    (tmp_path / "cut.pt").write_bytes((tmp_path / "model.pt").read_bytes()[:200])
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_elsewhere(tmp_path / "cut.pt")


def calls(*steps: tuple[str, str]) -> bytes:
    """A pickle that imports a function and calls it with one text; a further step calls what that
    answered.
    """
    (name, told), *rest = steps
    module, _, function = name.rpartition(".")
    code = f"c{module}\n{function}\n(V{told}\ntR"
    code += "".join(f"(V{text}\ntR" for _, text in rest)
    return f"{code}.".encode()


@pytest.mark.parametrize(
    "steps",
    [
        [("os.mkdir", "EVIL")],
        [("torch._utils._import_dotted_name", "os.mkdir"), ("", "EVIL")],
        [("torch.storage._load_from_bytes", "x")],
        [("torch.distributed.checkpoint.filesystem.FileSystemWriter", "EVIL")],
        [("torch.distributed.checkpoint.filesystem.os.mkdir", "EVIL")],
        [("builtins.eval", "__import__('os').mkdir('EVIL')")],
    ],
)
@pytest.mark.parametrize("kind", ["dcp", "zero", "torch"])
def test_an_imported_checkpoint_with_code_is_one_message(
    steps: list[tuple[str, str]],
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    code = calls(*steps)
    source = tmp_path / "source"
    source.mkdir()
    if kind == "dcp":
        (source / ".metadata").write_bytes(code)
    elif kind == "torch":
        source = source / "model.pt"
        with_code(source, code)
    else:
        write_zero3(source / "x", weights(), 3)
        for file in (source / "x").glob("*_optim_states.pt"):
            with_code(file, code)
        source = source / "x"
    assert main(["import", str(source), "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert "Traceback" not in told
    assert len(told.strip().splitlines()) <= 3
    assert not (tmp_path / "EVIL").exists()
    assert not (tmp_path / "out").exists()


def with_code(path: Path, code: bytes) -> None:
    """A file of `torch.save` whose pickle is this code."""
    torch.save({"weight": torch.ones(1)}, path)
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, code if name.endswith("data.pkl") else data)

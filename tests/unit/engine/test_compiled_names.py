"""The files of a compiled model have the names that the model had before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import plait

safetensors = pytest.importorskip("safetensors.torch")


@pytest.mark.quick
@pytest.mark.parametrize("whole", [True, False], ids=["the model", "a layer"])
def test_the_files_of_a_compiled_model_have_its_own_names(whole: bool, tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    names = set(plain.state_dict())
    model: Any = torch.compile(plain, backend="eager")
    if not whole:
        layer: Any = torch.compile(plain[0], backend="eager")
        model = nn.Sequential(layer, plain[1])
    engine = plait.build(model, "dp1", loss=F.mse_loss, optimizer=torch.optim.SGD)
    engine.save_pretrained(tmp_path)
    engine.world.close()
    assert safetensors.load_file(tmp_path / "model.safetensors").keys() == names

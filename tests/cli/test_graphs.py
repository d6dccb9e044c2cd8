"""`train.cuda_graphs` where there is no GPU: one sentence, and exit 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.accelerator.on_device import is_there
from tests.cli.command import plait

CONFIG = """
[model]
name = "mlp"
in_features = 64
hidden_size = 16
num_hidden_layers = 1
out_features = 10
[data]
name = "digits"
[train]
steps = 1
global_batch = 8
cuda_graphs = true
"""


@pytest.mark.skipif(is_there(), reason="there is a GPU, which runs it")
def test_a_machine_without_a_gpu_refuses_the_key(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(CONFIG)
    done = plait("train", "config.toml", cwd=tmp_path)
    assert done.code == 2
    assert "train.cuda_graphs records the kernels of an NVIDIA GPU" in done.err
    assert not list(tmp_path.glob("run*"))

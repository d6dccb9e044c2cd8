"""Our reader of ZeRO-3 shards beside DeepSpeed's `zero_to_fp32`, on files that DeepSpeed wrote."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from plait.checkpoint.elsewhere import read_elsewhere

RANKS = 2
LIMIT_SECONDS = 300  # against hanging, not a measurement

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]


def test_weights_are_those_of_zero_to_fp32(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    script = Path(__file__).parent / "deepspeed_script.py"
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words += [f"--nproc-per-node={RANKS}", str(script), str(tmp_path)]
    done = subprocess.run(
        words,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=LIMIT_SECONDS,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    wanted = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    kind, found = read_elsewhere(tmp_path)
    assert kind == "deepspeed"
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name
    start = torch.ones(1)
    assert not torch.equal(found["scale"], start)  # it was trained

"""A run loads torch once, for all of its processes, and nothing of it that is not needed."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

CONFIG = """
[model]
name = "gpt"
hidden_size = 16
num_hidden_layers = 1
num_attention_heads = 2
intermediate_size = 32
vocab_size = 256
[data]
name = "stdlib"
seq_len = 8
[train]
steps = 1
global_batch = 2
[plan]
text = "dp2:zero1"
"""
COMPILER = ("torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes")
SCRIPT = """
import sys
from plait.launcher import lean
import torch

marked = torch._disable_dynamo
param = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([param], lr=0.5)
with torch.device("meta"):
    torch.empty(3).add(1)
assert "torch._dynamo" not in sys.modules
assert torch.optim.Optimizer.add_param_group.__wrapped__.__dynamo_disable
compiled = torch.compile(lambda x: x * 2 + 1, backend="eager")
assert compiled(torch.tensor(3.0)) == 7
assert torch._disable_dynamo is not marked
assert torch._disable_dynamo.__module__ == "torch._compile"
assert not hasattr(torch.optim.Optimizer.add_param_group.__wrapped__, "__dynamo_disable")
optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
param.grad = torch.ones(2)
optimizer.step()
assert param.tolist() == [0.5, 0.5]
"""


def test_torch_is_loaded_once_and_its_compiler_not_at_all(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(CONFIG)
    command = ["-m", "plait", "train", str(config), "--out", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    loaded = Counter(re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.MULTILINE))
    assert loaded["plait.cli.common"] == 1
    assert loaded["torch"] == 1
    assert {name: loaded[name] for name in COMPILER} == dict.fromkeys(COMPILER, 0)


def test_torch_is_as_it_came_once_somebody_compiles() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]

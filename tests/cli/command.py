"""`plait` as a process, on a model that is small enough for a step to take milliseconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG = """
[model]
name = "gpt"
num_hidden_layers = 2
hidden_size = 16
num_attention_heads = 2
intermediate_size = 32
vocab_size = 64

[data]
name = "random"
seq_len = 8

[train]
steps = 3
global_batch = 8
lr = 1e-2

[plan]
text = "dp2:zero1"
"""

LIMIT_SECONDS = 180  # against hanging, not a measurement


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """The one object on stdout."""
        assert self.out.count("\n") == 1, self.out
        return json.loads(self.out)


def plait(
    *words: str | Path, cwd: Path, python: tuple[str, ...] = (sys.executable, "-m", "plait")
) -> Done:
    """Run `plait words` in a folder and wait for its end."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    done = subprocess.run(
        [*python, *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_SECONDS,
        cwd=cwd,
        env=variables,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def write_config(folder: Path, text: str = CONFIG) -> Path:
    """A config file in the folder."""
    path = folder / "tiny.toml"
    path.write_text(text)
    return path

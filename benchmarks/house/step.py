"""One training step as a reader with a debugger walks through it: files, functions, classes, depth.

Python's own trace function counts in rank 0, the ranks being processes of this machine.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import plait
from plait.models.gpt import GPT
from plait.models.losses import cross_entropy

PACKAGE = str(Path(plait.__file__).parent)
MODELS = str(Path(PACKAGE) / "models")


@dataclass
class Walk:
    """What one rank enters between two moments."""

    files: set[str] = field(default_factory=set)
    functions: set[tuple[str, str]] = field(default_factory=set)
    classes: set[str] = field(default_factory=set)
    frames_before_model: int | None = None

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Python's trace function: called once for each call of a Python function."""
        if event != "call":
            return
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE) or code.co_name.startswith("<"):
            return
        self.files.add(code.co_filename)
        self.functions.add((code.co_filename, code.co_qualname))
        parts = code.co_qualname.split(".")
        if len(parts) > 1 and parts[-2] != "<locals>":
            self.classes.add(f"{code.co_filename}:{parts[-2]}")
        models_own = code.co_name == "forward" and code.co_filename.startswith(MODELS)
        if models_own and self.frames_before_model is None:
            self.frames_before_model = _frames_above(frame)


def _frames_above(frame: FrameType) -> int:
    count = 0
    above = frame.f_back
    while above is not None:
        name = above.f_code.co_filename
        count += name.startswith(PACKAGE) and "/launcher/" not in name
        above = above.f_back
    return count


def _rank(plan: str) -> Walk:
    torch.manual_seed(0)
    model = GPT(
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        vocab_size=256,
        max_position_embeddings=32,
    )
    engine = plait.build(
        model,
        plan,
        loss=cross_entropy,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
    )
    tokens = torch.randint(0, 256, (4, 17), generator=torch.Generator().manual_seed(0))
    batch = (tokens[:, :-1], tokens[:, 1:])
    engine.step(batch)  # the first step allocates
    walk = Walk()
    if engine.world.rank == 0:
        sys.settrace(walk)
    try:
        engine.step(batch)
    finally:
        sys.settrace(None)
    engine.world.close()
    return walk


def walk_step(plan: str) -> Walk:
    """The walk of rank 0 through the second step of a two-layer GPT."""
    ranks = plait.Plan.parse(plan).world_size
    return plait.launch(_rank, plan, nproc=ranks)[0]

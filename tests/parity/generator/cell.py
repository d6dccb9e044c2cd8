"""A cell: one plan, one small model, one batch, as plain data that prints as one line of JSON and
is made from it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from plait.engine.stages.cut import Cutting
from plait.plan import Plan
from tests.parity.families import Family

STEPS = 2  # the second step sees what the first update did to every copy


@dataclass(frozen=True)
class Cell:
    """`seq_len` 0: the model takes vectors or images. `kind` is a family, or `moe` for llama with
    experts.
    """

    plan: str
    kind: str
    keys: dict[str, Any] = field(default_factory=dict)
    num_samples: int = 12
    seq_len: int = 0
    clip: float | None = None
    frozen: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        return Plan.parse(self.plan).world_size

    @property
    def family(self) -> Family:
        if self.kind in ("gpt", "llama", "moe"):
            name = "gpt" if self.kind == "gpt" else "llama"
            classes = int(self.keys["vocab_size"])
            sample = (self.seq_len,)
            noisy = self.keys.get("topk_method") == "noisy"
            pooled = self.kind == "moe" and not noisy
            return Family(
                name,
                self.keys,
                sample,
                classes,
                tokens=True,
                by_slice=noisy or bool(self.keys.get("dropout")),
                by_micro_batch=pooled,
                frozen=self.frozen,
                num_steps=STEPS,
            )
        if self.kind == "resnet":
            shape = (int(self.keys["in_channels"]), 16, 16)
            classes = int(self.keys["num_classes"])
        else:
            shape = (int(self.keys["in_features"]),)
            classes = int(self.keys["out_features"])
        return Family(self.kind, self.keys, shape, classes, frozen=self.frozen, num_steps=STEPS)

    @property
    def options(self) -> dict[str, Any]:
        given: dict[str, Any] = {} if self.clip is None else {"clip_grad_norm": self.clip}
        if self.kind == "odd":
            given["cutting"] = Cutting(example=torch.zeros(1, self.keys["in_features"]))
        return given

    def __str__(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def parse(text: str) -> Cell:
        given = json.loads(text)
        return Cell(**{**given, "frozen": tuple(given["frozen"])})

"""Weights in codes: any part of a weight has the numbers that the whole one has there."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from plait.errors import ModelError
from plait.mesh.boxes import Box
from plait.models.adapter_parts import AdapterSettings
from plait.models.adapters import adapt, coded_weights
from plait.models.coded import CodedWeight


@dataclass(frozen=True)
class At:
    shape: tuple[int, ...]
    view: tuple[int, ...]
    box: Box

    def cut(self, whole: Tensor) -> Tensor:
        part = whole.reshape(self.view)[self.box.within(Box.whole(self.view))]
        split = 1 if self.view[0] == self.shape[0] else 2
        return part.flatten(0, split - 1).flatten(1).contiguous()


PLACES = {
    "whole": At((6, 200), (6, 200), Box((0, 0), (6, 200))),
    "rows": At((6, 200), (6, 200), Box((2, 0), (3, 200))),
    "blocks": At((6, 256), (6, 256), Box((0, 128), (6, 128))),
    "through blocks": At((6, 200), (6, 200), Box((3, 50), (3, 100))),
    "fused rows": At((6, 96), (3, 2, 96), Box((0, 1, 48), (3, 1, 48))),
    "fused columns": At((4, 300), (4, 3, 100), Box((0, 0, 50), (4, 3, 50))),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_part_has_the_numbers_of_the_whole(kind: str, place: str) -> None:
    pytest.importorskip("bitsandbytes", reason="a base in 8 or 4 bits needs bitsandbytes")
    at = PLACES[place]
    weight = torch.randn(at.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    all_of_it = decoded(CodedWeight.of(kind, at.shape, None), weight, weight)
    mine = at.cut(weight)
    layout = CodedWeight.of(kind, at.shape, at)
    found = decoded(layout, weight, mine)
    assert torch.equal(found, at.cut(all_of_it))
    assert 0 < (found - mine).abs().max() < (0.5 if kind == "nf4" else 0.05)
    codes, scales = apart(layout, layout.encode(weight))
    each = layout.code_bytes
    for first, stop in ((0, 1), (1, layout.num_blocks), (2, 4)):
        held = codes[first * each : stop * each]
        part = layout.part(held, scales[first:stop], first, weight.dtype)
        assert torch.equal(part, found.flatten()[layout.start_of(first) : layout.start_of(stop)])


def decoded(layout: CodedWeight, whole: Tensor, mine: Tensor) -> Tensor:
    out = torch.empty_like(mine)
    layout.decode(*apart(layout, layout.encode(whole)), out)
    return out


def apart(layout: CodedWeight, coded: Tensor) -> tuple[Tensor, Tensor]:
    codes = layout.num_blocks * layout.code_bytes
    return coded[:codes], coded[codes:].view(torch.float32)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 8)
        self.inner = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.embedding.weight
        self.head = nn.Linear(8, 8)


def test_outputs_and_tied_weights_stay_as_they_are() -> None:
    pytest.importorskip("bitsandbytes", reason="a base in 8 or 4 bits needs bitsandbytes")
    model = adapt(Tied(), AdapterSettings(rank=2, targets=("inner",), base="nf4"))
    assert coded_weights(model) == {"inner.weight": "nf4"}
    assert coded_weights(adapt(Tied(), AdapterSettings(rank=2))) == {}


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"adapter.base = 'nf'.*nf4"):
        adapt(Tied(), AdapterSettings(base="nf"))
    with pytest.raises(ModelError, match="goes with kind = 'lora'"):
        adapt(Tied(), AdapterSettings("dora", base="nf4"))

    def missing(name: str) -> None:
        raise ImportError(f"no {name}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ModelError, match=r"pip install 'plait\[quantised\]'"):
        adapt(Tied(), AdapterSettings(base="nf4"))

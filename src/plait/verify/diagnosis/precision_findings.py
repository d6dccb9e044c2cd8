"""Findings about numbers that have passed through a lower precision than that of the run."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.errors import some_of
from plait.verify.diagnosis.finding import Finding
from plait.verify.diagnosis.view import View
from plait.verify.record.compare import largest, relative_error
from plait.verify.record.observation import Gradients

LOWER = {torch.bfloat16: "bf16", torch.float16: "float16", torch.float32: "float32"}
FEWEST = 8  # elements of a tensor that are no round numbers by chance
UNITS = 4.0  # in the last place: errors of one rounding, added over a few ranks


def rounded(mine: Gradients, truth: Gradients, names: tuple[str, ...], what: str) -> list[Finding]:
    """Whether the wrong ones of some tensors are the right ones, rounded."""
    pairs = [
        (name, value, right)
        for name in names
        if (value := mine.get(name)) is not None and (right := truth.get(name)) is not None
        if value.dtype == torch.float64 and value.shape == right.shape and value.numel() >= FEWEST
    ]
    if not pairs:
        return []
    scale = largest(truth)
    worst = max(relative_error(value, right, scale) for _, value, right in pairs)
    for dtype, word in LOWER.items():
        unit = torch.finfo(dtype).eps
        if worst > UNITS * unit:
            continue
        shown = some_of([name for name, _, _ in pairs])
        if all(_is_rounded(value, dtype) for _, value, _ in pairs):
            text = f"{what} of {shown} are rounded to {word}"
            return [Finding("precision", "precision", text, 0.96, names)]
        if what == "gradients" and worst > unit / 64:
            text = f"{what} of {shown} differ by as much as roundings to {word} do: {worst:.1e}"
            return [Finding("precision", "precision", text, 0.7, names)]
    return []


def rounded_gradients(view: View) -> list[Finding]:
    """Gradients that have passed through a lower precision."""
    return rounded(view.mine.grads, view.truth.grads, view.wrong, "gradients")


def _is_rounded(value: Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(value.to(dtype).to(value.dtype), value)

"""The grouped product of a rank's experts: one for all, or for each layer the fastest on its rows.

A choice by the clock may differ the next time, and the methods differ in the last bits. So it is
not the default. Without it `models.grouped.default_method` is the rule, the same on every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from plait.errors import PlanError, nearest
from plait.models.experts import MixtureOfExperts
from plait.models.gated import measure
from plait.models.grouped import METHODS, default_method, kernel_takes
from plait.parallel.expert.dispatch import ExpertExchange

RULE = "rule"
MEASURE = "measure"


@dataclass(frozen=True)
class ProductChoice:
    """The method of one layer, and what was measured: seconds forward and backward of the experts,
    by method.
    """

    method: str
    seconds: dict[str, float]

    def as_dict(self) -> dict[str, object]:
        """The record of the choice in `metrics.jsonl`."""
        return {"method": self.method, "seconds": self.seconds}


def fix(layers: Sequence[MixtureOfExperts], how: str) -> None:
    """Give all layers the method that is named; nothing for `rule` and `measure`.

    Raises `PlanError` for a word that is none of them, or the kernel where it does not take the
    weights.
    """
    if how in (RULE, MEASURE):
        return
    if how not in METHODS:
        raise PlanError(
            f"there is no grouped product {how!r}; {nearest(how, (RULE, MEASURE, *METHODS))}"
        )
    for layer in layers:
        if how == "kernel" and not kernel_takes(layer.experts.first):
            shape = tuple(layer.experts.first.shape)
            dtype = layer.experts.first.dtype
            raise PlanError(
                f"torch's grouped product takes no experts of shape {shape} in {dtype}; "
                "use loop or padded"
            )
        layer.experts.multiply_by(how)


def choose(layer: MixtureOfExperts, rows: Sequence[float]) -> ProductChoice:
    """Measure on random rows, and let the layer use the fastest method from now on. Nothing is
    sent.

    `rows` [experts, on all ranks]: how many a forward of one rank has for each. An expert here
    meets those of all ranks that share it.
    """
    exchange = layer.exchange
    weight = layer.experts.first
    if isinstance(exchange, ExpertExchange):
        axis = exchange.groups.whole
        each = weight.shape[0]
        rows = [number * axis.size for number in rows[axis.rank * each :][:each]]
    counts = [round(number) for number in rows]
    if not sum(counts):
        return ProductChoice(layer.experts.method or default_method(weight), {})
    like = torch.randn(len(counts), *weight.shape[1:], dtype=weight.dtype, device=weight.device)
    seconds = measure(like, counts, products=layer.experts.products)
    fastest = min(seconds, key=seconds.__getitem__)
    layer.experts.multiply_by(fastest)
    return ProductChoice(fastest, seconds)

"""Findings about dropout: one device tries the masks that a wrong run may have drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import nn

from plait.verify.diagnosis.finding import Finding
from plait.verify.record.compare import largest, relative_error
from plait.verify.record.observation import Gradients, Record
from plait.verify.reference.batches import Batch
from plait.verify.reference.copied import copied
from plait.verify.reference.one_device import Slice, run_reference
from plait.verify.reference.recipe import Recipe

Slices = Callable[[int, Batch], Sequence[Slice]]
CLOSE = 1e-8
RATES = ("p", "dropout", "dropout_p")  # attributes of modules that drop


def mask_findings(
    parallel: Record, model: nn.Module, batch: Batch, recipe: Recipe, slices: Slices
) -> list[Finding]:
    """The draw of masks that explains the first step's gradients; empty where none does."""
    parts = list(slices(0, batch))
    seed = {(part.rank, part.micro_batch): part.seed for part in parts}
    wrong = {
        ("dp", "every data rank draws the masks of data rank 0"): lambda part: (
            0,
            part.micro_batch,
        ),
        ("mb", "every micro-batch draws the masks of micro-batch 0"): lambda part: (part.rank, 0),
        ("dp+mb", "every slice of the batch draws the masks of the first"): lambda part: (0, 0),
    }
    findings = []
    for (axis, text), other in wrong.items():
        changed = [replace(part, seed=seed[other(part)]) for part in parts]
        seeds = [part.seed for part in changed]
        if seeds != [part.seed for part in parts] and _explains(
            parallel, model, batch, recipe, changed
        ):
            findings.append(Finding("dropout", axis, text, 0.98))
    still = _without_dropout(model)
    if _explains(parallel, still, batch, recipe, parts):
        findings.append(Finding("dropout", "dropout", "nothing is dropped", 0.98))
    return findings[:1]


def _explains(
    parallel: Record, model: nn.Module, batch: Batch, recipe: Recipe, parts: Sequence[Slice]
) -> bool:
    record = run_reference(model, [batch], recipe, lambda *_: parts, by_slice=True)
    return _alike(parallel.steps[0].grads, record.steps[0].grads)


def _alike(mine: Gradients, truth: Gradients) -> bool:
    scale = largest(truth)
    return all(relative_error(mine.get(name), truth[name], scale) <= CLOSE for name in truth)


def _without_dropout(model: nn.Module) -> nn.Module:
    """A copy of the model whose dropout keeps everything; the rest of it trains."""
    still = copied(model)
    for module in still.modules():
        for key, value in vars(module).items():
            if isinstance(value, float) and key in RATES:
                setattr(module, key, 0.0)
    return still

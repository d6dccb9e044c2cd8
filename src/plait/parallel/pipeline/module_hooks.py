"""Backward hooks of modules that a pipeline cuts: no stage has both gradients that they get."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from plait.errors import ModelError
from plait.parallel.pipeline.dataflow import Flow


def check_backward_hooks(model: nn.Module, flow: Flow, stage_of: Sequence[int]) -> None:
    """Raise `ModelError` for a module with a backward hook, inside or right behind which is a cut.

    `stage_of` has the stage of each call of `flow`. The stage of such a module's inputs has no
    gradient of its result. The next stage has none of its inputs.
    """
    leaving = {
        result.call
        for boundary in range(max(stage_of))
        for result in flow.crossing(stage_of, boundary)
        if stage_of[result.call] == boundary
    }
    for name, module in model.named_modules():
        if not name or not module._backward_hooks:
            continue
        inside = [call for call, unit in enumerate(flow.calls) if f"{unit}.".startswith(f"{name}.")]
        if len({stage_of[call] for call in inside}) > 1:
            where = "inside"
        elif leaving.intersection(inside):
            where = "right behind"
        else:
            continue
        raise ModelError(
            f"'{name}' has a backward hook, and this pipeline cuts {where} it, where no stage has "
            "the gradients of both its inputs and its result; put the hook on a module inside "
            "of a stage, move the cut by options=plait.Options(cutting=plait.Cutting(counts=...)), "
            "or take pp out of the plan"
        )

"""Outputs of a model under a plan, brought to the ranks that gave the samples."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.engine.engine import Engine
from plait.errors import PlanError
from plait.values import PyTree


def collected(engine: Engine, batch: PyTree) -> Tensor:
    """Outputs [samples here, ...] for this rank's samples, on every rank of its pipeline and tensor
    axes. Collective.

    Errors: `PlanError` under a context axis, whose ranks have parts of each sequence.
    """
    if engine.plan.cp.size > 1:
        raise PlanError(
            f"plan '{engine.plan}': cp cuts sequences, and no rank has the logits of one; "
            "evaluate the loss alone, or under a plan without cp"
        )
    parts: list[Tensor] = []

    def keep(output: Tensor, targets: PyTree) -> tuple[Tensor, Tensor]:
        parts.append(output.detach().float().cpu())
        return output.new_zeros(()), output.new_ones(())

    engine.measure(batch, [keep])
    of_stages: list[list[Tensor]] = engine.world.axis("pp").gather_objects(parts)
    whole = torch.cat(next(found for found in reversed(of_stages) if found))
    return whole.to(engine.world.device)

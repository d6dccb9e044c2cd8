"""The subject of the diagnosis: one step of both runs, with the numbers that are known of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from plait.verify.diagnosis.finding import Facts
from plait.verify.record.observation import Gradients, Observation, Tensors


@dataclass(frozen=True)
class View:
    """The first wrong step: its observations and those of the step before, the run's numbers, the
    limits of a fit.
    """

    mine: Observation
    truth: Observation
    mine_before: Observation | None
    truth_before: Observation | None
    facts: Facts
    slack: float
    wrong: tuple[str, ...]
    tolerance: float
    before: Tensors | None = None  # the parameters that the step started from

    def only(self, grads: Gradients, names: Iterable[str]) -> Gradients:
        """The gradients of some names."""
        return {name: grads[name] for name in names if name in grads}

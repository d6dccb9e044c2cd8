"""The terms of a plan as a frozen record, which text and rules read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from plait.errors import PlanError
from plait.plan.axes import ContextAxis, DataAxis, PipelineAxis, Precision, Remat, TensorAxis

AXES: Final = {"dp": DataAxis, "tp": TensorAxis, "pp": PipelineAxis, "cp": ContextAxis}


def _check_axis(name: str, value: object, axis: type) -> None:
    if isinstance(value, axis):
        return
    size = value if isinstance(value, int) else 2
    raise PlanError(
        f"{name} = {value!r} is no {axis.__name__}; write Plan.parse('{name}{size}') or "
        f"Plan({name}={axis.__name__}({size}))"
    )


@dataclass(frozen=True)
class Terms:
    """The axes and options of a plan, as its text names them.

    `micro_batches` counts for each step and data rank. 0 asks for the default, and is resolved at
    once. An axis that is none, such as a bare number, is a `PlanError`.
    """

    dp: DataAxis = field(default_factory=DataAxis)
    tp: TensorAxis = field(default_factory=TensorAxis)
    pp: PipelineAxis = field(default_factory=PipelineAxis)
    ep: int = 1
    cp: ContextAxis = field(default_factory=ContextAxis)
    micro_batches: int = 0
    remat: Remat = "none"
    precision: Precision = "float32"
    compile: bool = False

    def __post_init__(self) -> None:
        for name, axis in AXES.items():
            _check_axis(name, getattr(self, name), axis)
        if self.micro_batches == 0:
            object.__setattr__(self, "micro_batches", self.default_micro_batches)

    @property
    def folds_experts(self) -> bool:
        """Whether experts take their ranks from the tensor axis, too: `ep` is dp x cp x tp.

        Each rank then has whole experts. That is for prediction alone.
        """
        ranks = self.dp.size * self.cp.size * self.tp.size
        return self.tp.sequence_parallel and self.tp.size > 1 and self.ep == ranks

    @property
    def default_micro_batches(self) -> int:
        """`mb` of a text without the term: one micro-batch for every pipeline rank."""
        return self.pp.size

"""TRL's supervised fine-tuning under a plan: `SFTTrainer(..., plan="pp2 tp2 dp2:zero1")`.

Data sets, templates, collators and logs stay the library's; the loss is that of the Trainer here.
"""

from __future__ import annotations

from math import lcm
from typing import Any, Final, NoReturn

import trl

from plait.errors import PlanError
from plait.loops.calls import check_routers
from plait.loops.transformers import PlanLoop
from plait.plan import Plan

REFUSED: Final = (
    ("packing", "use plait train with [data] packing = true, whose documents keep apart"),
    ("eval_packing", "use plait train with [data] packing = true, whose documents keep apart"),
    ("padding_free", "rows of one length, or padded on the right, are cut over data ranks"),
    ("activation_offloading", "say remat:full or remat:selective in the plan"),
    ("use_liger_kernel", "its loss needs logits and weights on one rank"),
)


class SFTTrainer(PlanLoop, trl.SFTTrainer):
    """`trl.SFTTrainer` whose model is split, trained and saved under a plan."""

    def __init__(
        self, model: Any, args: Any = None, *others: Any, plan: Plan | str, **named: Any
    ) -> None:
        """Take a plan beside what TRL takes. Recomputation, on by default there, is the plan's.

        Rows are padded to a length that the plan can cut, where `args` does not say one.
        """
        plan = Plan.parse(plan) if isinstance(plan, str) else plan
        args = args or trl.SFTConfig()
        args.activation_checkpointing = False
        args.gradient_checkpointing = False
        for name, cure in REFUSED:
            if getattr(args, name, None):
                raise PlanError(f"SFTConfig({name}=...) does not go with a plan: {cure}")
        if args.loss_type != "nll":
            raise PlanError(
                f"SFTConfig(loss_type='{args.loss_type}') weighs labels by their probability, "
                "which TRL computes on one rank; leave it out"
            )
        if args.pad_to_multiple_of in (None, "auto") and (parts := parts_of_sequence(plan)) > 1:
            args.pad_to_multiple_of = parts
        super().__init__(model, args, *others, plan=plan, **named)
        check_routers(self.model)


def parts_of_sequence(plan: Plan) -> int:
    """The number that a length must divide by: ring attention cuts twice as often as its size."""
    chunks = plan.cp.size * (2 if plan.cp.size > 1 and plan.cp.strategy == "ring" else 1)
    return lcm(chunks, plan.tp.size if plan.tp.sequence_parallel else 1)


def __getattr__(name: str) -> NoReturn:
    """Refuse TRL's other trainers by name."""
    if name.endswith("Trainer"):
        raise PlanError(
            f"{name} compares outputs of several forwards, or generates between steps, and under a "
            "plan only the last stage has outputs; use SFTTrainer, or Fabric for a loop of your own"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Keys of `[plan]` beside the text, in the words of another framework: written, or said to be lost.

They are the parts of a plan that its text does not have. None changes what a rank is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from plait.plan import KeepGathered, Plan, check_kept, gathers_layers, kept_blocks, kept_text
from plait.predict.planner.export import Exported
from plait.values import JsonMapping

NEVER = 'fsdp_reshard_after_forward = "never"'
UNTIL = "torchtitan frees a layer after each backward, so each micro-batch gathers it"


def with_section(out: Exported, plan: Plan, tables: JsonMapping) -> Exported:
    """An exported plan with the other keys of a config's `[plan]`.

    Raises `PlanError` for blocks to keep that the plan or the model does not have.
    """
    section = tables.get("plan", {})
    keep = section.get("keep_gathered")
    if keep:
        num_blocks = tables.get("model", {}).get("num_hidden_layers")
        out = _with_kept(out, plan, tuple(keep) if isinstance(keep, list) else keep, num_blocks)
    lost = _uneven(out, plan, section)
    if section.get("offload_activations"):
        lost.append(f"plan.offload_activations: exported for {out.framework} without it")
    return replace(out, missing=[*out.missing, *lost])


def _with_kept(out: Exported, plan: Plan, keep: KeepGathered, num_blocks: int | None) -> Exported:
    """The blocks that zero3 keeps whole: torchtitan has one word for all of them."""
    check_kept(plan, keep)
    if not gathers_layers(plan):
        return out
    if keep == "auto":
        lost = "plan.keep_gathered 'auto' is chosen by plait for a cluster; write its blocks"
        return replace(out, missing=[*out.missing, lost])
    blocks: Sequence[int] | int = keep if isinstance(keep, int) else keep or ()
    if num_blocks is not None:
        blocks = kept_blocks(plan, keep, num_blocks)
    words = f"plan.keep_gathered ({kept_text(blocks)})"
    if out.framework != "torchtitan":
        lost = f"{words}: {out.framework} has no such choice for each layer; it gathers them anew"
        return replace(out, missing=[*out.missing, lost])
    if num_blocks is None or not isinstance(blocks, tuple) or len(blocks) < num_blocks:
        lost = f"{words}: torchtitan keeps all layers or none; exported with none"
        return replace(out, missing=[*out.missing, lost])
    text = out.text.replace("[parallelism]\n", f"[parallelism]\n{NEVER}\n")
    again = [f"{words}: {UNTIL}"] if plan.micro_batches > 1 else []
    return replace(out, text=text, missing=[*out.missing, *again])


def _uneven(out: Exported, plan: Plan, section: JsonMapping) -> list[str]:
    """Shares of samples and layers, where the plan has so many parts."""
    lost = []
    shares = section.get("shares") or ()
    if len(shares) == plan.dp.size > 1 and len(set(shares)) > 1:
        lost.append(f"plan.shares {list(shares)}: {out.framework} gives each rank as many samples")
    counts = section.get("counts") or ()
    if len(counts) == plan.pp.num_stages > 1 and len(set(counts)) > 1:
        lost.append(f"plan.counts {list(counts)}: exported for {out.framework} with equal stages")
    return lost

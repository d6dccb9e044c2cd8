"""From a cell that fails to the smallest one that still does: take one thing away as long as that
fails too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from plait.plan import Plan
from plait.verify.diagnosis.bisect import PLAIN, REMOVE
from tests.parity.generator.cell import Cell
from tests.parity.generator.draw import valid


def shrink(cell: Cell, fails: Callable[[Cell], bool], *, at_most: int = 60) -> Cell:
    """The smallest failing cell that is found in `at_most` runs. Greedy: the first simpler cell
    that fails is taken.
    """
    tried = 0
    smaller = True
    while smaller:
        smaller = False
        for candidate in simpler(cell):
            tried += 1
            if tried > at_most:
                return cell
            if fails(candidate):
                cell = candidate
                smaller = True
                break
    return cell


def simpler(cell: Cell) -> Iterator[Cell]:
    """Valid cells with one thing less: first without an axis, then plain strategies, then without
    options of the model.
    """
    for plan in _simpler_plans(Plan.parse(cell.plan)):
        candidate = replace(cell, plan=str(plan))
        if valid(candidate):
            yield candidate
    if cell.clip is not None:
        yield replace(cell, clip=None)
    if cell.frozen:
        yield replace(cell, frozen=())
    for key, value in _simpler_keys(cell):
        keys = (
            {k: v for k, v in cell.keys.items() if k != key}
            if value is None
            else {**cell.keys, key: value}
        )
        candidate = replace(cell, keys=keys)
        if valid(candidate):
            yield candidate


def _simpler_plans(plan: Plan) -> Iterator[Plan]:
    for change in (*REMOVE.values(), *PLAIN.values()):
        try:
            candidate = change(plan)
        except ValueError:
            continue
        if candidate != plan:
            yield candidate
    for axis in ("dp", "cp", "tp", "pp"):
        own = getattr(plan, axis)
        if own.size > 2 and own.size % 2 == 0:
            yield replace(plan, **{axis: replace(own, size=own.size // 2)})
    if plan.dp.offload:
        yield replace(plan, dp=replace(plan.dp, offload=False))
    if plan.dp.replicate > 1:
        yield replace(plan, dp=replace(plan.dp, replicate=1))
    if plan.tp.sequence_parallel:
        yield replace(plan, tp=replace(plan.tp, sequence_parallel=False))
    if plan.micro_batches > 1:
        yield replace(plan, micro_batches=plan.micro_batches - 1)


ROUTING = (
    "router_aux_loss_coef", "router_z_loss_coef", "seq_aux", "capacity_factor",
    "router_bias_update_speed",
    "first_k_dense_replace", "norm_topk_prob", "routed_scaling_factor",
)  # fmt: skip


def _simpler_keys(cell: Cell) -> Iterator[tuple[str, Any]]:
    for key in ROUTING:
        if key in cell.keys:
            yield key, None
    if cell.keys.get("tie_word_embeddings"):
        yield "tie_word_embeddings", False
    if cell.keys.get("tied"):
        yield "tied", False
    if cell.keys.get("num_hidden_layers", 1) > 1:
        yield "num_hidden_layers", cell.keys["num_hidden_layers"] - 1

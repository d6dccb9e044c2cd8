"""What this version runs: one table, so that a plan which cannot run is refused before anything is
started.

The grammar knows every strategy from the first day; a word joins `BUILT` on the day that it passes
its proofs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from plait.errors import NotAvailable
from plait.plan import axes
from plait.plan.plan import Plan

BUILT: Final[dict[str, frozenset[str]]] = {
    "dp": frozenset(axes.DATA_STRATEGIES),
    "tp": frozenset({"1d", "2d", "2.5d", "3d"}),
    "pp": frozenset(
        {
            "naive",
            "gpipe",
            "1f1b",
            "interleaved",
            "zb-h1",
            "zb-h2",
            "zbv",
            "v-half",
            "v-min",
            "dualpipev",
            "pipedream",
            "2bw",
        }
    ),
    "ep": frozenset({"ep"}),
    "cp": frozenset({"ring", "ulysses"}),
    "remat": frozenset({"none", "selective", "full"}),
    "precision": frozenset({"float32", "bf16", "float64"}),
    "options": frozenset({"replicate", "offload", "sp", "compile"}),
}

SPLIT_BACKWARD: Final = ("zb-h1", "zb-h2", "zbv", "v-half", "v-min", "dualpipev")

_NAMES: Final = {
    "dp": "data parallel",
    "tp": "tensor parallel",
    "pp": "pipeline parallel",
    "ep": "expert parallel",
    "cp": "context parallel",
    "remat": "recomputation",
    "precision": "precision",
}
_ORDERS: Final = {
    "dp": axes.DATA_STRATEGIES,
    "tp": axes.TENSOR_MODES,
    "pp": axes.PIPELINE_SCHEDULES,
    "cp": axes.CONTEXT_STRATEGIES,
    "remat": axes.REMATS,
    "precision": axes.PRECISIONS,
}


def check_available(plan: Plan) -> None:
    """Raises `NotAvailable` naming every term of the plan that this version does not run yet."""
    missing = [
        f"{term}: {what} is not available yet{instead}" for term, what, instead in _missing(plan)
    ]
    if len(missing) == 1:
        raise NotAvailable(missing[0])
    if missing:
        raise NotAvailable(
            "\n  ".join([f"plan '{plan}' has {len(missing)} terms that do not run yet:", *missing])
        )


def _missing(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """(term, what, what there is instead) of each term that is not built."""
    words = {
        "pp": (plan.pp.size, "1f1b", plan.pp.schedule, str(plan.pp)),
        "tp": (plan.tp.size, "1d", plan.tp.mode, str(plan.tp)),
        "dp": (plan.dp.size, "allreduce", plan.dp.strategy, str(plan.dp)),
        "ep": (plan.ep, "ep", "ep", f"ep{plan.ep}"),
        "cp": (plan.cp.size, "ring", plan.cp.strategy, str(plan.cp)),
        "remat": (1, "none", plan.remat, f"remat:{plan.remat}"),
        "precision": (1, "float32", plan.precision, f"precision:{plan.precision}"),
    }
    for axis, (size, default, word, term) in words.items():
        if word in BUILT[axis] or (size == 1 and word == default):
            continue
        if not BUILT[axis]:
            yield term, _NAMES[axis], ""
        else:
            there = ", ".join(name for name in _ORDERS[axis] if name in BUILT[axis])
            yield term, f"{word} {_NAMES[axis]}", f"; available: {there}"
    options = {
        "replicate": (plan.dp.replicate > 1, str(plan.dp), "replicating shards"),
        "offload": (plan.dp.offload, str(plan.dp), "offloading the optimizer state"),
        "sp": (plan.tp.sequence_parallel and bool(BUILT["tp"]), str(plan.tp), "sequence parallel"),
        "compile": (plan.compile, "compile", "compiling the model"),
    }
    for option, (used, term, what) in options.items():
        if used and option not in BUILT["options"]:
            yield term, what, ""
    if plan.compile and "compile" in BUILT["options"]:
        yield from _not_compiled(plan)


def _not_compiled(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """Where torch.compile has no form: it takes selective recomputation as part of one graph, and
    these blocks are several.
    """
    if plan.remat != "selective":
        return
    several = {
        str(plan.tp): plan.tp.size > 1 or plan.tp.mode != "1d",
        str(plan.cp): plan.cp.size > 1,
        f"ep{plan.ep}": plan.ep > 1,
        str(plan.pp): plan.pp.size > 1 and plan.pp.schedule in SPLIT_BACKWARD,
    }
    for term in (term for term, here in several.items() if here):
        why = f"operations selected inside one graph, and {term} cuts each block into several,"
        yield "compile with remat:selective", why, "; take remat:full, or leave compile out"

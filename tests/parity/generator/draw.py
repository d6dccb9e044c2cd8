"""Draws cells. `choose(options)` takes one of a sequence, whose first is the simplest: a random
generator and a property tester's `draw` are both such a function, so that a table by seed and a
search that shrinks draw from one space.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from plait.engine.composition import check_composition
from plait.errors import PlanError
from plait.parallel.pipeline.schedules import SCHEDULES
from plait.plan import Plan, check_runnable, facts
from plait.plan.fit import check_batch, check_config
from tests.parity.families import ROUTERS
from tests.parity.generator.cell import Cell

Choose = Callable[[Sequence[Any]], Any]
KINDS = ("mlp", "odd", "gpt", "llama", "moe", "resnet")
TOKENS = ("gpt", "llama", "moe")
WORLDS = (1, 2, 2, 3, 4, 4, 4, 4, 4, 6, 8, 8, 8, 8)
DATA = ("allreduce", "ring", "zero1", "zero2", "zero3", "server")
PIPELINES = ("1f1b", *(name for name in SCHEDULES if name != "1f1b"))


def cells(count: int, seed: int = 0, start: int = 0) -> Iterator[Cell]:
    """Cells `start` .. `start + count - 1` of the table of a seed; each depends on seed and number
    alone.
    """
    for number in range(start, start + count):
        source = random.Random(f"{seed}:{number}")
        cell = draw(source.choice)
        while cell is None:
            cell = draw(source.choice)
        yield cell


def draw(choose: Choose) -> Cell | None:
    """A cell, or None where what was drawn breaks a rule of plans (the rules are asked, not
    repeated here).
    """
    kind = choose(KINDS)
    plan = Plan.parse(" ".join([*_axes(choose, kind), "precision:float64"]))
    keys, seq_len = MODELS[kind](choose, plan)
    samples = choose((12, 8, 7, 13, 5)) if kind != "resnet" else choose((6, 5))
    frozen = choose(((), (), (), FROZEN[kind]))
    clip = None if _asynchronous(plan) else choose((None, None, 0.05))
    cell = Cell(str(plan), kind, keys, samples, seq_len, clip, frozen)
    return cell if valid(cell) else None


def valid(cell: Cell) -> bool:
    """Whether the rules that need no rank let the cell pass: those of plans, batches, sizes and
    compositions.
    """
    plan = Plan.parse(cell.plan)
    try:
        check_runnable(plan.check())
        check_batch(plan, cell.num_samples)
        check_config(plan, {**cell.keys, "seq_len": cell.seq_len or None})
        check_composition(plan)
    except PlanError:
        return False
    if plan.pp.size > 1 and _asynchronous(plan) and (cell.kind == "moe" or _is_tied(cell)):
        return False  # refused for the model's sake
    return cell.kind != "moe" or (plan.tp.mode == "1d" and not plan.tp.sequence_parallel)


def _asynchronous(plan: Plan) -> bool:
    return plan.pp.size > 1 and SCHEDULES[plan.pp.schedule].facts.asynchronous


def _is_tied(cell: Cell) -> bool:
    return cell.kind == "odd" or bool(cell.keys.get("tie_word_embeddings"))


def _axes(choose: Choose, kind: str) -> Iterator[str]:
    pp, tp, cp, dp = choose(_factors(choose(WORLDS), kind))
    schedule = choose(PIPELINES) if pp > 1 else ""
    yield f"pp{pp}:{schedule}" if pp > 1 else "pp1"
    least = facts.SCHEDULES[schedule].least_micro_batches(pp) if schedule else 1
    if pp == 1:
        yield f"mb{choose((1, 2, 3))}"
    else:
        yield f"mb{max(least, pp * choose((1, 1, 2))) + choose((0, 0, 1))}"
    yield f"tp{tp}{choose(_modes(tp, kind))}"
    yield f"cp{cp}:{choose(('ring', 'ulysses'))}" if cp > 1 else "cp1"
    yield _data(choose, dp)
    if kind == "moe":
        yield f"ep{choose([n for n in (1, 2, 4, 8) if (dp * cp) % n == 0])}"
    yield f"remat:{choose(('none', 'none', 'none', 'selective', 'full'))}"


def _factors(n: int, kind: str) -> list[tuple[int, int, int, int]]:
    """Every (pp, tp, cp, dp) with this product that the kind of model can take."""
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    found = [
        (pp, tp, cp, n // (pp * tp * cp))
        for pp in divisors
        for tp in (divisors if kind != "resnet" else [1])
        for cp in (divisors if kind in TOKENS else [1])
        if n % (pp * tp * cp) == 0
    ]
    return [axes for axes in found if axes[0] <= 4 and (kind != "odd" or axes[1] < 8)]


def _modes(tp: int, kind: str) -> Sequence[str]:
    """A grid cuts the features between layers, so a model whose layers are replicated in between
    has no form on it.
    """
    if kind in ("odd", "resnet"):
        return ("",)
    grids = {4: (":2d", ":2.5d,depth1"), 8: (":2.5d,depth2", ":3d")}
    return ("", ":1d,sp", *grids.get(tp, ())) if tp > 1 else ("", "", "", "", "", ":2d")


def _data(choose: Choose, dp: int) -> str:
    if dp == 1:
        return "dp1"
    strategy = choose(DATA)
    sharded = strategy.startswith("zero")
    replicate = (
        f",replicate{choose([n for n in (1, 1, 2) if dp % n == 0 and n < dp])}" if sharded else ""
    )
    offload = choose(("", "", ",offload")) if sharded else ""
    return f"dp{dp}:{strategy}{replicate.replace(',replicate1', '')}{offload}"


def _parts(plan: Plan) -> int:
    """What the dims of a layer must be multiples of."""
    return {"1d": plan.tp.size, "3d": plan.tp.q**2}.get(plan.tp.mode, plan.tp.q)


def _layers(choose: Choose, plan: Plan) -> int:
    """Enough for the stages, and not much more."""
    least = max(1, plan.pp.num_stages - 2)
    return least + int(choose((0, 1, 2)))


def _mlp(choose: Choose, plan: Plan) -> tuple[dict[str, Any], int]:
    n = _parts(plan)
    layers = max(_layers(choose, plan), plan.pp.num_stages - 1, 2)
    sizes = {
        "in_features": n * choose((2, 3, 5)),
        "hidden_size": n * choose((6, 8, 7)),
        "out_features": choose((5, 4, 7)),
    }
    if plan.tp.mode != "1d":
        layers += layers % 2
    return {**sizes, "num_hidden_layers": layers}, 0


def _odd(choose: Choose, plan: Plan) -> tuple[dict[str, Any], int]:
    n = _parts(plan)
    return {
        "in_features": n * choose((2, 3)),
        "hidden_size": n * choose((6, 5, 7)),
        "intermediate_size": n * choose((2, 3)),
        "out_features": choose((5, 4)),
        "num_hidden_layers": max(2, _layers(choose, plan)),
        "tied": choose((False, True)),
    }, 0


def _transformer(choose: Choose, plan: Plan) -> tuple[dict[str, Any], int]:
    n = _parts(plan)
    heads = n * (plan.cp.size if plan.cp.strategy == "ulysses" else 1) * choose((1, 2))
    seq_len = (
        2 * plan.cp.size * (plan.tp.size if plan.tp.sequence_parallel else 1) * choose((1, 2, 3))
    )
    return {
        "num_hidden_layers": _layers(choose, plan),
        "hidden_size": heads * choose((4, 6) if heads < 4 else (2, 4)),
        "num_attention_heads": heads,
        "intermediate_size": n * choose((3, 5, 7)),
        "vocab_size": n * choose((11, 12, 13)),
        "max_position_embeddings": seq_len + choose((0, 3)),
        "tie_word_embeddings": not _asynchronous(plan) and choose((False, True)),
        "dropout": choose((0.0, 0.0, 0.0, 0.0, 0.3))
        if plan.cp.size == 1 and not _asynchronous(plan)
        else 0.0,
    }, seq_len


def _llama(choose: Choose, plan: Plan) -> tuple[dict[str, Any], int]:
    keys, seq_len = _transformer(choose, plan)
    heads = keys["num_attention_heads"]
    n = _parts(plan)
    n *= plan.cp.size if plan.cp.strategy == "ulysses" else 1
    groups = [
        groups
        for groups in (heads, heads // 2)
        if groups and heads % groups == 0 and groups % n == 0
    ]
    return {**keys, "num_key_value_heads": choose(groups)}, seq_len


def _moe(choose: Choose, plan: Plan) -> tuple[dict[str, Any], int]:
    keys, seq_len = _llama(choose, plan)
    keys["dropout"] = 0.0
    experts = plan.ep * choose((1, 2)) if plan.ep > 1 else choose((2, 4))
    router = ROUTERS[choose(list(ROUTERS))]
    routing = {"num_local_experts": experts, "num_experts_per_tok": min(2, experts), **router}
    if "n_group" in router and experts % 4:
        routing = {"num_local_experts": experts, "num_experts_per_tok": min(2, experts)}
    shared = choose((0, 1, 2))
    if shared:
        routing |= {
            "moe_intermediate_size": _parts(plan) * choose((2, 3)),
            "num_shared_experts": shared,
        }
    if keys["num_hidden_layers"] > 1:
        routing["first_k_dense_replace"] = choose((0, 1))
    return {**keys, **routing}, seq_len


def _resnet(choose: Choose, plan: Plan) -> tuple[dict[str, Any], int]:
    return {
        "depth": 18,
        "num_classes": choose((7, 5)),
        "in_channels": choose((2, 1)),
        "width": choose((2, 4)),
    }, 0


MODELS = {
    "mlp": _mlp,
    "odd": _odd,
    "gpt": _transformer,
    "llama": _llama,
    "moe": _moe,
    "resnet": _resnet,
}
FROZEN = {
    "mlp": ("blocks.0.*.*",),
    "odd": ("embed.weight", "blocks.0.up.*", "blocks.1.norm.weight"),
    "gpt": ("blocks.0.attention.*.*", "position.weight"),
    "llama": ("blocks.0.attention.*.*", "embed.weight"),
    "moe": ("blocks.0.attention.*.*", "norm.weight"),
    "resnet": ("stem.*.*", "blocks.0.*.*"),
}

"""Checks that a plan fits a world, a batch and a model. They need more than the plan, as plain
numbers.

They take integers rather than a config or a module. So the planner asks them thousands of times a
second, and the engine asks the same of a live model. Each check reports all of its failures at
once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, get_args

from plait.errors import NotAvailable, PlanError, WorldSizeError
from plait.plan.facts import SCHEDULES, STRATEGIES
from plait.plan.plan import Plan
from plait.plan.precisions import PREDICTED, Messages


def world_text(plan: Plan) -> str:
    """The product that makes the world size, without the axes of size 1: `pp2 x dp2 x tp2`."""
    sizes = {"pp": plan.pp.size, "dp": plan.dp.size, "cp": plan.cp.size, "tp": plan.tp.size}
    return " x ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one device"


def check_world(plan: Plan, world_size: int) -> None:
    """Raises `WorldSizeError` unless the plan uses exactly the ranks that were started."""
    need = plan.world_size
    if need == world_size:
        return
    rest = need // plan.dp.size
    cure = f"start {need} ranks (--nproc {need})"
    if world_size % rest == 0 and world_size > 0:
        cure += f" or change dp{plan.dp.size} to dp{world_size // rest}"
    else:
        cure += f" or choose a plan for {world_size}"
    raise WorldSizeError(
        f"plan '{plan}' needs {need} ranks ({world_text(plan)}) but {world_size} were started; "
        f"{cure}"
    )


def check_restarts(plan: Plan, num_servers: int | None = None) -> None:
    """Raises `PlanError` unless ranks of the plan can be started again while the others go on."""
    dp = plan.dp
    if dp.strategy == "local" or (
        dp.strategy == "async-server" and dp.stale and (num_servers or dp.size) < dp.size
    ):
        return
    cure = (
        f"take dp{dp.size}:local,everyH or dp{dp.size}:async-server,staleK with K above 0, or no "
        "restarts"
    )
    if dp.strategy == "async-server" and dp.stale:
        cure = (
            f"a server that is lost takes its keys with it; with num_servers below {dp.size} the "
            "others can come back"
        )
    raise PlanError(f"plan '{plan}': no rank that is lost can be started again; {cure}")


def check_runnable(plan: Plan) -> None:
    """Raises `NotAvailable` for a plan that can be written and not be run. torch.compile takes
    selective recomputation as part of one graph, and these blocks are several. Of the precisions of
    eight bits and fewer an engine has fp8 alone, for whole layers.
    """
    if plan.precision == "fp8":
        _check_eight_bits(plan)
    elif plan.precision in PREDICTED:
        raise NotAvailable(
            f"plan '{plan}': precision:{plan.precision} can be predicted by plait estimate and "
            "plait plan, and not be run; take precision:bf16"
        )
    if plan.folds_experts:
        raise NotAvailable(
            f"plan '{plan}': ep{plan.ep} over dp x cp x tp can be predicted by plait estimate with "
            f"--framework megatron-core, and not be run; take ep{plan.dp.size * plan.cp.size}"
        )
    if not plan.compile or plan.remat != "selective":
        return
    several = {
        str(plan.tp): plan.tp.size > 1 or plan.tp.mode != "1d",
        str(plan.cp): plan.cp.size > 1,
        f"ep{plan.ep}": plan.ep > 1,
        str(plan.pp): plan.pp.size > 1 and SCHEDULES[plan.pp.schedule].splits_backward,
    }
    terms = [term for term, here in several.items() if here]
    if terms:
        raise NotAvailable(
            "compile with remat:selective: operations are selected inside one graph, and "
            f"{' and '.join(terms)} cuts each block into several; take remat:full, or leave "
            "compile out"
        )


def _check_eight_bits(plan: Plan) -> None:
    reasons = {
        str(plan.tp): plan.tp.size > 1 or plan.tp.mode != "1d",
        f"ep{plan.ep}": plan.ep > 1,
        str(plan.pp): plan.pp.size > 1 and SCHEDULES[plan.pp.schedule].splits_backward,
    }
    terms = [term for term, here in reasons.items() if here]
    if terms:
        raise NotAvailable(
            f"plan '{plan}': precision:fp8 runs where linear layers are whole, and "
            f"{' and '.join(terms)} computes them otherwise; it can be predicted by plait estimate "
            "and plait plan. To run, take precision:bf16"
        )


def is_runnable(plan: Plan) -> bool:
    """Whether `check_runnable` lets the plan pass."""
    try:
        check_runnable(plan)
    except NotAvailable:
        return False
    return True


def check_batch(plan: Plan, global_batch: int) -> None:
    """Raises `PlanError` unless every micro-batch of every data rank gets at least one sample.

    Shares may differ by one sample: the loss is a mean over the global count, so uneven shares are
    exact.
    """
    shares = plan.dp.size * plan.micro_batches
    if global_batch >= shares:
        return
    cure = f"use global_batch {shares} or more"
    if global_batch >= plan.dp.size:
        cure += f", or mb{global_batch // plan.dp.size} or fewer"
    raise PlanError(
        f"plan '{plan}': global_batch {global_batch} leaves some of its dp{plan.dp.size} x "
        f"mb{plan.micro_batches} = {shares} "
        f"micro-batches without a sample; {cure}"
    )


def check_model(
    plan: Plan,
    *,
    num_attention_heads: int | None = None,
    num_key_value_heads: int | None = None,
    hidden_size: int | None = None,
    intermediate_size: int | None = None,
    vocab_size: int | None = None,
    num_layers: int | None = None,
    num_local_experts: int | None = None,
    seq_len: int | None = None,
) -> None:
    """Raises `PlanError` listing every size of the model that the plan cannot split; None is not
    looked at.

    The conditions are necessary ones: a strategy may ask for more when it meets the model itself.
    """
    broken = [
        *_tensor_splits(
            plan,
            {
                "num_attention_heads": num_attention_heads,
                "num_key_value_heads": num_key_value_heads,
                "hidden_size": hidden_size,
                "intermediate_size": intermediate_size,
                "vocab_size": vocab_size,
            },
        ),
        *_sequence_splits(plan, seq_len, num_attention_heads),
        *_stages(plan, num_layers),
        *_experts(plan, num_local_experts),
    ]
    if len(broken) == 1:
        raise PlanError(f"plan '{plan}': {broken[0]}")
    if broken:
        raise PlanError(
            "\n  ".join([f"plan '{plan}' does not fit the model in {len(broken)} ways:", *broken])
        )


def check_config(plan: Plan, sizes: Mapping[str, int | None]) -> None:
    """`check_model` from a mapping of model keys, of which those it does not know are left out."""
    names = (
        "num_attention_heads",
        "num_key_value_heads",
        "hidden_size",
        "intermediate_size",
        "vocab_size",
        "num_local_experts",
        "seq_len",
    )
    known = {name: sizes.get(name) for name in names}
    check_model(plan, num_layers=sizes.get("num_layers", sizes.get("num_hidden_layers")), **known)


def check_messages(plan: Plan, messages: str) -> None:
    """Raises `PlanError` for another word than those of `Messages`, and for a plan whose tensor
    ranks would round weights too.
    """
    words = get_args(Messages)
    if messages not in words:
        raise PlanError(f"train.messages '{messages}' is none of {', '.join(words)}")
    if messages != "whole" and plan.tp.mode != "1d":
        raise PlanError(
            f"plan '{plan}': train.messages '{messages}' rounds activations, and {plan.tp} also "
            f"moves weights between its ranks; use tp{plan.tp.size}:1d, or messages 'whole'"
        )


def rounds_messages(plan: Plan, messages: str) -> bool:
    """Whether any message of a plan travels in fewer bytes than it has on its rank."""
    travel = plan.pp.size > 1 or plan.tp.size > 1
    return messages != "whole" and travel and plan.precision in ("float32", "float64")


def check_fixed_order(plan: Plan) -> None:
    """Raises `NotAvailable` for a plan that cannot add gradients in one fixed tree."""
    broken = next(_out_of_order(plan), None)
    if broken is not None:
        raise NotAvailable(f"plan '{plan}' cannot keep train.fixed_order: {broken}")


def _out_of_order(plan: Plan) -> Iterator[str]:
    num = plan.micro_batches
    schedule = SCHEDULES[plan.pp.schedule]
    if not STRATEGIES[plan.dp.strategy].sums_in_order or plan.dp.replicate > 1:
        yield f"{plan.dp} has an order of its own; take dp{plan.dp.size} or dp{plan.dp.size}:zero1"
    if plan.cp.size > 1 or plan.ep > 1:
        yield "ranks of cp and ep sum over samples too; leave cp and ep out"
    if schedule.asynchronous or schedule.splits_backward:
        yield f"{plan.pp.schedule} mixes micro-batches; take 1f1b, gpipe or interleaved"
    if plan.dp.size > 1 and num & (num - 1):
        more = 1 << num.bit_length()
        yield f"mb{num} is no power of two, so ranks have no whole subtrees; take mb{more}"


def check_aggregate(plan: Plan, aggregate: str) -> None:
    """Raises `NotAvailable` for a plan that cannot take the mean of its workers' means."""
    broken = next(_without_own_means(plan), None) if aggregate == "mean" else None
    if broken is not None:
        raise NotAvailable(
            f"plan '{plan}' cannot keep train.aggregate 'mean': {broken}, or aggregate 'sum'"
        )


def _without_own_means(plan: Plan) -> Iterator[str]:
    """Why no rank has the whole gradient and count of its worker before these are summed."""
    dp = plan.dp
    if plan.pp.size > 1:
        yield "stages before the last have no count of targets; leave pp out"
    if plan.cp.size > 1 or plan.ep > 1:
        yield "ranks of cp and ep have parts of several workers' batches; leave cp and ep out"
    if plan.tp.size > 1 and plan.tp.mode != "1d":
        yield f"{plan.tp} splits the batch of a worker; take tp{plan.tp.size}"
    if STRATEGIES[dp.strategy].shards_gradients and plan.micro_batches > 1:
        yield (
            f"{dp} sums each micro-batch over the workers before the next one is counted; take "
            f"dp{dp.size}:zero1, leave mb{plan.micro_batches} out"
        )
    if dp.size > 1 and (dp.strategy == "local" or dp.stale):
        yield f"{dp} weighs workers by their counts; take dp{dp.size}:server"


def _tensor_splits(plan: Plan, sizes: Mapping[str, int | None]) -> Iterator[str]:
    tp = plan.tp
    if tp.size == 1:
        return
    parts, side = (
        (tp.size, "the tp ranks") if tp.mode == "1d" else (tp.q, f"the side of the {tp.mode} grid")
    )
    for name, size in sizes.items():
        if tp.mode == "1d" and name == "hidden_size":
            # 1d keeps the hidden dim whole; only heads, intermediate and vocabulary are split
            continue
        if size is not None and size % parts:
            yield (
                f"{tp}: {name} {size} must be a multiple of {parts} ({side}); "
                f"{_multiples(name, size, parts)}"
            )


def _sequence_splits(
    plan: Plan, seq_len: int | None, num_attention_heads: int | None
) -> Iterator[str]:
    tp = plan.tp
    cp = plan.cp
    parts = cp.size * (tp.size if tp.sequence_parallel else 1)
    if seq_len is not None and seq_len % parts:
        who = " x ".join(
            [f"cp{cp.size}"] * (cp.size > 1)
            + [f"tp{tp.size}"] * (tp.sequence_parallel and tp.size > 1)
        )
        yield (
            f"{who}: seq_len {seq_len} must be a multiple of {parts}; "
            f"{_multiples('seq_len', seq_len, parts)}"
        )
    heads = num_attention_heads
    if (
        cp.strategy != "ulysses"
        or cp.size == 1
        or heads is None
        or tp.mode != "1d"
        or heads % tp.size
    ):
        return
    local = heads // tp.size
    if local % cp.size:
        yield (
            f"{cp}: ulysses splits the heads, and {local} heads (num_attention_heads {heads} over "
            f"tp{tp.size}) "
            f"are no multiple of {cp.size}; write cp{cp.size}:ring or choose a divisor of {local}"
        )


def _stages(plan: Plan, num_layers: int | None) -> Iterator[str]:
    if num_layers is None or plan.pp.num_stages <= num_layers + 2:
        return
    yield (
        f"{plan.pp}: cuts the model into {plan.pp.num_stages} stages, but its {num_layers} layers "
        "with the input and the "
        f"output layer are only {num_layers + 2} pieces; lower pp or v"
    )


def _experts(plan: Plan, num_local_experts: int | None) -> Iterator[str]:
    if plan.ep == 1:
        return
    if not num_local_experts:
        if num_local_experts == 0:
            yield (
                f"ep{plan.ep}: the model has no experts to split (num_local_experts 0); leave "
                f"ep{plan.ep} out"
            )
        return
    if num_local_experts % plan.ep:
        yield (
            f"ep{plan.ep}: num_local_experts {num_local_experts} must be a multiple of {plan.ep}; "
            f"{_multiples('num_local_experts', num_local_experts, plan.ep)}"
        )


def _multiples(name: str, size: int, parts: int) -> str:
    below = size // parts * parts
    above = (size // parts + 1) * parts
    return f"the nearest are {below} and {above}" if below else f"the least {name} is {above}"


OFFLOADED: Final = ("none", "full")
"""The recomputation beside which activations can wait in host memory."""


def check_offload(plan: Plan, *, offloads: bool) -> None:
    """Raises `PlanError` for recomputation that keeps products where nothing can move them."""
    if offloads and plan.remat not in OFFLOADED:
        raise PlanError(
            f"plan '{plan}': offload_activations moves what autograd keeps, and "
            f"remat:{plan.remat} keeps products by itself; take remat:full, or leave remat out"
        )

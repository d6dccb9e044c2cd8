"""Every plan that could be: degrees of the axes first, then what can vary within them.

Degrees decide which ranks exist, and are few. The options within them are many, and are only opened
for degrees that can still win. Options are micro-batch, schedule, ZeRO stage and recomputation.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

from plait.errors import PlanError
from plait.plan import ContextAxis, DataAxis, PipelineAxis, Plan, TensorAxis, check_config
from plait.plan.facts import PIPELINE_SCHEDULES, SCHEDULES, ZERO
from plait.predict.cost.model.operations import Matmul, Model

MAX_TENSOR = 64
MAX_SAMPLES = 32
"""The largest micro-batch that is tried, in samples,"""
MAX_TOKENS = 4096
"""or in tokens, where that is more."""
USUAL_VIRTUAL = (2, 3, 4, 6, 8, 12, 16)
"""Stages on each rank that are tried whether or not they divide its layers,"""
MAX_VIRTUAL = 16
"""and the most that are tried because they do."""
MIN_TOKENS = 1024
"""The fewest tokens of a sequence that one context rank is given where the user decides none."""


@dataclass(frozen=True)
class Degrees:
    """How many ranks each axis has, and how the inner axes split."""

    tp: TensorAxis
    pp: int
    cp: ContextAxis
    ep: int
    dp: int

    def __str__(self) -> str:
        terms = [str(self.tp)] if self.tp.size > 1 else []
        terms += [f"pp{self.pp}"] if self.pp > 1 else []
        terms += [str(self.cp)] if self.cp.size > 1 else []
        terms += [f"ep{self.ep}"] if self.ep > 1 else []
        return " ".join([*terms, f"dp{self.dp}"])


def degrees(
    model: Model,
    num_devices: int,
    global_batch: int,
    node: int,
    *,
    sequence: bool = True,
    folds: bool = False,
    decided: Container[str] = (),
) -> Iterator[Degrees]:
    """All degrees whose product is `num_devices` and that the model and the batch divide by.
    `sequence`: 1D tensor axes come with sequence parallelism. `folds`: experts may take the ranks
    of the tensor axis, too. `decided`: axes of which the user decided something, so that bounds of
    what is usually worth a look do not hold.
    """
    largest = num_devices if "tp" in decided else min(MAX_TENSOR, max(2 * node, 8))
    least_tokens = 1 if "cp" in decided else MIN_TOKENS
    for tensor in tensor_axes(num_devices, largest, sequence and model.seq_len > 1):
        if not divides(model, tensor):
            continue
        for pp in divisors(num_devices // tensor.size):
            if pp > model.num_blocks:
                break
            rest = num_devices // (tensor.size * pp)
            for context in context_axes(model, rest, tensor, least_tokens):
                dp = rest // context.size
                if dp > global_batch:
                    continue
                for ep in expert_degrees(model, dp * context.size):
                    yield Degrees(tensor, pp, context, ep, dp)
                every = dp * context.size * tensor.size
                may_fold = folds and tensor.sequence_parallel and model.num_experts > 0
                if may_fold and model.num_experts % every == 0:
                    yield Degrees(tensor, pp, context, every, dp)


def tensor_axes(num_devices: int, largest: int, sequence: bool) -> Iterator[TensorAxis]:
    """1D up to the largest, with sequence parallelism or without; squares, cubes and 2.5D grids
    where they are grids.
    """
    for size in divisors(num_devices):
        if size > largest:
            return
        yield TensorAxis(size, "1d", sequence_parallel=sequence and size > 1)
        for q in range(2, 9):
            if q * q == size:
                yield TensorAxis(size, "2d")
            if q * q * q == size:
                yield TensorAxis(size, "3d")
            depth, odd = divmod(size, q * q)
            if not odd and 1 < depth <= q:
                yield TensorAxis(size, "2.5d", depth=depth)


def context_axes(
    model: Model, rest: int, tensor: TensorAxis, least_tokens: int = MIN_TOKENS
) -> Iterator[ContextAxis]:
    """Context degrees that leave each rank enough of a long sequence."""
    yield ContextAxis(1)
    for size in divisors(rest):
        if size == 1 or model.seq_len // size < least_tokens:
            continue
        if model.seq_len % (size * tensor.size):
            continue
        yield ContextAxis(size, "ring")
        heads = model.num_heads // tensor.size
        if (
            heads % size == 0
            and (model.num_kv_heads // tensor.size) % size == 0
            and tensor.mode == "1d"
        ):
            yield ContextAxis(size, "ulysses")


def expert_degrees(model: Model, rest: int) -> Iterator[int]:
    """Expert degrees, which borrow their ranks from dp x cp."""
    yield 1
    if model.num_experts:
        yield from (ep for ep in divisors(rest) if ep > 1 and model.num_experts % ep == 0)


def suits(model: Model, plan: Plan) -> bool:
    """Whether the model has blocks, layers, tokens and experts for each axis of a plan."""
    return (
        plan.pp.num_stages <= model.num_blocks
        and divides(model, plan.tp)
        and plan.ep in expert_degrees(model, plan.ep)
        and (plan.cp.size == 1 or model.seq_len % (plan.cp.size * plan.tp.size) == 0)
    )


def divides(model: Model, tensor: TensorAxis) -> bool:
    """Whether the model splits evenly over a tensor axis."""
    if tensor.size == 1:
        return True
    if model.seq_len == 1 and (tensor.mode != "1d" or tensor.sequence_parallel):
        return False
    if not model.sizes.keys() & {"num_attention_heads", "intermediate_size"}:
        return tensor.mode == "1d" and _has_even_layers(model, tensor.size)
    try:
        check_config(Plan(tp=tensor), model.sizes)
    except PlanError:
        return False
    return True


def _has_even_layers(model: Model, size: int) -> bool:
    """Whether a tensor axis splits layers of a model without known sizes, all of them evenly.

    Its description has them split where its own roles, or those that plait has followed, say so.
    """
    split = [
        op.outputs if op.split == "column" else op.inputs
        for block, _ in model.runs
        for op in block.operations
        if isinstance(op, Matmul) and op.split in ("column", "row") and not op.weightless
    ]
    return bool(split) and all(width % size == 0 for width in split)


def micro_batch_counts(global_batch: int, dp: int, pp: int, seq_len: int = MAX_TOKENS) -> list[int]:
    """Numbers of micro-batches, largest micro-batch first, that leave no rank without a sample."""
    share = -(-global_batch // dp)
    most = min(share, max(MAX_SAMPLES, MAX_TOKENS // seq_len))
    sizes = [2**power for power in range(most.bit_length()) if 2**power <= most]
    counts = {-(-share // size) for size in sizes}
    if pp == 1:
        counts.add(1)
    return sorted(count for count in counts if count * dp <= global_batch)


def schedules(model: Model, pp: int, micro_batches: int) -> Iterator[PipelineAxis]:
    """Schedules beyond the default that are worth a look.

    Interleaved ones have few stages on a rank, or as many as its layers divide by.
    """
    layers = model.num_repeated // pp
    for name in PIPELINE_SCHEDULES:
        facts = SCHEDULES[name]
        if not facts.searched or micro_batches < facts.least_micro_batches(pp):
            continue
        if facts.needs_virtual:
            even = (one for one in divisors(layers) if 1 < one <= MAX_VIRTUAL)
            for virtual in sorted({*USUAL_VIRTUAL, *even}):
                divides_evenly = micro_batches % pp == 0 and virtual <= layers
                if divides_evenly and virtual * pp <= model.num_repeated:
                    yield PipelineAxis(pp, name, virtual)
        elif facts.default_virtual * pp <= model.num_blocks:
            yield PipelineAxis(pp, name)


def data_axes(
    dp: int, cp: int, offered: Container[str], node_ranks: int, *, offloads: bool
) -> Iterator[DataAxis]:
    """The data strategies that are offered, in the order of their cost. Each is tried only when
    those before it do not fit. The ranks of a context axis hold the same weights and share them as
    those of the data axis do.
    """
    # ZeRO-1 sends as much as an all-reduce, and holds less.
    axes = [DataAxis(dp)] if dp == 1 or ZERO[1] not in offered else []
    if dp * cp > 1:
        axes += [DataAxis(dp, ZERO[1]), DataAxis(dp, ZERO[2])]
        if 1 < node_ranks < dp and dp % node_ranks == 0:
            axes.append(DataAxis(dp, ZERO[3], replicate=dp // node_ranks))
        axes.append(DataAxis(dp, ZERO[3]))
    if offloads:
        axes.append(DataAxis(dp, ZERO[1], offload=True))
    if offloads and dp * cp > 1:
        axes += [DataAxis(dp, ZERO[2], offload=True), DataAxis(dp, ZERO[3], offload=True)]
    yield from (axis for axis in axes if axis.strategy in offered or axis == DataAxis(1))


def divisors(number: int) -> list[int]:
    """All divisors, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]

"""Which module a wrong table of roles is about: the first whose output is not what one device
computes there.

A table that is wrong and does not stop the model changes the outputs from some module on. So one
forward is watched, module by module. Each rank compares its part of an output with that part of one
device's. The first that differs is named, with the modules that ran since the last right one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from plait.comm import World
from plait.errors import some_of
from plait.parallel.tensor import ActivationLayout, TensorSplit
from plait.plan import Plan
from plait.values import PyTree
from plait.verify.diagnosis.finding import Finding
from plait.verify.problem import Problem, reference_dtype
from plait.verify.ranks import make_engine
from plait.verify.reference.batches import num_samples
from plait.verify.reference.drawn import random_from
from plait.verify.reference.one_device import call

SAME = 1e-8  # relative; rounding of float64 in one forward is far below, a wrong role far above
IN_A_STREAM = (
    "embedding",
    "norm",
    "last_norm",
    "column",
    "qkv",
    "row",
    "head",
    "attention",
    "dropout",
)
"""The roles whose outputs are in the stream that the split model keeps account of; others are
suspects, not witnesses.
"""


@dataclass(frozen=True)
class Seen:
    """A module's first output in a forward, and the stream it is in (of one device: all of it)."""

    name: str
    value: Tensor
    stream: ActivationLayout


def locate(world: World, problem: Problem, plan: Plan) -> Finding | None:
    """The finding, of a plan with a tensor axis that failed, or None if all outputs are right.
    Collective.
    """
    if plan.tp.size == 1 or plan.cp.size > 1 or plan.ep > 1 or plan.compile:
        return None
    dp = world.axis("dp")
    whole = problem.make_whole_model(reference_dtype(plan))
    batch = problem.batches(1, reference_dtype(plan))[0]
    (part,) = [
        one for one in problem.slices(plan)(0, batch) if (one.rank, one.micro_batch) == (dp.rank, 0)
    ]
    with watched(whole) as expected, random_from(part.seed):
        if num_samples(part.batch):  # a rank without samples has nothing to compare
            call(whole, part.batch[0])
    engine = make_engine(problem, plan, world)
    assert engine.split is not None
    with watched(engine.model, engine.split) as outputs:
        engine.step(next(iter(problem.loader(dp.rank, dp.size))), trace=False)
    order = {seen.name: place for place, seen in enumerate(expected)}
    roles = {
        **{
            name: "dropout"
            for name, module in whole.named_modules()
            if isinstance(module, nn.Dropout)
        },
        **engine.split.roles,
    }
    verdicts = {
        seen.name: is_part(seen, expected[order[seen.name]].value, roles)
        for seen in outputs
        if seen.name in order
    }
    of_ranks: list[dict[str, bool]] = world.axis("world").gather_objects(
        {n: v for n, v in verdicts.items() if v is not None}
    )
    wrong = {name for one in of_ranks for name, right in one.items() if not right}
    if not wrong:
        return None
    first = min(wrong, key=order.__getitem__)
    right = [order[name] for one in of_ranks for name in one if order[name] < order[first]]
    since = [seen.name for seen in expected[max(right, default=-1) + 1 : order[first]]]
    since = [
        name for name in since if name in roles or not list(whole.get_submodule(name).children())
    ]
    return Finding("role", "tp", _text(first, since, roles), 0.99, (first, *since))


def _text(first: str, since: list[str], roles: dict[str, str]) -> str:
    text = (
        f"the first module whose output differs from one device's is '{first}' ({roles[first]}): "
        "look at its role"
    )
    named = [f"'{name}' ({roles.get(name, 'no role')})" for name in since]
    return text + (
        f", and at those of what ran just before it: {some_of(named, 6)}" if named else ""
    )


def is_part(seen: Seen, whole: Tensor, roles: dict[str, str]) -> bool | None:
    """Whether an output is this rank's part of one device's, `whole` [samples, ...]. None for a
    module that does not say which part it has.
    """
    role = roles.get(seen.name)
    if role not in IN_A_STREAM:
        return None
    part = whole
    for axis, dim in seen.stream.cuts(1 if role == "attention" else -1):
        length = -(-whole.shape[dim] // axis.size)
        start = min(axis.rank * length, whole.shape[dim])
        part = part.narrow(dim, start, min(length, whole.shape[dim] - start))
    value = seen.value[: part.shape[0]]  # samples that fill up a part are copies
    if value.shape != part.shape:
        return False
    return (
        float((value - part).abs().max()) <= SAME * max(float(whole.abs().max()), 1e-30)
        if part.numel()
        else True
    )


@contextmanager
def watched(model: nn.Module, split: TensorSplit | None = None) -> Iterator[list[Seen]]:
    """The list fills with the first output of each module that runs, in the order in which they
    end.
    """
    first_outputs: dict[str, Seen] = {}

    def hook(name: str) -> Callable[..., None]:
        def keep(module: nn.Module, args: PyTree, output: PyTree) -> None:
            if isinstance(output, Tensor) and name not in first_outputs:
                first_outputs[name] = Seen(
                    name,
                    output.detach().clone(),
                    ActivationLayout() if split is None else split.context.layout,
                )
                seen.append(first_outputs[name])

        return keep

    seen: list[Seen] = []
    handles = [
        module.register_forward_hook(hook(name)) for name, module in model.named_modules() if name
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()

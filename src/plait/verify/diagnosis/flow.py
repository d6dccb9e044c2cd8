"""Which module is guilty, of a plan without a tensor axis: outputs and their gradients, followed.

The micro-batches of every data rank run on one device as well. Each rank holds its outputs, and
the gradients that come back to them, against one device's. The first output in forward order that
differs names a module, or the first gradient in backward order. Outputs of another shape, such as
those inside experts that are split, are no witnesses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn

from plait.comm import World
from plait.errors import some_of
from plait.parallel.context.group import ContextGroup
from plait.plan import Plan
from plait.values import PyTree
from plait.verify.diagnosis.finding import Finding
from plait.verify.problem import Problem, reference_dtype
from plait.verify.ranks import make_engine
from plait.verify.record.compare import Difference
from plait.verify.reference.batches import Batch, num_samples
from plait.verify.reference.drawn import random_from
from plait.verify.reference.losses import expected_count, loss_sum
from plait.verify.reference.one_device import Slice, call, pooled_losses, run_reference

SAME = 1e-8  # relative; rounding of float64 is far below, a wrong output far above


Place = tuple[str, int]
"""A module, and the number of its call, which is the micro-batch."""


@dataclass
class Followed:
    """Outputs of modules, in the order in which they end, and the gradients of these."""

    calls: int
    outputs: dict[Place, Tensor] = field(default_factory=dict)
    grads: dict[Place, Tensor] = field(default_factory=dict)


def locate_flow(world: World, problem: Problem, plan: Plan, step: int) -> Finding | None:
    """The finding on a step, or None where every output and its gradient are right. Collective."""
    if plan.tp.size > 1 or plan.compile:
        return None
    dp = world.axis("dp")
    calls = 1 if plan.remat != "none" else plan.micro_batches
    batches = problem.batches(step + 1, reference_dtype(plan))
    model = _after(problem, plan, batches[:step])
    every = list(problem.slices(plan)(step, batches[step]))
    count = expected_count(problem.recipe().loss, [one.batch for one in every])
    mine = [one for one in every if one.rank == dp.rank]
    expected = _expected(model, problem, mine[:calls], count)
    world.axis("world").barrier()  # random numbers are the process's where ranks are threads
    engine = make_engine(problem, plan, world)
    loader = iter(problem.loader(dp.rank, dp.size))
    for _ in range(step):
        engine.step(next(loader), trace=False)
    with followed(engine.model, calls) as found:
        engine.step(next(loader), trace=False)
    group = ContextGroup(world.axis("cp"), plan.cp.strategy) if plan.cp.size > 1 else None
    share = engine.loss_divisor / count
    gradients = {place: grad * share for place, grad in found.grads.items()}
    own = (
        _verdicts(found.outputs, expected.outputs, group),
        _verdicts(gradients, expected.grads, group),
    )
    told = world.axis("world").gather_objects((own, [name for name, _ in expected.outputs]))
    longest: list[str] = max((names for _, names in told), key=len)
    order = list(dict.fromkeys(longest))
    outputs = [one[0] for one, _ in told]
    grads = [one[1] for one, _ in told]
    return _first_output(outputs, order) or _first_gradient(grads, order)


def by_parameters(failed: Sequence[Difference]) -> Finding | None:
    """The finding where every output that can be compared is right: a loss, or some parameters."""
    wrong = [one.name for one in failed if one.kind == "grad"]
    if any(one.kind == "loss" for one in failed):
        text = (
            "every module's output is right, and the loss is not: it is computed wrongly; a loss "
            "of one number counts as the mean over samples, and a mean over anything else, such as "
            "targets that are not -100 or weights of classes, returns (sum, count)"
        )
        return Finding("loss", "", text, 0.9)
    if not wrong:
        return None
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in wrong))
    text = f"outputs and loss are right, and gradients are wrong in {some_of(modules, 6)}"
    return Finding("module", "", text, 0.6, tuple(wrong))


def _after(problem: Problem, plan: Plan, batches: Sequence[Batch]) -> nn.Module:
    """One device's model after it has trained on some batches."""
    model = problem.make_whole_model(reference_dtype(plan))
    if not batches:
        return model
    record = run_reference(model, batches, problem.recipe())
    state = {**model.state_dict(), **record.steps[-1].params, **record.steps[-1].buffers}
    model.load_state_dict(state)
    return model


def _expected(model: nn.Module, problem: Problem, parts: Sequence[Slice], count: float) -> Followed:
    """One device on the samples of some slices, of which all together have a count."""
    backward = not pooled_losses(model)
    with followed(model, len(parts)) as flow:
        for part in parts:
            with random_from(part.seed):
                if not num_samples(part.batch):
                    continue
                total, _ = loss_sum(problem.recipe().loss, call(model, part.batch[0]), part.batch)
                if backward:
                    (total / count).backward()
    return flow


def _verdicts(
    mine: Mapping[Place, Tensor], truth: Mapping[Place, Tensor], group: ContextGroup | None
) -> dict[Place, bool]:
    """Whether the tensors that both have are equal; those of other shapes are left out.

    So is a wrong one inside a right one: a layer may add its bias, or scale, outside its call.
    """
    are_equal: dict[Place, bool] = {}
    for place, value in mine.items():
        whole = truth.get(place)
        if whole is None:
            continue
        if group is not None and whole.dim() > 2:
            group.take_length(whole)
            whole = group.take(whole, 1)
        if whole.shape == value.shape and value.numel():
            size = max(float(whole.abs().max()), 1e-30)
            are_equal[place] = float((value.double() - whole).abs().max()) <= SAME * size
    return {
        place: right for place, right in are_equal.items() if right or not _inside(place, are_equal)
    }


def _inside(place: Place, found: Mapping[Place, bool]) -> bool:
    """Whether a module that holds this one is right."""
    name, number = place
    while name := name.rpartition(".")[0]:
        if found.get((name, number)):
            return True
    return False


def _wrong(told: Sequence[Mapping[Place, bool]]) -> set[str]:
    return {name for one in told for (name, _), right in one.items() if not right}


def _where(told: Sequence[Mapping[Place, bool]], name: str) -> str:
    """On which ranks a module is wrong, and in which micro-batches."""
    ranks = [rank for rank, one in enumerate(told) if name in _wrong([one])]
    micro = sorted(
        {n for one in told for (which, n), ok in one.items() if which == name and not ok}
    )
    shown = ", ".join(map(str, ranks))
    return f"on rank {shown} in micro-batch {', '.join(map(str, micro))}"


def _first_output(told: Sequence[Mapping[Place, bool]], order: Sequence[str]) -> Finding | None:
    wrong = _wrong(told)
    if not wrong:
        return None
    first = min(wrong, key=order.index)
    text = (
        f"the first module whose output differs from one device's is '{first}', "
        f"{_where(told, first)}: what it computes is wrong, or what runs just before it"
    )
    return Finding("module", "", text, 0.95, (first,))


def _first_gradient(told: Sequence[Mapping[Place, bool]], order: Sequence[str]) -> Finding | None:
    wrong = _wrong(told)
    if not wrong:
        return None
    last = max(wrong, key=order.index)
    where = _where(told, last)
    if last == order[-1]:
        text = (
            f"every output is right, and the gradient of the model's output is not, {where}: the "
            "loss itself is computed wrongly"
        )
        return Finding("loss", "", text, 0.95, (last,))
    right = {name for one in told for name, _ in one} - wrong
    after = [name for name in order[order.index(last) + 1 :] if name in right]
    next_one = f"; that of '{after[0]}', which runs after it, is right" if after else ""
    text = (
        "every output is right, and in backward order the first gradient that differs is that of "
        f"the output of '{last}', {where}{next_one}"
    )
    return Finding("module", "", text, 0.95, (last, *after[:1]))


@contextmanager
def followed(model: nn.Module, calls: int) -> Iterator[Followed]:
    """Keep the outputs of the first calls of each module, and their gradients when they come."""
    flow = Followed(calls)
    seen: Counter[str] = Counter()

    def keep_gradient(place: Place) -> Callable[[Tensor], None]:
        def keep(grad: Tensor) -> None:
            flow.grads.setdefault(place, grad.detach().clone())

        return keep

    def hook(name: str) -> Callable[..., None]:
        def keep(module: nn.Module, args: PyTree, output: PyTree) -> None:
            if not isinstance(output, Tensor) or not output.is_floating_point():
                return
            place = (name, seen[name])
            seen[name] += 1
            if place[1] >= flow.calls:
                return
            flow.outputs[place] = output.detach().clone()
            if output.requires_grad:
                output.register_hook(keep_gradient(place))

        return keep

    handles = [
        module.register_forward_hook(hook(name)) for name, module in model.named_modules() if name
    ]
    try:
        yield flow
    finally:
        for handle in handles:
            handle.remove()

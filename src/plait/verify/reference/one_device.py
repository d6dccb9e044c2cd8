"""The run that everything is compared with: one device, plain PyTorch, nothing of the engine.

By default a step takes the whole global batch at once. It knows no ranks, no micro-batches and no
slicing that could repeat an error of the parallel run. Two kinds of model have no such meaning. A
sample's output may depend on its neighbours (batch-norm) or on chance (dropout). Their statistics
and random numbers are those of a slice by definition. They run slice by slice here, and the report
says so.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from plait import torch_internals
from plait.batch_trees import is_per_sample, joined, tensors_of
from plait.errors import ModelError
from plait.models.parameters import Parameters
from plait.values import PyTree
from plait.verify.record.observation import Contribution, Observation, Record, Tensors
from plait.verify.record.samples import samples_of
from plait.verify.reference.apart import BuffersApart, persistent_buffers
from plait.verify.reference.auxiliary import Auxiliary, Pool
from plait.verify.reference.batches import Batch, num_samples, taken_of
from plait.verify.reference.copied import copied
from plait.verify.reference.drawn import random_from
from plait.verify.reference.losses import expected_count, loss_sum
from plait.verify.reference.lowered import LowPrecision
from plait.verify.reference.recipe import Loss, Recipe
from plait.verify.reference.synced_norms import synced_norms, without_statistics

SURELY = 1e-8  # outputs of float64 that lie no further apart are equal but for rounding
CLIP_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_ divides by the norm and this


@dataclass(frozen=True)
class Slice:
    """The part of one micro-batch of one data rank in the global batch; `seed` is for its random
    numbers.
    """

    rank: int
    micro_batch: int
    batch: Batch
    seed: int = 0


def run_reference(
    model: nn.Module,
    batches: Sequence[Batch],
    recipe: Recipe,
    slices: Callable[[int, Batch], Sequence[Slice]] | None = None,
    *,
    by_slice: bool = False,
    by_micro_batch: bool = False,
    contributions: bool = False,
    first_buffers: bool = False,
) -> Record:
    """Train a copy of `model` on the global batches, one step each.

    `slices(step, batch)` gives the parallel run's slices of a batch. They are used only in three
    cases. With `by_slice` they are computed one by one. With `by_micro_batch` all ranks' slices of
    a micro-batch are computed together, for losses of a whole micro-batch. With `contributions`
    each slice's gradient is recorded, for the diagnosis. With `first_buffers` the buffers are the
    first rank's, and else the mean of all ranks'.
    """
    old = copied(model) if contributions else None
    model = copied(model)
    named = dict(model.named_parameters())
    trained = [(name, one) for name, one in named.items() if one.requires_grad]
    optimizer = recipe.made(Parameters(trained))
    rates = [group["lr"] for group in optimizer.param_groups]
    start = _values(named)
    apart = BuffersApart(model)
    steps = []
    known = [start]
    for step, batch in enumerate(batches):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * recipe.lr_factor(step)
        parts = (
            list(slices(step, batch))
            if slices is not None and (by_slice or by_micro_batch or contributions)
            else []
        )
        added = [_contribution(model, recipe.loss, part) for part in parts] if contributions else []
        work = (
            parts
            if by_slice
            else _by_micro_batch(parts)
            if by_micro_batch
            else [Slice(0, 0, batch)]
        )
        stale = (
            _stale_gradients(_at(old, known[step - 1], model), recipe, work, seeded=by_slice)
            if old is not None and step
            else {}
        )
        total, count, divisor, auxiliary = _accumulate(
            model, recipe.loss, work, seeded=by_slice, apart=apart
        )
        besides = {name: grad.clone() for name, grad in auxiliary.grads.items()}
        norm = _finish_gradients(named, divisor, recipe.clip_grad_norm, auxiliary.grads)
        grads = {name: None if p.grad is None else p.grad.clone() for name, p in named.items()}
        torch_internals.step(optimizer)
        optimizer.zero_grad(set_to_none=True)
        with apart.together():
            _after_update(model)
        seen = Observation(
            total / count + auxiliary.value,
            grads,
            _values(named),
            norm,
            optimizer.param_groups[0]["lr"],
            count=count,
            buffers=apart.first() if first_buffers else apart.mean(),
            samples=[samples_of(batch)],
            auxiliary=besides,
        )
        known.append(seen.params)
        steps.append(replace(seen, contributions=added, stale_grads=stale))
    return Record(start, steps)


def _at(old: nn.Module, params: Tensors, model: nn.Module) -> nn.Module:
    """`old` with those parameters, and the buffers of `model`. A module that has run may hold a
    graph, and then no copy of it can be made.
    """
    with torch.no_grad():
        for name, parameter in old.named_parameters():
            parameter.copy_(params[name])
            parameter.grad = None
        now = dict(model.named_buffers())
        for name, buffer in old.named_buffers():
            buffer.copy_(now[name])
    return old


def _stale_gradients(
    old: nn.Module, recipe: Recipe, parts: Sequence[Slice], *, seeded: bool
) -> dict[str, Tensor | None]:
    """The gradient of this step with the weights of one update ago."""
    named = dict(old.named_parameters())
    _, _, divisor, auxiliary = _accumulate(old, recipe.loss, parts, seeded=seeded)
    _finish_gradients(named, divisor, recipe.clip_grad_norm, auxiliary.grads)
    return {name: p.grad for name, p in named.items()}


def call(model: nn.Module, inputs: PyTree) -> PyTree:
    """Run the model: a mapping is its keywords, a tuple or list its arguments.

    A list of one entry for each sample is one argument.
    """
    if isinstance(inputs, Mapping):
        return model(**inputs)
    several = isinstance(inputs, tuple | list) and not is_per_sample(inputs)
    return model(*inputs) if several else model(inputs)


def _values(named: dict[str, nn.Parameter]) -> Tensors:
    return {name: parameter.detach().clone() for name, parameter in named.items()}


def _accumulate(
    model: nn.Module,
    loss: Loss,
    parts: Sequence[Slice],
    *,
    seeded: bool,
    apart: BuffersApart | None = None,
) -> tuple[float, float, float, Auxiliary]:
    """The gradient of the mean loss into `.grad`, but for a divisor.

    Returns the summed loss, the count, the divisor, and what modules add to the mean loss. The
    divisor is 1 but where the parts have another count than was expected.
    """
    total = count = 0.0
    if apart is not None:
        for part in parts:  # also a rank that has no samples keeps its buffers
            apart.enter(part.rank)
    parts = [part for part in parts if num_samples(part.batch)]
    auxiliary = Auxiliary(model, sum(num_samples(part.batch) for part in parts))
    expected = expected_count(loss, [part.batch for part in parts])
    pool = Pool(model)
    for group in _groups(parts) if seeded else [[part] for part in parts]:
        samples = sum(num_samples(part.batch) for part in group)
        again = functools.partial(_run_all, model, group, seeded) if len(group) > 1 else None
        with pool.of(samples, again):
            for part in group:
                if apart is not None:
                    apart.enter(part.rank)
                with random_from(part.seed, seeded):
                    value, number = loss_sum(loss, call(model, part.batch[0]), part.batch)
                auxiliary.add(samples)
                if len(parts) == 1:
                    expected = number or 1.0
                (value / expected).backward()
                total = total + float(value.detach())
                count = count + number
    count = count or 1.0
    return total, count, count / expected, auxiliary


def _run_all(model: nn.Module, parts: Sequence[Slice], seeded: bool) -> None:
    for part in parts:
        with random_from(part.seed, seeded):
            call(model, part.batch[0])


def _groups(parts: Sequence[Slice]) -> list[list[Slice]]:
    """The slices of each micro-batch, of all ranks."""
    numbers = sorted({part.micro_batch for part in parts})
    return [[part for part in parts if part.micro_batch == number] for number in numbers]


def _contribution(model: nn.Module, loss: Loss, part: Slice) -> Contribution:
    """The contribution of one slice at the present weights.

    Buffers, such as the running statistics of a batch norm, stay as they are.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not num_samples(part.batch):
        return Contribution(part.rank, part.micro_batch, 0.0, {})
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with random_from(part.seed):
        value, count = loss_sum(loss, call(model, part.batch[0]), part.batch)
    grads = torch.autograd.grad(value, list(named.values()), allow_unused=True)
    for name, buffer in model.named_buffers():
        buffer.copy_(kept[name])
    return Contribution(part.rank, part.micro_batch, count, dict(zip(named, grads, strict=True)))


def _finish_gradients(
    named: dict[str, nn.Parameter],
    divisor: float,
    clip: float | None,
    auxiliary: Mapping[str, Tensor],
) -> float:
    """Divide by what is left of the global count, add the auxiliary losses', clip; the norm before
    clipping.
    """
    grads = [p.grad for p in named.values() if p.grad is not None]
    for grad in grads:
        grad.div_(divisor)
    for name, grad in auxiliary.items():
        known = named[name].grad
        named[name].grad = grad if known is None else known.add_(grad)
    grads = [p.grad for p in named.values() if p.grad is not None]
    norm = (
        float(torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt())
        if grads
        else 0.0
    )
    if clip is not None and norm + CLIP_EPSILON > clip:
        for grad in grads:
            grad.mul_(clip / (norm + CLIP_EPSILON))
    return norm


def _by_micro_batch(parts: Sequence[Slice]) -> list[Slice]:
    """The slices with the same micro-batch put together again, in the order of the ranks."""
    joined_slices = []
    for group in _groups(parts):
        batch = joined([part.batch for part in group])
        joined_slices.append(Slice(0, group[0].micro_batch, batch))
    return joined_slices


def _after_update(model: nn.Module) -> None:
    """Let modules that learn by other means than gradients (balancing by bias) have their turn."""
    for module in model.modules():
        act = getattr(module, "after_update", None)
        if act is not None:
            act()


def slicing_reasons(model: nn.Module, batch: Batch) -> list[str]:
    """Why a global batch at once has no meaning for this model, found by trying it; empty when it
    has. Errors: `ModelError` where synchronised batch norms must have the batch at once.
    """
    trial = copied(model)
    has_synced = bool(synced_norms(trial))
    without_statistics(trial)
    reasons = _slicing_reasons(trial, batch)
    if reasons and has_synced:
        raise ModelError(
            "SyncBatchNorm has one device take the parts of a micro-batch at once, and beside it "
            f"this model cannot: {reasons[0]}; verify the model with its dropout 0, and with all "
            "its batch norms synchronised (nn.SyncBatchNorm.convert_sync_batchnorm)"
        )
    return reasons


def _slicing_reasons(trial: nn.Module, batch: Batch) -> list[str]:
    samples = num_samples(batch)
    half = max(samples // 2, 1)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        before = persistent_buffers(trial)
        drawn = torch.get_rng_state()
        pythons = random.getstate()
        first = _output(trial, batch[0])
        # What adapters drop is multiplied by zeros at first, and draws all the same.
        draws = not torch.equal(drawn, torch.get_rng_state()) or pythons != random.getstate()
        part = _output(trial, taken_of(batch[0], range(half), samples))
        moved = any(
            not torch.equal(buffer, before[name])
            for name, buffer in persistent_buffers(trial).items()
        )
        by_sample = first.shape[:1] == (samples,)
        apart = by_sample and not _is_head(trial, batch[0], part, first)
        if draws or ((apart or not by_sample) and _differs_from_itself(trial, batch[0], first)):
            return [
                "its output is random (dropout), so the reference runs the same slices with the "
                "same seeds"
            ]
        if samples > 1 and apart:
            return [
                "a sample's output depends on the others in its slice (batch-norm): "
                "the reference runs the same slices, statistics are those of a micro-batch on a "
                "rank"
            ]
        if moved:
            return [
                "its buffers change with every forward, so the reference runs the same slices, "
                "each rank's with its own"
            ]
    return []


def _is_head(model: nn.Module, inputs: PyTree, part: Tensor, whole: Tensor) -> bool:
    """Whether the first samples alone have the outputs that they have among the others.

    How far they may lie apart is asked only where they are not close at once: a forward is saved.
    """
    head = whole[: len(part)]
    return _close(part, head, SURELY) or _close(part, head, _slack(model, inputs, whole.dtype))


def _differs_from_itself(model: nn.Module, inputs: PyTree, first: Tensor) -> bool:
    """Whether the same inputs give another output, by chance that torch does not draw."""
    torch.manual_seed(2)
    return not torch.equal(first, _output(model, inputs))


def pooled_losses(model: nn.Module) -> list[str]:
    """The reason why slices of a micro-batch belong together; empty if there is none.

    It is a loss of all their tokens by definition, or statistics of all their samples.
    """
    if synced_norms(model):
        return [
            "its SyncBatchNorm takes statistics over a micro-batch of all ranks, so the reference "
            "runs micro-batch by micro-batch"
        ]
    pooled = any(
        getattr(getattr(module, "settings", None), "balance_coef", 0.0)
        for module in model.modules()
    )
    if not pooled:
        return []
    return [
        "its balance loss is that of a micro-batch over all ranks, so the reference runs "
        "micro-batch by micro-batch"
    ]


def _output(model: nn.Module, inputs: PyTree) -> Tensor:
    output = call(model, inputs)
    found = next(iter(tensors_of(output)), None)
    if found is None:
        what = f"the model returned a {type(output).__name__}, in which no tensor is found"
        raise ModelError(f"{what}; return tensors, or dicts or dataclasses of them")
    return found


def _slack(model: nn.Module, inputs: PyTree, dtype: torch.dtype) -> float:
    """How far outputs of one sample may lie apart, by the coarsest precision that takes part."""
    with LowPrecision(torch.float64) as watch, torch.enable_grad():
        call(model, inputs)
    return 1e-3 if watch.found or dtype != torch.float64 else SURELY


def _close(one: Tensor, other: Tensor, slack: float) -> bool:
    return one.shape == other.shape and float((one - other).abs().max()) <= slack * max(
        float(other.abs().max()), 1e-30
    )

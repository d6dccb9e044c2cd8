"""The standard probes: the cases in which real frameworks are silently wrong, as one table.

Each probe changes the problem or the plan and says why. A probe without a meaning for a model (no
token, no tied weights) says so and is left out. It never counts as passed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from plait import models
from plait.origin import ONE_VALUE
from plait.plan import Plan
from plait.values import JsonMapping
from plait.verify.problem import Problem, with_keys
from plait.verify.reference.batches import taken
from plait.verify.reference.one_device import call

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
Change = Callable[[Problem, Plan, int], "tuple[Problem, Plan] | str"]


@dataclass(frozen=True)
class Probe:
    """`change(problem, plan, steps)` gives the changed problem and plan, or the reason why the
    probe does not apply.

    `optimizer` is what it trains with: SGD shows a wrong scale, AdamW a wrong state.
    """

    name: str
    why: str
    optimizer: str
    change: Change

    def apply(self, problem: Problem, plan: Plan, steps: int) -> tuple[Problem, Plan] | str:
        """The problem and plan of this probe, with its optimizer."""
        changed = self.change(problem, plan, steps)
        return (
            changed
            if isinstance(changed, str)
            else (with_optimizer(changed[0], self.optimizer), changed[1])
        )


def with_optimizer(problem: Problem, optimizer: str) -> Problem:
    """The problem trained by `sgd` with momentum, or by `adamw`; both with weight decay, and rates
    that show. A config with `muon` takes that in the place of AdamW, which is a part of it.

    A loss of large gradients, as a sum over pixels, gets a rate within `problem.largest_rate`.
    AdamW gets an eps above rounding. Otherwise it would turn a gradient of rounding noise into a
    step of full length.
    """
    eps = max(problem.train.eps, 1e-5)
    if optimizer == "adamw" and problem.train.optimizer == "muon":
        optimizer = "muon"
    keys = {"optimizer": optimizer, "weight_decay": problem.train.weight_decay or 0.1, "eps": eps}
    if optimizer == "sgd":
        rate = min(max(problem.train.lr, 0.05), problem.largest_rate)
        keys |= {"momentum": problem.train.momentum or 0.9, "lr": rate}
    return replace(problem, train=with_keys(problem.train, **keys))


def _as_it_is(problem: Problem, plan: Plan, steps: int) -> tuple[Problem, Plan]:
    return problem, plan


def _uneven_tokens(problem: Problem, plan: Plan, steps: int) -> tuple[Problem, Plan] | str:
    return _no_mask(problem) or (replace(problem, masked=True), plan)


def _no_mask(problem: Problem) -> str | None:
    """Why no target of the problem can be masked; None where it can."""
    inputs, targets = next(problem.loader())
    if not isinstance(targets, Tensor):
        return "its targets are several tensors, and only one of classes can be masked"
    if targets.is_floating_point():
        return "its targets are no classes, so none can be masked"
    if problem.train.loss is not None:
        model = problem.make_whole_model(torch.float32)
        with torch.no_grad():
            two = taken((inputs, targets), range(2))
            if not isinstance(problem.loss(call(model, two[0]), two[1]), tuple):
                return (
                    "its loss returns a mean over samples; one that returns (sum, count) may mask "
                    "targets"
                )
    return None


def _accumulation(problem: Problem, plan: Plan, steps: int) -> tuple[Problem, Plan] | str:
    more = 3 if plan.micro_batches == 1 else 2 * plan.micro_batches
    slices = more * plan.dp.size
    if problem.train.global_batch < 2 * slices and _needs_two(problem):
        return f"its batch norm needs 2 samples a slice, and mb{more} leaves one"
    return replace(problem, masked=_no_mask(problem) is None), replace(plan, micro_batches=more)


def _clipping(problem: Problem, plan: Plan, steps: int) -> tuple[Problem, Plan]:
    return replace(problem, train=with_keys(problem.train, clip_grad_norm=1e-2)), plan


def _schedule(problem: Problem, plan: Plan, steps: int) -> tuple[Problem, Plan]:
    keys = {"schedule": "cosine", "warmup_steps": 1, "steps": steps + 2}
    return replace(problem, train=with_keys(problem.train, **keys)), plan


def _tied(problem: Problem, plan: Plan, steps: int) -> tuple[Problem, Plan] | str:
    if "tie_word_embeddings" not in _keys(problem):
        if _is_tied(problem):
            return problem, plan
        return "the model has no weights that can be tied"
    return replace(problem, model={**problem.model, "tie_word_embeddings": True}), plan


def _is_tied(problem: Problem) -> bool:
    model = problem.make_model()
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return len(names) > len(list(model.named_parameters()))


def _frozen_and_unused(problem: Problem, plan: Plan, steps: int) -> tuple[Problem, Plan] | str:
    model = problem.make_model()
    names = [name for name, _ in model.named_parameters()]
    frozen = [names[0], *[name for name in names if name.endswith(".bias")][::2]]
    if len(set(frozen)) >= len(names):
        return "the model has too few parameters to freeze some"
    idle = not isinstance(model, nn.Sequential)  # its forward uses whatever is added
    return replace(problem, frozen=tuple(frozen), idle=idle), plan


def _last_batch(problem: Problem, plan: Plan, steps: int) -> tuple[Problem, Plan] | str:
    if steps < 2:
        return "it needs two steps"
    slices = plan.dp.size * plan.micro_batches
    short = max(min(problem.train.global_batch - 1, 3 * slices - 1), 1)
    if short < 2 * slices and _needs_two(problem):
        return f"its batch norm needs 2 samples a slice, and {short} samples leave one"
    full = max(steps - 2, 1)  # of three steps the last is of another epoch, in an order of its own
    return replace(problem, num_samples=full * problem.train.global_batch + short), plan


def _needs_two(problem: Problem) -> bool:
    """Whether the model has a batch norm that one sample gives one value a channel."""
    model = problem.make_whole_model(torch.float32)
    if not any(isinstance(module, BATCH_NORMS) for module in model.modules()):
        return False
    one = taken(next(problem.loader()), range(1))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            call(model, one[0])
    except ValueError as error:
        return str(error).startswith(ONE_VALUE)
    return False


def _thresholds(problem: Problem, plan: Plan, steps: int) -> tuple[Problem, Plan]:
    return replace(problem, hurried=True), plan


def _dropout(problem: Problem, plan: Plan, steps: int) -> tuple[Problem, Plan] | str:
    rates = [key for key in _keys(problem) if key.endswith(("dropout", "pdrop"))]
    if not rates:
        return "the model has no dropout"
    if plan.cp.size > 1:
        return (
            "no part of a sequence has random numbers of its own, so a context axis refuses dropout"
        )
    return replace(problem, model={**problem.model, **dict.fromkeys(rates, 0.2)}), plan


def _keys(problem: Problem) -> JsonMapping:
    name = problem.model.get("name")
    if name not in models.CLASSES:
        return {}
    return inspect.signature(getattr(models.module_of(name), models.CLASSES[name])).parameters


PROBES: dict[str, Probe] = {
    probe.name: probe
    for probe in (
        Probe("sgd", "a wrong scale, which AdamW hides", "sgd", _as_it_is),
        Probe("adamw", "a wrong optimizer state, which SGD does not have", "adamw", _as_it_is),
        Probe(
            "uneven-tokens",
            "every rank and micro-batch has another number of unmasked targets",
            "sgd",
            _uneven_tokens,
        ),
        Probe("accumulation", "more micro-batches a step, unevenly masked", "sgd", _accumulation),
        Probe("clipping", "the global norm, from parts on all ranks", "sgd", _clipping),
        Probe("schedule", "a learning rate that changes with every step", "sgd", _schedule),
        Probe("tied", "one weight used twice", "adamw", _tied),
        Probe(
            "frozen-unused",
            "parameters without a gradient must not move",
            "adamw",
            _frozen_and_unused,
        ),
        Probe(
            "last-batch",
            "a batch that does not divide among ranks and micro-batches",
            "sgd",
            _last_batch,
        ),
        Probe(
            "thresholds",
            "ways that only large tensors take, and what happens every few steps",
            "sgd",
            _thresholds,
        ),
        Probe("dropout", "random numbers that belong to a slice of the batch", "adamw", _dropout),
    )
}

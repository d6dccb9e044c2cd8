"""The guard of the update: a step whose loss or gradient is no number, or a spike, changes nothing.

The sums that it looks at are equal on every rank, so all decide alike without asking. Only then is
the origin looked for: weights, batch, a replay of the forward, losses, gradients. The first that is
no number names module, micro-batch and sample.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from plait.comm import World
from plait.doctor.findings import Symptom
from plait.engine.loss import LossTotals
from plait.engine.options import Options
from plait.engine.stages.pipeline import Pipeline
from plait.errors import NonFiniteLoss, NotAvailable
from plait.parallel.data import DataStrategy
from plait.plan import Plan
from plait.plan.facts import SCHEDULES, STRATEGIES
from plait.values import JsonObject, PyTree

HISTORY: Final = 32
LEAST_HISTORY: Final = 3
SPIKE_FACTOR: Final = 20.0
SAMPLES_NAMED: Final = 4

Tell = Callable[[Symptom], None]


@dataclass(frozen=True)
class Origin:
    """Where one rank has seen what is no number; a smaller `order` is nearer to the cause.

    `size` is the loss or the gradient that stands out, where all are numbers.
    """

    order: int
    where: str
    cause: str
    size: float = 0.0
    micro_batch: int | None = None
    module: str | None = None
    samples: tuple[int, ...] = ()


@dataclass(frozen=True)
class Suspect:
    """The parts of a rank in which an origin is looked for."""

    world: World
    model: nn.Module
    pipeline: Pipeline
    strategy: DataStrategy
    together: bool = True
    """Whether the ranks update together, so that they can decide together."""


class Guard:
    """Judges each step of one engine. The answer to a bad one is `stop`, `skip` or `back`.

    `spike_factor` is the multiple of the median gradient norm from which a step is judged so too.

    Attributes:
        skipped: whether the last step was dropped.
        rolls_back: whether an earlier state is to be loaded, and the steps since replayed.
        listeners: they are called with each finding, on every rank.
    """

    def __init__(self, answer: str = "stop", *, spike_factor: float | None = None) -> None:
        self.skipped = False
        self.rolls_back = False
        self.listeners: list[Tell] = []
        self._answer = answer
        self._factor = spike_factor
        self._norms: deque[tuple[int, float]] = deque(maxlen=HISTORY)
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self._replayed_from = 0
        self._tried: set[int] = set()
        self._open: dict[int, Symptom] = {}

    def begin(self, model: nn.Module) -> None:
        """A step begins; buffers that a dropped step would change are kept.

        Raises:
            NotAvailable: an earlier state was to be loaded first.
        """
        if self.rolls_back:
            raise NotAvailable(
                "on_nan 'back': the last step was no number; load an earlier state and call "
                "engine.guard.rolled_back(step) before the next one, or take on_nan 'skip'"
            )
        self.skipped = False
        if self._answer != "stop":
            with torch.no_grad():
                self._buffers = [(one, one.clone()) for one in model.buffers()]

    def judge(self, totals: LossTotals, step: int, suspect: Suspect, *, norm: bool) -> bool:
        """Whether the step counts. Collective where it does not.

        Errors: those of `LossTotals.check`, with the origin where a number is none.
        """
        if not suspect.together:
            if totals.count:
                totals.check(step, norm=norm)
            return True
        totals.check_counts(step)
        wrong = totals.not_finite(norm=norm)
        if wrong is not None:
            finding = _finding("nan", step, origin_of(suspect))
            return self._refuse(finding, f"{totals.complaint(step, wrong)}. ")
        counts = not norm or self._is_usual(totals.grad_norm, step, suspect)
        if counts and step in self._open:
            passing = self._open.pop(step)
            self._report(self._judged(passing, "passing", "is finite"))
        return counts

    def rolled_back(self, step: int) -> None:
        """Training goes on after this earlier step, whose state has been loaded."""
        self.rolls_back = False
        self._replayed_from = step
        kept = [one for one in self._norms if one[0] <= step]
        self._norms = deque(kept, maxlen=HISTORY)

    def _is_usual(self, size: float, step: int, suspect: Suspect) -> bool:
        """Whether a gradient is of the size of those before; findings say where it is not."""
        known = sorted(norm for _, norm in self._norms)
        middle = statistics.median(known) if len(known) >= LEAST_HISTORY else math.inf
        factor = SPIKE_FACTOR if self._factor is None else self._factor
        if middle == 0.0 or size <= factor * middle:
            self._norms.append((step, size))
            return True
        finding = _finding("spike", step, loudest(suspect, size, middle))
        if self._factor is None:
            self._report(finding)
            self._norms.append((step, size))
            return True
        complaint = (
            f"step {step}: the gradient norm is {size:.4g}, {size / middle:.1f} times the "
            f"median of the last {len(known)} steps, and [recovery] spike_factor is "
            f"{factor:g}; the parameters are still those of step {step - 1}. "
        )
        return self._refuse(finding, complaint)

    def _refuse(self, finding: Symptom, complaint: str) -> bool:
        """Answer a step that is not to count. A step that is replayed is never so again.

        Errors: `NonFiniteLoss`, where the run is to end.
        """
        step = finding.step
        assert step is not None
        if self._answer == "back":
            if step not in self._tried:
                self._tried.add(step)
                self._open[step] = finding
                self.rolls_back = True
                self._drop()
                return False
            finding = self._judged(finding, "lasting", "gives it again")
        self._report(finding)
        if self._answer == "skip":
            self._drop()
            return False
        raise NonFiniteLoss(complaint + _sentence(finding))

    def _judged(self, finding: Symptom, kind: str, told: str) -> Symptom:
        """The finding, with the word of the replay."""
        first = finding.cause.removeprefix("passing: ")
        cause = f"{kind}: a replay from step {self._replayed_from} {told}; {first}"
        details = {**finding.details, "replayed_from": self._replayed_from}
        return replace(finding, cause=cause, details=details)

    def _drop(self) -> None:
        self.skipped = True
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)

    def _report(self, finding: Symptom) -> None:
        for listener in self.listeners:
            listener(finding)


def origin_of(suspect: Suspect) -> tuple[int, Origin]:
    """The rank and the place where something that is no number came from. Collective."""
    found = _bad_weight(suspect) or Origin(9, "", "")
    replayed = _replayed(suspect)
    for other in (_bad_input(suspect), replayed, _bad_loss(suspect), _bad_gradient(suspect)):
        if other is not None and other.order < found.order:
            found = other
    told: list[Origin] = suspect.world.axis("world").gather_objects(found)
    rank = min(range(len(told)), key=lambda one: (told[one].order, one))
    if told[rank].order == 9:
        return 0, Origin(9, "the step", "nothing that this version looks at shows where it began")
    return rank, told[rank]


def loudest(suspect: Suspect, size: float, middle: float) -> tuple[int, Origin]:
    """The rank and the micro-batch whose loss stands out most, else the rank whose gradient does.
    Collective.

    Backward carries a large gradient on to earlier stages, where it may be larger still. So of
    the stages whose gradient stands out the last one is named.
    """
    losses = [float(loss) for loss in suspect.pipeline.loss.means()]
    stage_norms = {
        stage: float(part.strategy.squared_norm(None)) ** 0.5
        for stage, part in suspect.pipeline.parts.items()
    }
    of_ranks = suspect.world.axis("world").gather_objects((losses, stage_norms))
    cause = f"the gradient norm is {size:.4g}, {size / middle:.1f} times the median"
    ranked = [(max(each), rank) for rank, (each, _) in enumerate(of_ranks) if each]
    spread = max(ranked)[0] > 1.2 * min(ranked)[0] if ranked else False
    if spread:
        largest, rank = max(ranked)
        index = of_ranks[rank][0].index(largest)
        where = f"micro-batch {index}, whose loss is {largest:.4g}"
        return rank, Origin(0, where, cause, largest, index)
    norms = [
        (stage if norm > SPIKE_FACTOR * middle else -1, norm, -rank)
        for rank, (_, of_stages) in enumerate(of_ranks)
        for stage, norm in of_stages.items()
    ]
    _, largest, rank = max(norms)
    return -rank, Origin(0, "the gradient of this rank's parameters", cause, largest)


def _finding(kind: str, step: int, found: tuple[int, Origin]) -> Symptom:
    rank, origin = found
    details: JsonObject = {"module": origin.module, "micro_batch": origin.micro_batch}
    details["samples"] = list(origin.samples)
    return Symptom(kind, rank, step, origin.where, origin.cause, details=details)


def _sentence(finding: Symptom) -> str:
    return f"It began on rank {finding.rank}, in {finding.where}: {finding.cause}"


def _bad_weight(suspect: Suspect) -> Origin | None:
    """The first parameter that has an element that is no number.

    What this rank keeps for all comes first: the others see a bad element too, once they have
    gathered it.
    """
    strategy = suspect.strategy
    kept = [
        *((piece.name, piece.value) for piece in strategy.pieces),
        *((shard.name, shard.values) for shard in strategy.frozen_shards(trained=True)),
    ]
    for order, held in enumerate((kept, suspect.model.named_parameters())):
        for name, param in held:
            if param.untyped_storage().nbytes() and not is_finite(param.detach()):
                module = name.rpartition(".")[0]
                count = int((~torch.isfinite(param.detach())).sum())
                cause = f"weight: {count} elements of {name} are no finite numbers"
                where = f"module {module or 'the model'}, {name}"
                return Origin(order, where, cause, module=module)
    return None


def _bad_input(suspect: Suspect) -> Origin | None:
    """The first micro-batch that was no number when it came."""
    for index, inputs, num_samples in suspect.pipeline.batches():
        if all(is_finite(one) for one in _numbers(inputs)):
            continue
        samples = _bad_samples(inputs, num_samples)
        which = _which(samples)
        cause = "data: the batch itself has an element that is no finite number"
        return Origin(2, f"the batch, micro-batch {index}{which}", cause, 0.0, index, "", samples)
    return None


def _which(samples: tuple[int, ...]) -> str:
    return f", sample {', '.join(map(str, samples))}" if samples else ""


def _replayed(suspect: Suspect) -> Origin | None:
    """The first module whose output is no number when the step's forward is done again.

    Collective: stages send each other what they sent.
    """
    seen: list[Origin] = []
    pipeline = suspect.pipeline
    with _watched(suspect.model, pipeline, seen), torch.no_grad():
        loss = pipeline.replay()
    if seen:
        return seen[0]
    bad = [index for index, one in enumerate(loss.means()) if not math.isfinite(float(one))]
    if bad:
        cause = "loss function: the output is finite, and its loss is not"
        return Origin(4, f"the loss of micro-batch {bad[0]}", cause, micro_batch=bad[0])
    return None


@contextmanager
def _watched(model: nn.Module, pipeline: Pipeline, seen: list[Origin]) -> Iterator[None]:
    """Have the first module noted that makes something that is no number of finite inputs."""

    def look(name: str, args: PyTree, output: PyTree) -> None:
        if seen or all(is_finite(one) for one in _numbers(output)):
            return
        if not all(is_finite(one) for one in _numbers(args)):
            return
        samples = _bad_samples(output, pipeline.samples_under_way)
        index = pipeline.under_way
        where = f"module {name or 'the model'}, micro-batch {index}{_which(samples)}"
        cause = "activation: finite inputs give an output that is no finite number"
        seen.append(Origin(3, where, cause, 0.0, index, name, samples))

    handles = [
        module.register_forward_hook(
            lambda module, args, output, name=name: look(name, args, output)
        )
        for name, module in model.named_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _bad_samples(output: PyTree, num_samples: int) -> tuple[int, ...]:
    """The samples of a micro-batch whose output is no number; empty where it is all of them."""
    for one in _numbers(output):
        if one.dim() > 1 and one.shape[0] == num_samples:
            flat = torch.isfinite(one).flatten(1).all(1)
            bad = (~flat).nonzero().flatten().tolist()
            return tuple(bad[:SAMPLES_NAMED]) if len(bad) < num_samples else ()
    return ()


def _bad_loss(suspect: Suspect) -> Origin | None:
    """The first micro-batch of this rank whose loss was no number, and is one in a replay."""
    for index, loss in enumerate(suspect.pipeline.loss.means()):
        if not math.isfinite(float(loss)):
            cause = "passing: a replay of the step is finite, so a value changed for a moment"
            return Origin(5, f"micro-batch {index}", cause, micro_batch=index)
    return None


def _bad_gradient(suspect: Suspect) -> Origin | None:
    """The last parameter whose gradient is no number: backward comes to it first."""
    bad = [
        piece.name
        for piece in suspect.strategy.pieces
        if piece.value.grad is not None and not is_finite(piece.value.grad)
    ]
    if not bad:
        return None
    module = bad[-1].rpartition(".")[0]
    cause = "gradient: the loss is finite, and its gradient is not"
    return Origin(6, f"module {module or 'the model'}, {bad[-1]}", cause, module=module)


def is_finite(tensor: Tensor) -> bool:
    """Whether all elements of a tensor [...] are numbers."""
    return bool(torch.isfinite(tensor).all())


def _numbers(values: PyTree) -> list[Tensor]:
    return [
        one.detach()
        for one in tree_leaves(values)
        if isinstance(one, Tensor) and one.is_floating_point() and one.numel()
    ]


def make_guard(plan: Plan, options: Options) -> Guard:
    """The guard of an engine. Errors: `NotAvailable` where a step cannot be dropped as a whole."""
    together = STRATEGIES[plan.dp.strategy].synchronous
    drains = not SCHEDULES[plan.pp.schedule].asynchronous
    if options.on_nan != "stop" and not (together and drains):
        raise NotAvailable(
            f"'{plan}': on_nan '{options.on_nan}' drops a step on all ranks at once, and those of "
            "this plan do not step together; use on_nan 'stop', or a synchronous plan"
        )
    return Guard(options.on_nan, spike_factor=options.spike_factor)

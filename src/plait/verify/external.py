"""Check a parallel training step of other code: torch DDP, FSDP2, torch's pipelining, DeepSpeed, or
a loop of one's own.

Nothing is known of the framework. Each of the two functions does one training step and returns its
results. Their distance, and its pattern, is the same question as for a plan of this library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from plait.values import JsonMapping, PyTree
from plait.verify.diagnosis.diagnose import diagnose
from plait.verify.diagnosis.finding import Facts
from plait.verify.record.compare import Difference, Key, differences, refusals, tolerance_of
from plait.verify.record.observation import Observation, Record, Tensors, merge
from plait.verify.report import Report

Step = Callable[[int], "Observation | JsonMapping"]


@dataclass(frozen=True)
class Parallel:
    """Facts about the parallel step; all are optional and make the findings sharper.

    `facts` are axis sizes and other numbers that a wrong factor may be. `gather(object) -> list`
    collects one object from every rank in rank order, for instance by
    `torch.distributed.all_gather_object`. With it replicas are compared, stages of a pipeline are
    put together, and every rank returns the same report. `aliases` names copies of one parameter
    (tied weights on two stages), `{copy: name}`. `start` gives the parameters before the first
    step.
    """

    facts: Facts = field(default_factory=Facts)
    gather: Callable[[object], list[PyTree]] | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    start: Callable[[], Tensors] | None = None
    name: str = "the parallel step"


def differential(
    reference_step: Step,
    parallel_step: Step,
    *,
    steps: int = 1,
    tolerance: float | None = None,
    start: Tensors | None = None,
    parallel: Parallel | None = None,
) -> Report:
    """Run both steps `steps` times and compare loss, every gradient and every parameter.

    Args:
        reference_step: takes the number of the step, does it, and returns `loss`, `grads` and
            `params`: an `Observation` or a mapping. The last two map a name to a whole tensor
            [...], and are copies (see `gradients_of` and `parameters_of`). It runs alike on every
            rank.
        parallel_step: returns these of the parallel run. A loss that a rank does not know is NaN.
        steps: from 1.
        tolerance: the largest relative error that passes; by default it follows the dtype.
        start: the reference's parameters before the first step. With them, weights that do not move
            are noticed from the first step.
        parallel: facts of the parallel run, which make the findings sharper.

    Returns:
        The report. Nothing is raised for a difference: see `Report.ok`, `Report.text()`.
    """
    about = parallel or Parallel()
    begun = about.start() if about.start is not None else None
    mine_start = (
        _together(about, [Observation(0.0, {}, begun)]).params if begun is not None else None
    )
    truth = []
    mine = []
    for step in range(steps):
        truth.append(Observation.of(reference_step(step)))
        mine.append(_together(about, [Observation.of(parallel_step(step))]))
    return judge(
        Record(mine_start, mine),
        Record(start, truth),
        about.facts,
        tolerance=tolerance,
        plan=about.name,
    )


def _together(about: Parallel, own: Sequence[Observation]) -> Observation:
    """The observations of all ranks as one; this rank's own one when ranks cannot be asked."""
    if about.gather is None:
        return merge(own, about.aliases) if about.aliases else own[0]
    return merge(about.gather(own[0]), about.aliases)


def judge(
    parallel: Record,
    reference: Record,
    facts: Facts | None = None,
    *,
    tolerance: float | None = None,
    limits: Mapping[Key, float] | None = None,
    errors: Mapping[Key, float] | None = None,
    more: Sequence[Difference] = (),
    slack: float | None = None,
    plan: str = "",
    world_size: int | None = None,
) -> Report:
    """The verdict on two records: refusals, differences, findings. Pure.

    `limits` are the largest errors that pass for single numbers, where the tolerance is too tight.
    `errors` stand in place of the errors of single numbers, as far as nothing explains them.
    `more` are further differences, with their limits. `slack` is how exact an explanation has to
    be; by default it follows the tolerance.
    """
    refused = refusals(parallel, reference)
    limit = tolerance_of(reference) if tolerance is None else tolerance
    comparable = len(parallel.steps) == len(reference.steps)
    found = list(differences(parallel, reference)) if comparable else []
    if limits:
        found = [replace(one, limit=limits.get(one.key)) for one in found]
    if errors:
        found = [replace(one, error=errors.get(one.key, one.error)) for one in found]
    found += more
    size = world_size or max((len(seen.ranks) for seen in parallel.steps), default=0) or 1
    report = Report(found, refused, (), limit, len(reference.steps), plan=plan, world_size=size)
    return replace(
        report,
        findings=diagnose(parallel, reference, report.failed, facts or Facts(), limit, slack=slack),
    )

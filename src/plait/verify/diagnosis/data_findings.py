"""Findings about the data of a step: which samples the ranks read, against the global batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from plait.errors import some_of
from plait.verify.diagnosis.finding import Finding
from plait.verify.diagnosis.view import View
from plait.verify.record.samples import Samples


def data_findings(view: View) -> list[Finding]:
    """Samples that were not read, or twice, or with another sample's targets."""
    whole = next(iter(view.truth.samples), ())
    if not whole or not any(view.mine.samples):
        return []
    lines = view.facts.lines.get("dp", [(rank,) for rank in range(len(view.mine.samples))])
    for line in lines:
        read = [view.mine.samples[rank] for rank in line]
        found = _of_line(read, whole, view)
        if found is not None:
            return [found]
    return []


def _of_line(read: Sequence[Samples], whole: Samples, view: View) -> Finding | None:
    """The finding on the data ranks that share one batch."""
    seen = [sample for part in read for sample in part]
    if Counter(seen) == Counter(whole):
        return None
    axis = "dp" if len(read) > 1 else "data"
    known = {inputs: number for number, (inputs, _) in enumerate(whole)}
    if not any(inputs in known for inputs, _ in seen):
        return Finding("data-order", "data", f"the batch is another one{_which(seen, view)}", 0.98)
    if Counter(inputs for inputs, _ in seen) == Counter(inputs for inputs, _ in whole):
        pairs = dict(whole)
        wrong = [known[inputs] for inputs, target in seen if pairs[inputs] != target]
        text = f"{_samples(wrong)} read with the targets of another sample"
        return Finding("targets", axis, text, 0.98)
    count = Counter(inputs for inputs, _ in seen)
    twice = [number for inputs, number in known.items() if count[inputs] > 1]
    never = [number for inputs, number in known.items() if not count[inputs]]
    foreign = [inputs for inputs in count if inputs not in known]
    texts = []
    if twice:
        texts.append(f"{_samples(twice)} read more than once")
    if never:
        texts.append(f"{_samples(never)} read by no rank")
    if foreign:
        texts.append(f"{len(foreign)} samples are of another batch")
    return Finding("samples", axis, ", and ".join(texts), 0.98) if texts else None


def _which(seen: Samples, view: View) -> str:
    """Whether it is the batch of the step before."""
    before = () if view.truth_before is None else next(iter(view.truth_before.samples), ())
    if before and {inputs for inputs, _ in seen} <= {inputs for inputs, _ in before}:
        return ": that of the step before, read once more"
    return ": its place in the order is wrong, or the order was drawn again"


def _samples(numbers: Sequence[int]) -> str:
    names = some_of([str(number) for number in sorted(set(numbers))], 8)
    plural = len(set(numbers)) > 1
    return f"sample{'s' if plural else ''} {names} of the batch {'are' if plural else 'is'}"
